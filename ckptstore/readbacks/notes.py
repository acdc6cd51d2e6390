"""Notes: the receipts that a scrub leaves, each with the keys that it has read.

Their subject is the store, so none of them is about a checkpoint: however many of its keys were read, no checkpoint
counts as verified by a note alone. Each key has been read at the receipt's time, or earlier by at most its
``max_age_seconds``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ckptstore.backends.deadline import deadline
from ckptstore.backends.protocol import ReadBackend, ReadbackMethod, WriteBackend
from ckptstore.errors import CkptStoreError, CorruptError, MalformedError
from ckptstore.findings import Report
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key, document_key, object_key, receipt_key
from ckptstore.format.records import Receipt
from ckptstore.leases import now
from ckptstore.objects import writable
from ckptstore.readbacks.actors import this_actor
from ckptstore.readbacks.coverage import SKEW, Evidence
from ckptstore.readbacks.readbacks import Part, Readback, receipts_about, time_of

if TYPE_CHECKING:
    from ckptstore.store import Store

OPERATION = "scrub"
KEYS = 4096
"""How many keys a note has at most: a receipt is at most 1 MiB."""

SECONDS = 60.0
"""How long a key that was read may wait to be noted."""

_DIGEST = 32
_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Note:
    """A receipt of a scrub, and the keys that it read."""

    readback: Readback
    keys: tuple[str, ...]

    @property
    def read_at(self) -> datetime:
        """When the first of the keys was read, at the earliest."""
        return self.readback.time - self.readback.max_age

    @property
    def counts(self) -> bool:
        """Whether the bytes came from where they are kept."""
        return reaches_medium(self.readback.receipt.method)


def reaches_medium(method: str) -> bool:
    """Whether a receipt's method is one that reads from where bytes are kept."""
    return any(known.value == method and known.reaches_medium for known in ReadbackMethod)


def subject_of(store: str) -> Digest:
    """What notes about the store with this id are about: the digest of ``scrub``, a space, and the id."""
    return Digest.of(f"scrub {store}".encode("ascii"))


def notes_about(backend: ReadBackend, store: str, report: Report) -> Iterator[Note]:
    """The notes in ``backend`` about the store with this id; what is no note is left out, what cannot be read is
    reported."""
    for digest, receipt in receipts_about(backend, subject_of(store), report):
        if receipt.operation == OPERATION:
            with suppress(MalformedError):
                note = note_of(digest, receipt)
                if note.readback.store == store:
                    yield note


def cover_by_notes(covered: dict[str, Evidence], notes: Iterable[Note], wanted: Collection[str], at: datetime) -> None:
    """Take in what ``notes`` about one store say of the keys that are asked for, where that is better than what is
    known."""
    for note in notes:
        evidence = Evidence(note.readback, note.read_at, note.readback.time > at + SKEW)
        for key in note.keys:
            if key in wanted and (key not in covered or covered[key].rank < evidence.rank):
                covered[key] = evidence


def note_of(digest: Digest, receipt: Receipt) -> Note:
    """A receipt of a scrub as a note. MalformedError if it is none."""
    plain = None if receipt.details is None else values.from_json(receipt.details, "receipt details")
    if not isinstance(plain, Mapping):
        raise MalformedError("receipt", "its details are no mapping")
    store, by, age = plain.get("store"), plain.get("by"), plain.get("max_age_seconds")
    objects, documents, records = plain.get("objects"), plain.get("documents"), plain.get("records")
    if type(store) is not str or type(by) is not str or type(age) is not int or not 0 <= age <= 10**9:
        raise MalformedError("receipt", "it does not say which store was read, by whom, or how long ago")
    if type(objects) is not bytes or type(documents) is not bytes or (len(objects) + len(documents)) % _DIGEST:
        raise MalformedError("receipt", "its objects and documents are no digests")
    if type(records) is not list:
        raise MalformedError("receipt", "its records are no keys")
    named = (*map(object_key, _digests(objects)), *map(document_key, _digests(documents)))
    readback = Readback(digest, receipt, time_of(receipt.time), Part(), store, by, timedelta(seconds=age), None)
    return Note(readback, (*named, *(key for key in records if type(key) is str)))


def _digests(data: bytes) -> list[Digest]:
    return [Digest(data[start : start + _DIGEST]) for start in range(0, len(data), _DIGEST)]


def _keep(backend: WriteBackend, key: str, data: bytes) -> None:
    """Also when the time of the scrub is over, or it was given up: a moment is left for this."""
    with deadline(_GRACE_SECONDS):
        backend.create(key, data)


