"""A directory as a backend (docs/format.md section 6).

A key is the path of a read-only regular file below the directory. Whatever appears under its key is whole and synced:
it was written under ``tmp/``, synced, closed, given its name with link(2), which never replaces, and the folder synced.
No path is followed through a symbolic link below the directory, and nothing but a regular file is ever read.
"""

from __future__ import annotations

import builtins
import errno
import os
import secrets
import stat as modes
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Self

from ckptstore.backends.durable import NO_HARD_LINKS, make_folders, read_range, storage_errors, sync
from ckptstore.backends.flocks import LOCK, StoreLock, lock_folder
from ckptstore.backends.folders import Folders
from ckptstore.backends.foreign import foreign_keys
from ckptstore.backends.medium import read_from_medium
from ckptstore.backends.protocol import Buffer, ReadbackMethod, Stat, Traits, check_key, check_prefix
from ckptstore.backends.pruning import delete_files
from ckptstore.backends.temporaries import TEMPORARIES, remove_stale, temporary
from ckptstore.backends.window import window
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    CorruptError,
    NotFoundError,
    ReadOnlyError,
    RefusedError,
    UsageError,
)

QUARANTINE = "quarantine"

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EMLINK})  # a symbolic link, a socket

# What lies beside the keys and is none: this host's own files, and what the file system puts there.
_LOCAL_NAMES = frozenset({TEMPORARIES, QUARANTINE, "config.toml", LOCK, "lost+found"})
_LOCAL_PREFIX = "catalogue.sqlite"
_LOCAL_SUFFIX = ".lock"
_NFS_DELETED = ".nfs"  # an NFS client keeps a deleted file that is still open under such a name


