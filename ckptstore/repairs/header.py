"""What a store cannot be opened without: its header, and the features that it needs.

A header is constants and an id. The id proves nothing about bytes; it tells readbacks of this store from those of
another. So a damaged one is written with the id that the store's own receipts give, and only where nothing gives one,
with a new one, which makes every earlier readback count as one of another store.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ckptstore.backends import open_backend
from ckptstore.backends.protocol import ReadBackend
from ckptstore.endpoints import SINGLE_WRITER
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    CorruptError,
    MalformedError,
    NotFoundError,
    RefusedError,
    UnsupportedVersionError,
)
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY, digest_of_key, feature_key
from ckptstore.format.records import RECEIPT_LIMIT, RECORD_LIMIT, Feature, Receipt
from ckptstore.format.records import Store as StoreHeader
from ckptstore.objects import repairing, undamaged, writable
from ckptstore.readbacks.actors import store_of

_RECEIPTS = 200  # that are looked through for an id
_ID = re.compile(rb'"id":"([0-9a-f]{32})"')


@dataclass(frozen=True, slots=True)
class HeaderRepair:
    """What was done about a store that could not be opened: the keys that were written anew, each with how its content
    is known; none if nothing was wrong."""

    url: str
    healed: tuple[tuple[str, str], ...]


def repair_header(url: str | Path, *, dry_run: bool = False) -> HeaderRepair:
    """Put the header of the store at ``url`` right, and the features that a store needs to be opened.

    Args:
        url: where it is.
        dry_run: change nothing; the result says what would be done.

    Raises:
        NotFoundError: there is nothing at ``url``.
        RefusedError: what is there was never a store of ours.
        UnsupportedVersionError: the header is whole, and of another format.
        BackendError, ReadOnlyError: it cannot be read or written.
    """
    backend = open_backend(str(url))
    healed = []
    damaged = _damaged(backend)
    if damaged is not None:
        header, why = _header(backend, damaged)
        if not dry_run:
            _write(backend, STORE_KEY, header.encode())
        healed.append((STORE_KEY, why))
    if _is_bad(backend, feature_key(SINGLE_WRITER)):
        if not dry_run:
            _write(backend, feature_key(SINGLE_WRITER), Feature("its record was damaged, and it holds").encode())
        healed.append((feature_key(SINGLE_WRITER), "that it is there is all that it says"))
    return HeaderRepair(backend.url, tuple(healed))


def _damaged(backend: ReadBackend) -> bytes | None:
    """What is stored for a header that cannot be used; None for one that can."""
    data = b""

    def read() -> None:
        nonlocal data
        data = backend.get(STORE_KEY, 0, RECORD_LIMIT + 1)
        StoreHeader.parse(data)

    try:
        undamaged(backend, read)
    except (BackendError, UnsupportedVersionError):
        raise
    except (CorruptError, MalformedError, NotFoundError):
        pass
    else:
        return None
    return data


def _header(backend: ReadBackend, damaged: bytes) -> tuple[StoreHeader, str]:
    """The header as it was, as far as that can be known, and how it is known."""
    if next(_known_keys(backend), None) is None:
        why = "it has neither a header nor any object or document"
        raise RefusedError(f"store {backend.url}", why, "ckpt init makes a store")
    subjects, told = _witnesses(backend)
    stored = [found.decode() for found in _ID.findall(damaged)[:1]]
    for identity in [*stored, *told]:
        if Digest.of(StoreHeader(identity).encode()).hex in subjects:
            return StoreHeader(identity), "the record of what its endpoint honours names its digest"
    if told:
        return StoreHeader(told.most_common(1)[0][0]), "receipts of readbacks here give its id"
    if stored:
        return StoreHeader(stored[0]), "the id still stood in what was left of it"
    return StoreHeader(secrets.token_hex(16)), "nothing gives its id, so it has a new one: verify anew"


def _known_keys(backend: ReadBackend) -> Iterator[str]:
    for prefix in ("documents/", "objects/"):
        with suppress(CorruptError):
            for stat in backend.list(prefix):
                if digest_of_key(stat.key) is not None:
                    yield stat.key


def _witnesses(backend: ReadBackend) -> tuple[set[str], Counter[str]]:
    """Subjects that receipts have, in hex, and the ids that receipts of readbacks here give. Those of a push from here
    tell of another store; and one from this very place counts for more than any others, which may have been copied."""
    subjects: set[str] = set()
    told: Counter[str] = Counter()
    with suppress(CorruptError):
        for stat in islice(backend.list("receipts/"), _RECEIPTS):
            _, subject, name = stat.key.split("/")
            subjects.add(subject)
            with suppress(CorruptError, MalformedError, NotFoundError):
                data = backend.get(stat.key, 0, RECEIPT_LIMIT + 1)
                if Digest.of(data).hex != name:
                    continue
                receipt = Receipt.parse(data)
                identity = store_of(receipt)
                if identity is not None and receipt.where == backend.url:
                    told[identity] += _RECEIPTS
                elif identity is not None and receipt.operation != "push":
                    told[identity] += 1
    return subjects, told


def _is_bad(backend: ReadBackend, key: str) -> bool:
    try:
        undamaged(backend, lambda: Feature.parse(backend.get(key, 0, RECORD_LIMIT + 1)))
    except NotFoundError:
        return False
    except BackendError:
        raise
    except CkptStoreError:
        return True
    return False


def _write(backend: ReadBackend, key: str, data: bytes) -> None:
    """Put a record in the place of a bad one, which goes to the quarantine, or of none."""
    try:
        if writable(backend).create(key, data):
            return
    except CorruptError:  # no regular file lies there
        pass
    repairing(backend).replace(key, data)
