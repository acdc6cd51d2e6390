"""Looks: what reading one object back said, whoever needs it, so that it need not be read again for the next one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadBackend
from ckptstore.closure import Need
from ckptstore.errors import CkptStoreError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.digest import Digest
from ckptstore.objects import Objects

Cut = tuple[int, int, Digest]
"""Where a pack should have a chunk: (offset, length, chunk)."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was found when an object was read.

    Args:
        length: bytes that it should have.
        size: bytes that were read and are good, 0 if they are not.
        moment: when (of :func:`time.monotonic`).
        faults: what is wrong with the object itself, at no place.
        wrong: chunks that are not at their place in a pack, and what is there.
        cuts: digest of all the chunks that were looked for in it, None if it is no pack.
    """

    length: int
    size: int
    moment: float
    faults: tuple[Finding, ...] = ()
    wrong: tuple[tuple[Cut, Digest], ...] = ()
    cuts: Digest | None = None

    def tells_of(self, need: Need) -> bool:
        """Whether it says all that a reading for ``need`` would."""
        return self.length == need.length and self.cuts == cuts_of(need)

    def findings(self, key: str, need: Need) -> Iterator[Finding]:
        """What is wrong for whoever needs the object so, at every place that uses it."""
        for fault in self.faults:
            for place in need.places:
                yield Finding(fault.kind, place, key, fault.message, fault.expected, fault.actual)
        kind = self.faults[0].kind if self.faults else None
        if kind in (Kind.MISSING, Kind.UNREADABLE):
            why = "its pack is not in the store" if kind is Kind.MISSING else "its pack cannot be read"
            for place in need.slots.values():
                yield Finding(kind, place, key, why)
        for (offset, length, chunk), actual in self.wrong:
            message = f"wrong bytes at {offset} of its pack"
            yield Finding(Kind.CORRUPT, need.slots[offset, length, chunk], key, message, str(chunk), str(actual))


def look(objects: Objects, key: str, need: Need) -> Look:
    """Read one object back and hash it, and each chunk of a pack."""
    found: list[Finding] = []
    data = objects.read(need.digest, need.length, Place(), found.append)
    moment, cuts = time.monotonic(), cuts_of(need)
    if data is not None:
        return Look(need.length, len(data), moment, (), tuple(_wrong(data, need)), cuts)
    if found[0].kind in (Kind.MISSING, Kind.UNREADABLE):
        return Look(need.length, 0, moment, tuple(found), (), cuts)
    rest = _as_far_as_it_is_there(objects.backend, key, need) if need.slots else b""
    return Look(need.length, 0, moment, tuple(found), tuple(_wrong(rest, need)), cuts)


def cuts_of(need: Need) -> Digest | None:
    """Digest of the chunks that are looked for in a pack; None if there are none."""
    if not need.slots:
        return None
    return Digest.of("".join(sorted(f"{o} {n} {chunk.hex}\n" for o, n, chunk in need.slots)).encode())


def _wrong(data: bytes, need: Need) -> Iterator[tuple[Cut, Digest]]:
    """Which chunks are not at their place in a pack, and what is there."""
    view = memoryview(data)
    for offset, length, chunk in need.slots:
        actual = Digest.of(view[offset : offset + length])
        if actual != chunk:
            yield (offset, length, chunk), actual


def _as_far_as_it_is_there(backend: ReadBackend, key: str, need: Need) -> bytes:
    """The bytes of a damaged pack."""
    try:
        return backend.get(key, 0, need.length)
    except CkptStoreError:
        return b""
