"""The log of a ref whose records are damaged or missing.

A ref decides what a store says its newest checkpoint is, so no record is made up. One comes back only as the very bytes
that were there: those that the record after it names by their digest; those that its own check proves, but for one bit;
or, for the newest, which nothing names, those that other copies of this store agree on and that follow the record
before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

from ckptstore.errors import CkptStoreError, CorruptError, MalformedError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import parse_ref_key, ref_key, ref_prefix
from ckptstore.format.records import RECORD_LIMIT, RefRecord
from ckptstore.objects import repairing
from ckptstore.refs import Refs
from ckptstore.repairs.healing import Healed
from ckptstore.repairs.records import Ward

_CORRECTABLE = 1024  # bytes: a record has about 300
_PROBES = 100_000  # generations that are asked for one by one, where no listing can be had
_RUN = 1000  # records in one chain that only other copies have
OWN_CHECK = "its own check, one bit turned back"


def heal_log(ward: Ward, refs: Refs, name: str) -> None:
    """Put damaged and missing records of a ref back; what cannot be is left, with a finding."""
    _Log(ward, refs, name).heal()


class _Log:
    def __init__(self, ward: Ward, refs: Refs, name: str) -> None:
        self.ward = ward
        self.refs = refs
        self.name = name
        self.good: dict[int, RefRecord] = {}
        self.bad: dict[int, Finding] = {}

    def heal(self) -> None:
        there = self._generations()
        for generation in there:
            self._read(generation)
        self._check_links()
        for generation, below in pairwise([*there, 0]):
            above = self.good.get(generation + 1)
            if generation in self.bad and above is not None:
                self._put_back(self.bad[generation], generation, self._named(generation, above.previous))
            for missing in range(generation - 1, below, -1):
                above, found = self.good.get(missing + 1), self._missing(missing, missing)
                if above is None or not self._put_back(found, missing, self._named(missing, above.previous)):
                    # One finding however many: a planted record may claim to be the last of all generations.
                    self.bad[missing] = self._missing(below + 1, missing)
                    break
        if there and there[0] in self.bad:
            self._heal_newest(there[0])
        self.ward.left += [self.bad[generation] for generation in sorted(self.bad, reverse=True)]

    def _generations(self) -> list[int]:
        """The generations that are there in any form, newest first."""
        foreign = getattr(self.ward.backend, "foreign", None)
        planted = {} if foreign is None else dict(self._parsed(foreign(ref_prefix(self.name))))
        for generation, key in planted.items():
            self.bad[generation] = self._finding(Kind.CORRUPT, generation, f"{key} is no regular file")
        if planted:  # then there is no listing; what is there is asked for by its key
            found = set(planted)
            for generation in range(1, _PROBES):
                if self._is_there(generation):
                    found.add(generation)
                elif generation > max(planted):
                    break
            return sorted(found, reverse=True)
        listed = dict(self._parsed([stat.key for stat in self.ward.backend.list(ref_prefix(self.name))]))
        head = max(listed, default=0)
        while self._is_there(head + 1):  # a listing may lag
            head += 1
            listed[head] = ref_key(self.name, head)
        return sorted(listed, reverse=True)

    @staticmethod
    def _parsed(keys: list[str]) -> Iterator[tuple[int, str]]:
        for key in keys:
            parsed = parse_ref_key(key)
            if parsed is not None:
                yield parsed[1], key

    def _is_there(self, generation: int) -> bool:
        try:
            return self.ward.backend.stat(ref_key(self.name, generation)) is not None
        except CorruptError:
            return True

    def _read(self, generation: int) -> None:
        if generation in self.bad:
            return
        try:
            self.good[generation] = self.refs.record(self.name, generation)
        except CkptStoreError as error:
            self.bad[generation] = self._finding(Kind.of(error), generation, error.why or error.what)

    def _check_links(self) -> None:
        """A record that the next one does not follow is wrong, or the next one is, if that is the newest."""
        for generation in sorted(self.good, reverse=True):
            above, below = self.good.get(generation), self.good.get(generation - 1)
            if above is None or below is None or above.previous == _digest(below):
                continue
            message = "not the record that the next generation follows"
            self.bad[generation - 1] = self._finding(Kind.CORRUPT, generation - 1, message)
            del self.good[generation - 1]
            if generation == max((*self.good, *self.bad)) and not list(self._named(generation - 1, above.previous)):
                self.good[generation - 1] = below
                del self.bad[generation - 1], self.good[generation]
                message = "it does not follow the record before"
                self.bad[generation] = self._finding(Kind.CORRUPT, generation, message)

    def _named(self, generation: int, digest: Digest | None) -> Iterator[tuple[str, RefRecord]]:
        """Records that are those that the next one names."""
        for giver, record in self._candidates(generation):
            if _digest(record) == digest:
                yield giver, record

    def _candidates(self, generation: int) -> Iterator[tuple[str, RefRecord]]:
        key = ref_key(self.name, generation)
        stored = b""
        with suppress(CkptStoreError):
            stored = self.ward.backend.get(key, 0, _CORRECTABLE + 1)
        for record in corrected(stored):
            if record.generation == generation:
                yield OWN_CHECK, record
        for giver, data in self.ward.donors.ask(key, RECORD_LIMIT):
            with suppress(CorruptError, MalformedError):
                record = RefRecord.parse(data)
                if record.generation == generation:
                    yield giver, record

    def _heal_newest(self, head: int) -> None:
        """The newest, with those below it that are bad as well: as copies of this store have all of them, in one chain
        that ends at a good record here or at the first generation."""
        run = [head]
        while run[-1] > 1 and run[-1] - 1 not in self.good:
            run.append(run[-1] - 1)
            if len(run) > _RUN:
                return
        below = self.good.get(run[-1] - 1)
        wanted = _digest(below) if below is not None else None
        by_giver: dict[str, list[RefRecord]] = {}
        for generation in run:
            for giver, record in self._candidates(generation):
                by_giver.setdefault(giver, []).append(record)
        proven = by_giver.pop(OWN_CHECK, [])
        chains = [(OWN_CHECK, proven)] if _is_chain(proven, run, wanted) else []
        chains = chains or [(giver, chain) for giver, chain in by_giver.items() if _is_chain(chain, run, wanted)]
        if len({tuple(map(_digest, chain)) for _, chain in chains}) > 1:
            self.bad[head] = self._finding(Kind.CORRUPT, head, "other copies have different records")
        elif chains:
            giver, chain = chains[0]
            for record in reversed(chain):  # the older first: a newest record never hides one that is not there
                found = self.bad.get(record.generation) or self._missing(record.generation, record.generation)
                self._put_back(found, record.generation, iter([(giver, record)]))

    def _put_back(self, found: Finding, generation: int, given: Iterator[tuple[str, RefRecord]]) -> bool:
        giver, record = next(given, (None, None))
        if giver is None or record is None:
            return False
        if not self.ward.dry:
            backend = repairing(self.ward.backend)
            if found.kind is Kind.MISSING:
                backend.create(found.key, record.encode())
            elif not self._is_whole_now(record):
                backend.replace(found.key, record.encode())
            if not self._is_whole_now(record):
                message = "the right bytes were written, and others came back"
                self.bad[generation] = self._finding(Kind.CORRUPT, generation, message)
                return True
        self.bad.pop(generation, None)
        self.good[generation] = record
        size = len(record.encode())
        self.ward.healed.append(Healed(found.key, found.kind, size, giver, found.place))
        return True

    def _is_whole_now(self, record: RefRecord) -> bool:
        try:
            return self.refs.record(self.name, record.generation) == record
        except CkptStoreError:
            return False

    def _missing(self, first: int, last: int) -> Finding:
        which = f"{last}" if first == last else f"{first} to {last}"
        place = Place(part=f"ref {self.name} generation {which}")
        return Finding(Kind.MISSING, place, ref_key(self.name, last), "not in the store")

    def _finding(self, kind: Kind, generation: int, message: str) -> Finding:
        place = Place(part=f"ref {self.name} generation {generation}")
        return Finding(kind, place, ref_key(self.name, generation), message)


def corrected(data: bytes) -> Iterator[RefRecord]:
    """Records that agree with their own check and differ from ``data`` in one bit."""
    if len(data) > _CORRECTABLE:
        return
    changed = bytearray(data)
    for index in range(len(data)):
        for bit in range(8):
            changed[index] ^= 1 << bit
            with suppress(CorruptError, MalformedError):
                yield RefRecord.parse(bytes(changed))
            changed[index] ^= 1 << bit


def _digest(record: RefRecord) -> Digest:
    return Digest.of(record.encode())


def _is_chain(chain: list[RefRecord], run: list[int], wanted: Digest | None) -> bool:
    """Whether these are records of the generations of ``run``, newest first, each after the next, the last one after
    the record with the digest ``wanted`` (None: it is the first of all)."""
    if [record.generation for record in chain] != run:
        return False
    previous = [*(_digest(record) for record in chain[1:]), wanted]
    return all(record.previous == digest for record, digest in zip(chain, previous, strict=True))
