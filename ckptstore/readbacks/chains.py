"""Logs of refs, seen through records that were read one by one: each follows the one before, and none is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import parse_ref_key, ref_key
from ckptstore.format.records import RefRecord


def broken_links(keys: Iterable[str], read: Mapping[str, tuple[RefRecord, Digest]]) -> Iterator[Finding]:
    """What is wrong between the generations of refs.

    Args:
        keys: all keys of the store.
        read: records that were read and are good in themselves, and their digests, by key.
    """
    generations: dict[str, list[int]] = {}
    for key in keys:
        if (parsed := parse_ref_key(key)) is not None:
            generations.setdefault(parsed[0], []).append(parsed[1])
    for name, there in generations.items():
        before = 0
        for generation in sorted(there):
            if generation - 1 != before:  # one finding however many: a planted record may claim any number
                missing = f"{before + 1}" if before == generation - 2 else f"{before + 1} to {generation - 1}"
                place = Place(part=f"ref {name} generation {missing}")
                yield Finding(Kind.MISSING, place, ref_key(name, generation - 1), "not in the store")
            elif before:
                yield from _link(name, before, read.get(ref_key(name, before)), read.get(ref_key(name, generation)))
            before = generation


def _link(
    name: str, generation: int, record: tuple[RefRecord, Digest] | None, above: tuple[RefRecord, Digest] | None
) -> Iterator[Finding]:
    if record is None or above is None or above[0].previous == record[1]:
        return
    place = Place(part=f"ref {name} generation {generation}")
    message = "not the record that the next generation follows"
    expected, actual = str(above[0].previous), str(record[1])
    yield Finding(Kind.CORRUPT, place, ref_key(name, generation), message, expected, actual)
