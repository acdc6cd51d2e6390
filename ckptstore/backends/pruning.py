"""Removing many files of a directory store: each folder is synced once, after all that goes from it."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress

from ckptstore.backends.durable import storage_errors, sync
from ckptstore.backends.folders import Folders
from ckptstore.errors import CkptStoreError


def delete_files(folders: Folders, keys: Collection[str]) -> dict[str, CkptStoreError]:
    """Remove the files of ``keys`` durably; one that is absent counts as removed.

    Returns why each of those that are left, or may be, could not be removed.
    """
    by_folder: dict[tuple[str, ...], list[str]] = {}
    for key in keys:
        by_folder.setdefault(tuple(key.split("/")[:-1]), []).append(key)
    failed: dict[str, CkptStoreError] = {}
    for parts, inside in by_folder.items():
        place = folders.path.joinpath(*parts)
        try:
            with storage_errors(f"deleting keys in {place}", place, needed=0):
                failed |= _delete_in(folders, parts, inside)
        except CkptStoreError as error:  # of the folder, or its sync: whether any of them is gone for good is not known
            failed |= dict.fromkeys(inside, error)
    return failed


def _delete_in(folders: Folders, parts: tuple[str, ...], keys: Sequence[str]) -> dict[str, CkptStoreError]:
    failed: dict[str, CkptStoreError] = {}
    with suppress(FileNotFoundError), folders.opened(parts) as folder:
        for key in keys:
            try:
                with storage_errors(f"deleting key {key}", folders.path / key, needed=0), suppress(FileNotFoundError):
                    os.unlink(key.rpartition("/")[2], dir_fd=folder)
            except CkptStoreError as error:
                failed[key] = error
        sync(folder)
    return failed
