"""Opening a store, and making one: its header, and the features that it needs."""

from __future__ import annotations

import secrets
from pathlib import Path

from ckptstore.backends import open_backend
from ckptstore.backends.protocol import ReadBackend
from ckptstore.endpoints import SINGLE_WRITER, capabilities
from ckptstore.errors import CorruptError, MalformedError, NotFoundError, RefusedError, UnsupportedVersionError
from ckptstore.format.keys import STORE_KEY, feature_key
from ckptstore.format.records import RECORD_LIMIT, Feature
from ckptstore.format.records import Store as StoreHeader
from ckptstore.objects import undamaged
from ckptstore.store import Store

_MEND = "ckpt repair --header writes it anew; what else is stored stays as it is"


def open_store(url: str | Path, *, create: bool = False, single_writer: bool = False) -> Store:
    """Open the store at ``url``: a directory, ``file:///…``, ``s3://bucket/prefix`` or ``memory:name``.

    Args:
        url: where it is.
        create: make an empty store if there is none (in a bucket that is there).
        single_writer: of a store that is made: only one process at a time will write to it. That is needed at an
            endpoint without conditional writes. If two write nevertheless, a checkpoint may drop out of its history.

    Raises:
        NotFoundError: there is no store, and ``create`` is False.
        UnsupportedVersionError: the store is of a format, or has a feature, that this release does not know.
    """
    backend = open_backend(str(url), create=create)
    try:
        _check_header(backend)
    except NotFoundError:
        if not create:
            why = f"there is no {STORE_KEY}"
            hint = "make one with ckpt init, or open(…, create=True); if one was there, ckpt repair --header helps"
            raise NotFoundError(f"store {backend.url}", why, hint) from None
        if not _is_new(backend):
            why = f"it has files but no {STORE_KEY}"
            raise RefusedError(f"store {backend.url}", why, "choose an empty directory") from None
        backend.create(STORE_KEY, StoreHeader(secrets.token_hex(16)).encode())
        if single_writer:
            backend.create(feature_key(SINGLE_WRITER), Feature("made for a single writer").encode())
        _check_header(backend)
        capabilities(backend)  # what an endpoint honours is found out before anything relies on it
    try:
        features = list(backend.list("features/"))
    except CorruptError as error:
        raise CorruptError(f"store {backend.url}", error.why, _MEND) from error
    for stat in features:
        name = stat.key.removeprefix("features/")
        if name != SINGLE_WRITER:
            raise UnsupportedVersionError(f"store {backend.url}", f"feature {name!r:.60} is unknown to this release")
    return Store(backend)


def _check_header(backend: ReadBackend) -> None:
    try:
        undamaged(backend, lambda: StoreHeader.parse(backend.get(STORE_KEY, 0, RECORD_LIMIT + 1)))
    except UnsupportedVersionError:
        raise
    except MalformedError as error:
        why = f"{STORE_KEY} is damaged, or is none of ours: {error}"
        raise MalformedError(f"store {backend.url}", why, _MEND) from error
    except CorruptError as error:
        raise CorruptError(f"store {backend.url}", error.why, _MEND) from error


def _is_new(backend: ReadBackend) -> bool:
    """Whether there is nothing yet, or only the header that another process has just made."""
    try:
        first = next(iter(backend.list("")), None)
    except CorruptError:  # a file with a name that no store has
        return False
    return first is None or first.key == STORE_KEY
