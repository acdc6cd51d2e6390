"""Healing: what is found bad is fetched, proven, put back and read again, at the moment when somebody needs it.

So documents come first, because they say what else is needed, and whoever reads through here sees a whole store or the
findings about what nobody has. They are put back last, children before parents: a crash leaves none before what it
needs.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from ckptstore.backends import deadline
from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import BackendError, CkptStoreError, CorruptError
from ckptstore.findings import REPAIRABLE, Finding, Kind, Place, Report, raise_finding
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, object_key
from ckptstore.objects import Objects, repairing

_STALE_SECONDS = (0.1, 0.4, 1.5, 3.0)  # over a network a copy that lags behind may answer with the old bytes
_UNKNOWN = "whether its bytes are wrong is not known, so it was left as it is"


@dataclass(frozen=True, slots=True)
class Healed:
    """One key that is whole again: how it was, its size in bytes now (0: it was put aside), who gave the bytes."""

    key: str
    was: Kind
    size: int
    source: str
    place: Place


class Giver(Protocol):
    """Where good bytes may come from."""

    def __call__(self, digest: Digest, length: int | None, place: Place, *, document: bool) -> tuple[str, bytes] | None:
        """The name of who has them, and the verified bytes; None if nobody does."""
        ...


class Healer(Objects):
    """The objects and documents of a store: objects heal when they are read, documents with :meth:`settle`.

    Args:
        backend: the store; bytes are read from the medium as far as it can.
        givers: asked in this order.
        dry: change nothing, and say what would be done.
    """

    def __init__(self, backend: ReadBackend, givers: Sequence[Giver], *, dry: bool) -> None:
        super().__init__(backend, medium=True)
        self.healed: list[Healed] = []
        self._givers = givers
        self._dry = dry
        self._coming: dict[str, bytes] = {}
        self._pending: list[tuple[Finding, Digest, str, bytes]] = []
        self._healing = Lock()

    def read(self, digest: Digest, length: int, place: Place, report: Report = raise_finding) -> bytes | None:
        """See :class:`~ckptstore.objects.Objects`."""
        return self._whole(object_key(digest), digest, length, place, report)

    def document(self, digest: Digest, place: Place, report: Report = raise_finding) -> bytes | None:
        """See :class:`~ckptstore.objects.Objects`."""
        return self._whole(document_key(digest), digest, None, place, report)

    def is_lost(self, found: Finding) -> bool:
        """Whether other bytes may take the place of those that were read, or could not be."""
        return found.kind in REPAIRABLE or (found.kind is Kind.UNREADABLE and is_medium_lost(self.backend, found.key))

    def put_back(self, found: Finding, digest: Digest, length: int | None, giver: str, data: bytes) -> Finding | None:
        """Put proven bytes in the place of bad ones, and read them back; what is wrong with what came back."""
        stored = True
        if not self._dry:
            try:
                stored = self._store(found, digest, length, data)
            except CorruptError as error:  # what should be a folder above it is none
                return Finding(Kind.CORRUPT, found.place, found.key, f"{error.what}: {error.why}; {error.hint}")
            bad = self._back(found, digest, length)
            if bad is not None:
                return bad
        with self._healing:
            if stored:
                self.healed.append(Healed(found.key, found.kind, len(data), giver, found.place))
        return None

    def settle(self, report: Report) -> None:
        """Put back the documents that were found so far, those last that name others."""
        for found, digest, giver, data in reversed(self._pending):
            bad = self.put_back(found, digest, None, giver, data)
            if bad is not None:
                report(bad)
        self._pending.clear()

    def _store(self, found: Finding, digest: Digest, length: int | None, data: bytes) -> bool:
        """Write good bytes; False if good ones are there by now."""
        if found.kind is Kind.MISSING:
            return self.put(found.key, digest, data)
        if found.kind is not Kind.UNREADABLE and self._look(found, digest, length) is None:
            return False
        repairing(self.backend).replace(found.key, data)
        self._remember(found.key)
        return True

    def _whole(self, key: str, digest: Digest, length: int | None, place: Place, report: Report) -> bytes | None:
        found: list[Finding] = []
        data = self._coming.get(key) or self._checked(key, digest, length, place, found.append)
        if data is not None:
            return data
        (bad,) = found
        if not self.is_lost(bad):
            report(bad if bad.kind is not Kind.UNREADABLE else _left(bad))
            return None
        for give in self._givers:
            given = give(digest, length, place, document=length is None)
            if given is not None:
                if length is None:
                    with self._healing:
                        self._coming[key] = given[1]
                        self._pending.append((bad, digest, *given))
                    return given[1]
                again = self.put_back(bad, digest, length, *given)
                if again is None:
                    return given[1]
                report(again)
                return None
        report(bad)
        return None

    def _back(self, found: Finding, digest: Digest, length: int | None) -> Finding | None:
        bad = self._look(found, digest, length)
        for pause in _STALE_SECONDS if self.backend.traits.network else ():
            if bad is None or bad.kind is Kind.UNREADABLE:
                break
            deadline.check(f"reading key {found.key} again")
            left = deadline.remaining()
            time.sleep(pause if left is None else min(pause, left))
            bad = self._look(found, digest, length)
        return bad

    def _look(self, found: Finding, digest: Digest, length: int | None) -> Finding | None:
        bad: list[Finding] = []
        self._checked(found.key, digest, length, found.place, bad.append)
        if not bad:
            return None
        message = f"good bytes were written, and these came back: {bad[0].message}"
        return Finding(bad[0].kind, found.place, found.key, message, bad[0].expected, bad[0].actual)


def is_medium_lost(backend: ReadBackend, key: str) -> bool:
    """Whether the medium itself fails to give the bytes of a key, twice: a bad sector, and no network between."""
    return not backend.traits.network and all(_fails(lambda: backend.get(key)) for _ in range(2))


def _fails(read: Callable[[], object]) -> bool:
    try:
        read()
    except BackendError as error:
        return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EIO, errno.EUCLEAN)
    except CkptStoreError:
        return False
    return False


def _left(found: Finding) -> Finding:
    message = f"{found.message}; {_UNKNOWN}"
    return Finding(found.kind, found.place, found.key, message, found.expected, found.actual)
