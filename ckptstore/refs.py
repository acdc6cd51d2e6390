"""Refs: append-only logs of generations. Creating the next one if absent is the commit point of the whole store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import BackendError, CkptStoreError, ConflictError, CorruptError, MalformedError, NotFoundError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import parse_ref_key, ref_key, ref_prefix
from ckptstore.format.records import RECORD_LIMIT, RefRecord
from ckptstore.objects import writable


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
        while self.backend.stat(ref_key(name, generation + 1)) is not None:
            generation += 1
        return self.record(name, generation) if generation else None

    def record(self, name: str, generation: int) -> RefRecord:
        """One generation of a ref. NotFoundError if absent, CorruptError if damaged."""
        key = ref_key(name, generation)
        data = self.backend.get(key, 0, RECORD_LIMIT + 1)
        try:
            record = RefRecord.parse(data)
        except MalformedError as error:
            raise CorruptError(f"ref {name} generation {generation}", f"{error} [{key}]", _REPAIR) from None
        except CorruptError as error:
            raise CorruptError(f"ref {name} generation {generation}", f"{error.why} [{key}]", _REPAIR) from None
        if record.generation != generation:
            why = f"the record says generation {record.generation} [{key}]"
            raise CorruptError(f"ref {name} generation {generation}", why, _REPAIR)
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
        loses, even if the head names the root it expects.

        Raises:
            ConflictError: somebody else appended first.
        """
        return self._append(name, after, root)

    def fence(self, name: str) -> RefRecord | None:
        """Append a record with the head's own root, so that a late move by somebody else must fail; returns the new
        head.

        Without a ref there is a record that names nothing. If somebody else appended first, theirs is the head.
        """
        head = self.head(name)
        try:
            return self._append(name, head, head.root if head else None)
        except ConflictError:
            return self.head(name)

    def findings(self, name: str) -> tuple[list[Finding], int]:
        """Every damaged, missing or unlinked record of a ref's log, and the bytes read for it."""
        found: list[Finding] = []
        read = 0
        above: RefRecord | None = None
        highest = 0
        for stat in self.backend.list(ref_prefix(name)):
            parsed = parse_ref_key(stat.key)
            highest = max(highest, parsed[1]) if parsed else highest
        for generation in range(highest, 0, -1):
            key = ref_key(name, generation)
            place = Place(part=f"ref {name} generation {generation}")
            try:
                data = self.backend.get(key, 0, RECORD_LIMIT + 1)
                read += len(data)
                record = self.record(name, generation)
            except NotFoundError:
                found.append(Finding(Kind.MISSING, place, key, "not in the store"))
                above = None
                continue
            except CkptStoreError as error:
                found.append(Finding(Kind.CORRUPT, place, key, error.why))
                above = None
                continue
            if above is not None and above.previous != Digest.of(data):
                message = "not the record that the next generation follows"
                found.append(Finding(Kind.CORRUPT, place, key, message, str(above.previous), str(Digest.of(data))))
            above = record
        return found, read

    def _append(self, name: str, head: RefRecord | None, root: Digest | None) -> RefRecord:
        generation = head.generation + 1 if head else 1
        previous = Digest.of(head.encode()) if head else None
        record = RefRecord(generation, previous, root, secrets.token_hex(16))
        key = ref_key(name, generation)
        try:
            if writable(self.backend).create(key, record.encode()):
                return record
        except BackendError:
            # The answer is lost, not the verdict: the record itself says who won.
            if not self._is_mine(name, record):
                raise
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
_REPAIR = "copy this record from another store that has the ref, or name the root itself"