def receipt_of(store: str, where: str, method: ReadbackMethod, keys: Mapping[str, int], oldest_seconds: int) -> Receipt:
    """The receipt about having read ``keys`` (with their sizes in bytes) in the store with this id at ``where``."""
    by_kind: dict[str, list[Digest]] = {"objects": [], "documents": []}
    records = []
    for key in sorted(keys):
        digest = digest_of_key(key)
        if digest is None:
            records.append(key)
        else:
            by_kind[key.partition("/")[0]].append(digest)
    plain = {
        "by": this_actor(),
        "store": store,
        "max_age_seconds": oldest_seconds,
        "records": records,
        **{kind: b"".join(digest.raw for digest in digests) for kind, digests in by_kind.items()},
    }
    return Receipt(
        operation=OPERATION,
        subject=subject_of(store),
        closure=None,
        documents=len(by_kind["documents"]),
        objects=len(by_kind["objects"]),
        bytes_read=sum(keys.values()),
        method=method.value,
        time=now(),
        where=where,
        details=values.to_json(plain, "scrub"),
    )


@dataclass(slots=True)
class _Batch:
    """Keys that were read in one way and not noted yet, with their sizes in bytes; since when."""

    began: float = field(default_factory=time.monotonic)
    keys: dict[str, int] = field(default_factory=dict)
    size: int = 0


class Notebook:
    """Takes down what a scrub has read, in the store itself and in another one that keeps its own copy.

    Args:
        store: what is read.
        keeper: another store that keeps the notes, too.
        every: bytes after which those read are noted; so many, and those under way, are read again after a kill.
    """

    def __init__(self, store: Store, keeper: Store | None, every: int) -> None:
        self._store = store
        self._places = [store] if keeper is None or keeper.url == store.url else [store, keeper]
        self._every = every
        self._batches: dict[ReadbackMethod, _Batch] = {}
        self.written: list[Note] = []
        self.failures: dict[str, CkptStoreError] = {}

    def add(self, key: str, size: int, method: ReadbackMethod) -> None:
        """``key`` was read in this way just now, and is good."""
        mine = self._batches.setdefault(method, _Batch())
        mine.keys[key] = size
        mine.size += size
        for waiting, batch in list(self._batches.items()):
            full = len(batch.keys) >= KEYS or batch.size >= self._every
            if full or time.monotonic() - batch.began >= SECONDS:
                self._write(waiting, self._batches.pop(waiting))

    def close(self) -> None:
        """Note what is left."""
        while self._batches:
            self._write(*self._batches.popitem())

    def _write(self, method: ReadbackMethod, batch: _Batch) -> None:
        if self._store.id is None:
            why = "its header cannot be read, and a note has to say which store was read"
            self.failures.setdefault(self._store.url, CorruptError(f"store {self._store.url}", why))
            return
        age = math.ceil(time.monotonic() - batch.began)
        receipt = receipt_of(self._store.id, self._store.url, method, batch.keys, age)
        data = receipt.encode()
        digest = Digest.of(data)
        for place in self._places:
            try:
                Context().run(_keep, writable(place.backend), receipt_key(receipt.subject, digest), data)
            except CkptStoreError as error:  # a store that cannot be written can be read
                self.failures.setdefault(place.url, error)
        if len(self.failures) < len(self._places):
            self.written.append(note_of(digest, receipt))

    def forget(self, old: Iterable[Note], present: Mapping[str, int], at: datetime) -> int:
        """Remove those of ``old`` that newer notes have made idle; returns how many.

        A note is needed as long as one of its keys that is still there was not read later. What is dated in the future
        says nothing of that: it is idle when all of its keys were read now.
        """
        newest: dict[str, tuple[bool, datetime]] = {}
        for note in (*(note for note in old if note.readback.time <= at), *self.written):
            for key in note.keys:
                rank = (note.counts, note.read_at)
                newest[key] = max(newest.get(key, rank), rank)
        read_now = {key for note in self.written for key in note.keys if note.counts}
        removed = 0
        for note in old:
            live = [key for key in note.keys if key in present]
            if note.readback.time > at:
                needed = any(key not in read_now for key in live)
            else:
                needed = any(newest[key] <= (note.counts, note.read_at) for key in live)
            if not needed:
                for place in self._places:
                    with suppress(CkptStoreError):
                        removed += place.backend.delete(note.readback.key)
        return removed