class DirectoryBackend:
    """Keys to files below an existing directory. Holds nothing open between calls; safe for threads and after fork."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the directory ``path``, which is not changed.

        Raises:
            NotFoundError: there is no such directory.
        """
        self._path = Path(os.path.abspath(path))
        with storage_errors(f"opening store {self._path}", self._path):
            there = self._path.is_dir()
        if not there:
            why = "it is not a directory" if os.path.lexists(self._path) else "there is no such directory"
            raise NotFoundError(f"store {self._path}", why, "check the path, or create a new store there")
        self._folders = Folders(self._path)
        self._swept = False

    @classmethod
    def create_root(cls, path: str | os.PathLike[str]) -> Self:
        """Make the directory durably, with those above it, if it is missing, and open it.

        Raises:
            RefusedError: something that is no directory has that name.
            NoSpaceError, ReadOnlyError, BackendError: it cannot be made.
        """
        if os.path.lexists(path) and not os.path.isdir(path):
            raise RefusedError(f"store {os.path.abspath(path)}", "it is not a directory", "choose another name")
        with storage_errors(f"creating store {os.path.abspath(path)}", os.path.abspath(path), needed=0):
            make_folders(path)
        return cls(path)

    @property
    def path(self) -> Path:
        """The directory, as an absolute path."""
        return self._path

    @property
    def traits(self) -> Traits:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        return Traits(threads=min(4, os.cpu_count() or 1))

    @property
    def url(self) -> str:
        """The directory as a ``file://`` URL."""
        return self._path.as_uri()

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`. CorruptError if the key is no regular file."""
        with self._opened(key) as fd:
            return read_range(fd, *window(os.fstat(fd).st_size, offset, length))

    def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`. CorruptError if the key is no regular file."""
        with self._opened(key) as fd:
            return read_from_medium(fd, window(os.fstat(fd).st_size, 0, length)[1])

    def stat(self, key: str) -> Stat | None:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`. CorruptError if the key is no regular file."""
        parts = self._parts(key)
        with storage_errors(f"key {key}", self._path / key):
            try:
                with self._folders.opened(parts[:-1]) as folder:
                    return self._present(folder, key)
            except FileNotFoundError:
                return None

    def present(self, keys: Collection[str]) -> set[str]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        return {key for key in keys if self._may_be_there(key)}

    def list(self, prefix: str) -> Iterator[Stat]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`.

        Raises:
            CorruptError: something among the keys is no regular file or has no legal key as its path. It is named and
                not passed over, because what cannot be listed could not be verified or collected either.
        """
        parts = tuple(check_prefix(prefix).split("/")[:-1])
        return iter(()) if parts and _is_local(parts[0]) else self._walk(parts)

    def foreign(self, prefix: str) -> builtins.list[str]:
        """Keys right below ``prefix`` under which something lies that is no regular file, folders included; sorted. A
        listing stumbles over them, or passes over a folder."""
        parts = tuple(check_prefix(prefix).split("/")[:-1])
        with storage_errors(f"listing {self._path.joinpath(*parts)}", self._path.joinpath(*parts)):
            return foreign_keys(self._folders, parts)

    def create(self, key: str, data: Buffer) -> bool:
        """See :class:`~ckptstore.backends.protocol.WriteBackend`. When it returns False, the key is durable too.

        Raises:
            ReadOnlyError: writing is not allowed, or the file system has no hard links.
            CorruptError: what lies under the key is no regular file.
        """
        parts = self._parts(key)
        what, size = f"writing key {key}", memoryview(data).nbytes
        with (
            storage_errors(what, self._path / key, needed=size),
            self._folders.opened(parts[:-1], make=True) as folder,
        ):
            created = False
            if self._present(folder, key) is None:
                with self._temporary(what, data) as (temporaries, name):
                    created = self._publish(temporaries, name, folder, key)
            sync(folder)
        return created

    def replace(self, key: str, data: Buffer) -> None:
        """See :class:`~ckptstore.backends.protocol.RepairBackend`. An absent key is created.

        What lies under the key (a planted link or pipe, too) gets the name ``quarantine/<key>.<nonce>``, with ``+`` for
        ``/``; then the new file takes its place in one rename. So the key is old or new at every instant. Only what
        may not be linked (a folder, say) is moved, and the key is absent for a moment.
        """
        parts = self._parts(key)
        what, size = f"replacing key {key}", memoryview(data).nbytes
        with (
            storage_errors(what, self._path / key, needed=size),
            self._folders.opened(parts[:-1], make=True) as folder,
            self._folders.opened((QUARANTINE,), make=True) as quarantine,
            self._temporary(what, data) as (temporaries, name),
        ):
            while True:
                if self._put_aside(folder, quarantine, key):
                    os.rename(name, parts[-1], src_dir_fd=temporaries, dst_dir_fd=folder)
                    break
                if self._publish(temporaries, name, folder, key):
                    break
            sync(folder)

    def delete(self, key: str) -> bool:
        """See :class:`~ckptstore.backends.protocol.PruneBackend`."""
        parts = self._parts(key)
        with storage_errors(f"deleting key {key}", self._path / key, needed=0):
            try:
                with self._folders.opened(parts[:-1]) as folder:
                    os.unlink(parts[-1], dir_fd=folder)
                    sync(folder)
            except FileNotFoundError:
                return False
        return True

    def locked(self, *, exclusive: bool) -> StoreLock | None:
        """The lock of the store, None if somebody else holds it: see :func:`ckptstore.backends.flocks.lock_folder`."""
        return lock_folder(self._path, exclusive=exclusive)

    def delete_many(self, keys: Collection[str]) -> dict[str, CkptStoreError]:
        """Remove keys durably; one that is absent counts as removed. Returns why each that is left could not be.

        Each folder is synced once, after all that goes from it.
        """
        for key in keys:
            self._parts(key)
        return delete_files(self._folders, keys)

    def modified(self, key: str) -> float | None:
        """When ``key`` was written, in seconds by the clock of its file system, or None if it is absent."""
        parts = self._parts(key)
        with storage_errors(f"key {key}", self._path / key):
            try:
                with self._folders.opened(parts[:-1]) as folder:
                    return os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mtime
            except FileNotFoundError:
                return None

    def remove_stale_temporaries(self) -> tuple[str, ...]:
        """Sweep up after writers that died: see :func:`ckptstore.backends.temporaries.remove_stale`."""
        return remove_stale(self._folders)

    def _temporary(self, what: str, data: Buffer) -> AbstractContextManager[tuple[int, str]]:
        """A new temporary; before the first one, those of writers that died are swept up."""
        if not self._swept:
            self._swept = True
            with suppress(BackendError):  # what cannot be removed is invisible, and somebody else's
                self.remove_stale_temporaries()
        return temporary(self._folders, what, data)

    def _may_be_there(self, key: str) -> bool:
        try:
            return self.stat(key) is not None
        except CorruptError:  # something is, and reading it will say what
            return True

    def _parts(self, key: str) -> tuple[str, ...]:
        parts = tuple(check_key(key).split("/"))
        if _is_local(parts[0]):
            raise UsageError(f"key {key!r}", f"{parts[0]} is a local name of a directory store", "it is no key")
        return parts

    @contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        """The regular file under ``key``, open for reading."""
        parts = self._parts(key)
        with storage_errors(f"reading key {key}", self._path / key):
            try:
                with self._folders.opened(parts[:-1]) as folder:
                    fd = os.open(parts[-1], _OPEN, dir_fd=folder)
            except FileNotFoundError as error:
                hint = "ckpt repair gets it from another copy"
                raise NotFoundError(f"key {key}", f"not in {self._path}", hint) from error
            except OSError as error:
                if error.errno not in _NO_FILE:
                    raise
                raise self._no_file(key) from error
            try:
                if not modes.S_ISREG(os.fstat(fd).st_mode):
                    raise self._no_file(key)
                yield fd
            finally:
                os.close(fd)

    def _present(self, folder: int, key: str) -> Stat | None:
        try:
            found = os.stat(_name(key), dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not modes.S_ISREG(found.st_mode):
            raise self._no_file(key)
        return Stat(key, found.st_size)

    def _no_file(self, key: str) -> CorruptError:
        why = f"{self._path / key} is not a regular file"
        return CorruptError(f"key {key}", why, "ckpt repair puts it aside and gets the key from another copy")

    def _publish(self, temporaries: int, temporary_name: str, folder: int, key: str) -> bool:
        """Give the temporary the name of ``key`` too. Returns False if that is taken."""
        try:
            os.link(temporary_name, _name(key), src_dir_fd=temporaries, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            why = f"{errno.errorcode[error.errno]}: the file system at {self._path} makes no hard links"
            hint = "a store can be read from it; to write, put the store on ext4, xfs, btrfs, apfs or the like"
            raise ReadOnlyError(f"writing key {key}", why, hint) from error
        return True

    def _put_aside(self, folder: int, quarantine: int, key: str) -> bool:
        """Name what lies under ``key`` in the quarantine, durably. Returns False if nothing lies there."""
        aside = f"{key.replace('/', '+')}.{secrets.token_hex(8)}"
        try:
            try:
                os.link(_name(key), aside, src_dir_fd=folder, dst_dir_fd=quarantine, follow_symlinks=False)
            except OSError as error:  # also for a file of another user, where the kernel protects hard links
                if error.errno not in NO_HARD_LINKS:
                    raise
                os.rename(_name(key), aside, src_dir_fd=folder, dst_dir_fd=quarantine)
        except FileNotFoundError:
            return False
        sync(quarantine)
        return True

    def _walk(self, parts: tuple[str, ...]) -> Iterator[Stat]:
        for name, size in self._entries(parts):
            if size is None:
                yield from self._walk((*parts, name))
            else:
                yield Stat("/".join((*parts, name)), size)

    def _entries(self, parts: tuple[str, ...]) -> builtins.list[tuple[str, int | None]]:
        """(Name, size in bytes or None for a folder) of all in the folder ``parts``, in the order of their keys."""
        place = self._path.joinpath(*parts)
        found: builtins.list[tuple[str, int | None]] = []
        with storage_errors(f"listing {place}", place):
            try:
                with self._folders.opened(parts) as folder, os.scandir(folder) as entries:
                    for entry in entries:
                        if (not parts and _is_local(entry.name)) or entry.name.startswith(_NFS_DELETED):
                            continue
                        with suppress(FileNotFoundError):  # deleted meanwhile
                            found.append((entry.name, self._listed_size(entry, parts)))
            except FileNotFoundError:
                return []
        # A folder sorts as its keys do, with the / behind its name: "a-b" lies before "a/b".
        return sorted(found, key=lambda item: item[0] if item[1] is not None else f"{item[0]}/")

    def _listed_size(self, entry: os.DirEntry[str], parts: tuple[str, ...]) -> int | None:
        mode, key = entry.stat(follow_symlinks=False), "/".join((*parts, entry.name))
        try:
            check_key(key)
        except UsageError as error:
            raise CorruptError(f"{self._path / key}", "not the name of a key", "move it out of the store") from error
        if modes.S_ISDIR(mode.st_mode):
            return None
        if not modes.S_ISREG(mode.st_mode):
            raise self._no_file(key)
        return mode.st_size


def _is_local(name: str) -> bool:
    return name in _LOCAL_NAMES or name.startswith(_LOCAL_PREFIX) or name.endswith(_LOCAL_SUFFIX)


def _name(key: str) -> str:
    return key.rpartition("/")[2]
