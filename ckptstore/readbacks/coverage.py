"""Which keys the receipts about one store cover, and when each was last read there.

A receipt about any root counts for every key of its closure. It is believed only if the closure that it states is the
one that its subject has here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from ckptstore.closure import Closure, read_closure, read_shard
from ckptstore.errors import CkptStoreError, MalformedError
from ckptstore.findings import Finding, Kind, Place, Report
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.records import closure_digest
from ckptstore.format.shard import Shard
from ckptstore.objects import Objects
from ckptstore.readbacks.readbacks import Part, Readback

SKEW = timedelta(minutes=1)
"""How far the clocks of two hosts may be apart before a receipt counts as one from the future."""

_LOOKS = 16  # closures that are read only to find out when exactly a key was read of which a bound is known


@dataclass(frozen=True, slots=True)
class Evidence:
    """The best readback of a key at one store: when at the latest age, and whether that lies in the future."""

    readback: Readback
    read_at: datetime
    future: bool

    @property
    def is_bound(self) -> bool:
        """Whether it says only that the key was not read longer ago."""
        return self.read_at < self.readback.time

    @property
    def rank(self) -> tuple[bool, bool, datetime]:
        """What reached a lasting medium is better, then what has a time that can be, then what is newer."""
        return self.readback.lasting, not self.future, self.read_at


@dataclass(frozen=True, slots=True)
class Keys:
    """The distinct keys of a closure with their sizes in bytes, their sum, and the digest of both."""

    documents: Mapping[str, int]
    objects: Mapping[str, int]
    size: int
    digest: Digest

    def sizes(self) -> dict[str, int]:
        """Size in bytes by key."""
        return {**self.documents, **self.objects}

    @staticmethod
    def of(closure: Closure) -> Keys:
        """The keys of a closure."""
        sizes = closure.sizes()
        objects = {key: need.length for key, need in closure.objects.items()}
        return Keys(closure.documents, objects, sum(size for _, size in sizes), closure_digest(sizes))


class Closures:
    """Keys of what receipts are about, read from the documents in one store, each once."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: dict[tuple[Digest, Part], Keys | None] = {}

    def know(self, root: Digest, part: Part, keys: Keys) -> None:
        """Take in what was read already."""
        self._known[root, part] = keys

    def keys(self, subject: Digest, part: Part) -> Keys | None:
        """The keys of a checkpoint, or of a shard that a receipt is about; None if not all of its documents are
        here."""
        if (subject, part) not in self._known:
            try:
                self._known[subject, part] = self._read(subject, part)
            except CkptStoreError:  # what is damaged here is found by those who ask for it, and by verify
                self._known[subject, part] = None
        return self._known[subject, part]

    def _read(self, subject: Digest, part: Part) -> Keys | None:
        data = self._objects.document(subject, Place(part=f"document {subject.short}"))
        assert data is not None
        try:
            Checkpoint.parse(data)
        except MalformedError:
            shard = Shard.parse(data)
            return Keys.of(read_shard(self._objects, subject, shard.index, shard.count))
        found: list[Finding] = []
        closure = read_closure(self._objects, subject, part.shards, found.append, files=part.files)
        return None if found else Keys.of(closure)

    def is_known(self, readback: Readback) -> bool:
        """Whether nothing has to be read to check a receipt."""
        return (readback.receipt.subject, readback.part) in self._known

    def check(self, readback: Readback, report: Report) -> Keys | None:
        """The keys that a receipt is about; None if they are not known here, or if it does not fit them, which is
        reported."""
        receipt = readback.receipt
        keys = self.keys(receipt.subject, readback.part)
        if keys is None:
            return None
        place = Place(checkpoint=receipt.subject, part=f"receipt of a {receipt.operation}")
        if receipt.closure != keys.digest:
            message = "it is about another closure than this checkpoint has, and is ignored"
            finding = Finding(
                Kind.INCONSISTENT, place, readback.key, message, str(keys.digest), str(receipt.closure or "none")
            )
        elif (
            receipt.objects == len(keys.objects)
            and receipt.bytes_read < keys.size
            and not readback.max_age
            and readback.read is None
        ):
            message = "it read fewer bytes than what it is about has, and is ignored"
            expected, actual = f"{keys.size} bytes", f"{receipt.bytes_read} bytes"
            finding = Finding(Kind.INCONSISTENT, place, readback.key, message, expected, actual)
        elif readback.read is not None and len(readback.read) != (len(keys.sizes()) + 7) // 8:
            message = "it does not say of each key of what it is about whether it was read, and is ignored"
            finding = Finding(Kind.INCONSISTENT, place, readback.key, message)
        else:
            return keys
        report(finding)
        return None


def cover(
    readbacks: Iterable[Readback], wanted: Collection[str], closures: Closures, now: datetime, report: Report
) -> dict[str, Evidence]:
    """The best evidence for each key that some receipt about one store covers, at least for those of ``wanted``.

    Closures are read from the newest receipt on, and only until an older one could say nothing better.

    Args:
        readbacks: receipts about one store.
        wanted: keys that are asked for.
        closures: where the keys of a receipt are looked up.
        now: the present time in UTC.
        report: takes what is wrong with a receipt, which then does not count.
    """
    covered: dict[str, Evidence] = {}
    looks = _LOOKS
    dated = [(_evidence(readback, readback.time, now), readback) for readback in readbacks]
    for best, readback in sorted(dated, key=lambda item: item[0].rank, reverse=True):
        if all(key in covered for key in wanted):
            worse = _worse(covered, wanted, best)
            if not worse:
                break
            if not closures.is_known(readback) and all(evidence.is_bound for evidence in worse):
                if not looks:
                    continue
                looks -= 1
        keys = closures.check(readback, report)
        if keys is None:
            continue
        for names, evidence in readings(readback, keys, now):
            _take(covered, names, evidence)
    return covered


def readings(readback: Readback, keys: Keys, now: datetime) -> Iterator[tuple[Iterable[str], Evidence]]:
    """What a receipt that was checked says of the keys that it is about: keys, and what is known of each of them."""
    best = _evidence(readback, readback.time, now)
    least = _evidence(readback, readback.time - readback.max_age, now)
    if readback.receipt.bytes_read >= keys.size:
        yield keys.sizes(), best
    elif readback.read is not None:
        named = sorted(keys.sizes())
        read = {key for index, key in enumerate(named) if readback.read[index // 8] >> index % 8 & 1}
        yield read, best
        if readback.max_age:
            yield (key for key in named if key not in read), least
    elif readback.max_age:
        yield keys.sizes(), least
    else:  # some objects were not read, and it does not say which
        yield keys.documents, best


def _evidence(readback: Readback, read_at: datetime, now: datetime) -> Evidence:
    return Evidence(readback, read_at, readback.time > now + SKEW)


def _take(covered: dict[str, Evidence], keys: Iterable[str], evidence: Evidence) -> None:
    for key in keys:
        if key not in covered or covered[key].rank < evidence.rank:
            covered[key] = evidence


def _worse(covered: Mapping[str, Evidence], wanted: Collection[str], other: Evidence) -> list[Evidence]:
    """Evidence of keys that are asked for which is worse than ``other``, all being covered."""
    distinct = {id(covered[key]): covered[key] for key in wanted}.values()
    return [evidence for evidence in distinct if evidence.rank < other.rank]
