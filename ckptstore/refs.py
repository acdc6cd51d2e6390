"""Refs: append-only logs of generations. Creating the next one if absent is the commit point of the whole store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress

from ckptstore.backends.protocol import ReadBackend
from ckptstore.endpoints import require_exclusive
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    ConflictError,
    CorruptError,
    MalformedError,
    NotFoundError,
    RefusedError,
)
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.canonical import MAX_INT
from ckptstore.format.digest import Digest
from ckptstore.format.keys import parse_ref_key, ref_key, ref_prefix
from ckptstore.format.records import RECORD_LIMIT, RefRecord
from ckptstore.leases import check_lease, lease
from ckptstore.objects import undamaged, writable


class Refs:
    """All refs of one store."""

    def __init__(self, backend: ReadBackend) -> None:
        self.backend = backend

    def names(self) -> list[str]:
        """Names of all refs, sorted."""
        return sorted({parsed[0] for stat in self.backend.list("refs/") if (parsed := parse_ref_key(stat.key))})

    def head(self, name: str) -> RefRecord | None:
        """The highest generation of a ref, or None if there is none.

        The listing is only where the search starts: later generations are asked for by their exact keys, so a listing
        that lags cannot hide one.

        Raises:
            CorruptError: the record is damaged.
        """
        generation = 0
        for stat in self.backend.list(ref_prefix(name)):
            parsed = parse_ref_key(stat.key)
            if parsed is not None:
                generation = max(generation, parsed[1])
        return self._newest(name, generation) or (self.record(name, generation) if generation else None)

    def head_after(self, name: str, record: RefRecord) -> RefRecord | None:
        """The same as :meth:`head` for who knows ``record``: nothing is listed while that one is there."""
        try:
            return self._newest(name, record.generation) or self.record(name, record.generation)
        except NotFoundError:
            return self.head(name)

    def _newest(self, name: str, generation: int) -> RefRecord | None:
        """The highest of the generations after this one, None if there is none. They are read, not asked for: a server
        that says of everything that it is there must not lead us on for ever."""
        newest: RefRecord | None = None
        while True:
            try:
                newest = self._read(name, generation + 1)[1]  # or an answer that is none would lead on for ever, too
            except NotFoundError:
                return newest
            generation += 1

    def record(self, name: str, generation: int) -> RefRecord:
        """One generation of a ref. NotFoundError if absent, CorruptError if damaged."""
        return self._read(name, generation)[1]

    def _read(self, name: str, generation: int) -> tuple[bytes, RefRecord]:
        def read() -> tuple[bytes, RefRecord]:
            data = self.backend.get(ref_key(name, generation), 0, RECORD_LIMIT + 1)
            return data, self._parsed(name, generation, data)

        return undamaged(self.backend, read)

    @staticmethod
    def _parsed(name: str, generation: int, data: bytes) -> RefRecord:
        key = ref_key(name, generation)
        try:
            record = RefRecord.parse(data)
        except MalformedError as error:
            raise CorruptError(f"ref {name} generation {generation}", f"{error} [{key}]", _repair(name)) from None
        except CorruptError as error:
            raise CorruptError(f"ref {name} generation {generation}", f"{error.why} [{key}]", _repair(name)) from None
        if record.generation != generation:
            why = f"the record says generation {record.generation} [{key}]"
            raise CorruptError(f"ref {name} generation {generation}", why, _repair(name))
        return record

    def log(self, name: str) -> Iterator[RefRecord]:
        """All records of a ref, newest first."""
        record = self.head(name)
        while record is not None:
            yield record
            record = self.record(name, record.generation - 1) if record.generation > 1 else None

    def move(self, name: str, root: Digest | None, after: RefRecord | None) -> RefRecord:
        """Append a record that names ``root`` right after the record ``after`` (None: as the first generation).

        ``after`` is the head that the mover started from. A mover that took long and finds the ref moved, or fenced,
        loses, even if the head names the root it expects. It holds a lease, under which it saw what ``root`` refers to.

        Raises:
            ConflictError: somebody else appended first; or a collection runs, or took this process for dead.
            RefusedError: the store's endpoint has no conditional writes, and more than one may write there.
        """
        with lease(self.backend):
            check_lease(self.backend)
            record = self._append(name, after, root)
            if after is None and root is not None:
                self._check_first(name, record)
            return record

    def _check_first(self, name: str, record: RefRecord) -> None:
        """There was nothing to fence before the first generation: if the lease is gone, name nothing after all."""
        try:
            check_lease(self.backend)
        except ConflictError:
            with suppress(CkptStoreError):
                self._append(name, record, None)
            raise

    def fence(self, name: str, generation: int) -> None:
        """Append the root of ``generation`` once more right after it, so that whoever began there loses a late move.

        Nothing is appended if something follows that generation already: then the verdict is known, and another attempt
        may have begun at the head. Generation 0 is that of no ref; what follows it names nothing.

        Raises:
            NotFoundError, CorruptError: the generation is not there, or damaged.
        """
        base = self.record(name, generation) if generation else None
        with suppress(ConflictError):
            self._append(name, base, base.root if base else None)

    def findings(self, name: str) -> tuple[list[Finding], int]:
        """Every damaged, missing or unlinked record of a ref's log, and the bytes read for it."""
        found: list[Finding] = []
        read = 0
        above: RefRecord | None = None
        parsed = [parse_ref_key(stat.key) for stat in self.backend.list(ref_prefix(name))]
        there = sorted((generation for _, generation in filter(None, parsed)), reverse=True)
        for generation, below in zip(there, [*there[1:], 0], strict=False):
            key = ref_key(name, generation)
            place = Place(part=f"ref {name} generation {generation}")
            try:
                data, record = self._read(name, generation)
                read += len(data)
            except CkptStoreError as error:
                found.append(Finding(Kind.of(error), place, key, error.why))
                above = None
            else:
                if above is not None and above.previous != Digest.of(data):
                    message = "not the record that the next generation follows"
                    found.append(Finding(Kind.CORRUPT, place, key, message, str(above.previous), str(Digest.of(data))))
                above = record
            if below < generation - 1:
                # One finding however many: a planted record may claim to be the last of all generations.
                missing = f"{below + 1}" if below == generation - 2 else f"{below + 1} to {generation - 1}"
                place = Place(part=f"ref {name} generation {missing}")
                found.append(Finding(Kind.MISSING, place, ref_key(name, generation - 1), "not in the store"))
                above = None
        return found, read

    def _append(self, name: str, head: RefRecord | None, root: Digest | None) -> RefRecord:
        generation = head.generation + 1 if head else 1
        if generation > MAX_INT:
            raise RefusedError(f"ref {name}", f"generation {generation - 1} is the last that there can be", _OTHER)
        previous = Digest.of(head.encode()) if head else None
        record = RefRecord(generation, previous, root, secrets.token_hex(16))
        key = ref_key(name, generation)
        require_exclusive(self.backend, f"ref {name}")
        try:
            if writable(self.backend).create(key, record.encode()):
                return record
        except BackendError:
            # The answer is lost, not the verdict: the record itself says who won.
            if not self._is_mine(name, record):
                raise
            with suppress(BackendError):  # what exists is made durable before the answer, which may be lost again
                writable(self.backend).create(key, record.encode())
            return record
        if self._is_mine(name, record):
            return record
        raise ConflictError(f"ref {name}", f"generation {generation} was appended by somebody else", _RETRY)

    def _is_mine(self, name: str, record: RefRecord) -> bool:
        try:
            return self.record(name, record.generation).nonce == record.nonce
        except NotFoundError:
            return False


_RETRY = "read the ref's head and try again from there"
_OTHER = "no honest writer gets there; use another ref"


def _repair(name: str) -> str:
    return f"ckpt repair {name} puts the record back if that can be; or name the root itself"
