"""Rewriting: the packs, pages and shard documents of a division, from chunks that are in the store already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from threading import Lock

from ckptstore.backends.protocol import Buffer
from ckptstore.chunks import ChunkSource
from ckptstore.findings import Place, Report, raise_finding
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, object_key
from ckptstore.format.page import TensorEntry
from ckptstore.format.shard import RolePacks
from ckptstore.layout.division import Division, Part
from ckptstore.objects import Objects
from ckptstore.write import PackWriter, WrittenShard, write_documents


@dataclass(slots=True)
class Tally:
    """Distinct keys, their bytes, and how many of those bytes were not in the store before."""

    keys: int = 0
    nbytes: int = 0
    new_bytes: int = 0


class CountingReader:
    """Reads objects of a store, verified, and counts their bytes; may be called from several threads."""

    def __init__(self, objects: Objects) -> None:
        self.nbytes = 0
        self._objects = objects
        self._lock = Lock()

    @property
    def threads(self) -> int:
        """Calls at a time that are worth making."""
        return self._objects.threads

    def knows(self, digest: Digest) -> bool:
        """Whether this process wrote or verified the object, so that its size alone has to be looked at again."""
        return self._objects.is_verified(object_key(digest))

    def read(self, digest: Digest, length: int, place: Place, report: Report = raise_finding) -> bytes | None:
        """The object with this digest and length; see :meth:`ckptstore.objects.Objects.read`."""
        data = self._objects.read(digest, length, place, report)
        with self._lock:
            self.nbytes += 0 if data is None else len(data)
        return data


class CountingSink:
    """Puts packs and documents into a store, and counts them."""

    def __init__(self, objects: Objects) -> None:
        self.packs, self.documents = Tally(), Tally()
        self.created: set[str] = set()
        self._objects = objects
        self._seen: set[str] = set()

    @property
    def threads(self) -> int:
        """Objects at a time that are worth giving it."""
        return self._objects.threads

    def put_object(self, data: Buffer, /) -> Digest:
        """Store a pack; returns its digest."""
        digest = Digest.of(data)
        self._put(self.packs, object_key(digest), digest, data)
        return digest

    def put_document(self, data: bytes, /) -> Digest:
        """Store a document; returns its digest."""
        digest = Digest.of(data)
        self._put(self.documents, document_key(digest), digest, data)
        return digest

    def _put(self, tally: Tally, key: str, digest: Digest, data: Buffer) -> None:
        created = self._objects.put(key, digest, data)
        length = memoryview(data).nbytes
        if created:
            self.created.add(key)
            tally.new_bytes += length
        if key not in self._seen:
            self._seen.add(key)
            tally.keys += 1
            tally.nbytes += length


def write_division(division: Division, sources: Sequence[ChunkSource], sink: CountingSink) -> list[WrittenShard]:
    """Write every shard of a division: packs, then pages, then the shard document. Chunks that are objects of their own
    stay where they are.

    Args:
        division: what each shard gets.
        sources: the chunks of each old shard, in order; all that lie in packs are read and verified.
        sink: takes packs and documents.

    Raises:
        CorruptError, NotFoundError: a pack is bad or missing; names the place.
    """
    count = len(division.parts)
    return [_write_part(part, index, count, sources, sink) for index, part in enumerate(division.parts)]


def _write_part(part: Part, index: int, count: int, sources: Sequence[ChunkSource], sink: CountingSink) -> WrittenShard:
    packs: list[RolePacks] = []
    short = [
        (held.entry, sources[held.source])
        for held in part.held
        if isinstance(held.entry, TensorEntry) and held.entry.tail
    ]
    for role, group in groupby(short, key=lambda item: item[0].role):
        writer = PackWriter(sink)
        for entry, source in group:
            writer.add(entry.path, memoryview(source.read(entry, len(entry.chunks) - 1)))
        writer.close()
        packs.append(RolePacks(role, tuple(writer.digests)))
    return write_documents(
        [held.entry for held in part.held],
        packs,
        index,
        count,
        sink,
        optimizers=part.optimizers,
        aliases=part.aliases,
        rng=part.rng,
    )
