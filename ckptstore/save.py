"""Save: a captured state as chunks, packs, pages and a shard document, streamed with bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from ckptstore.backends.protocol import Buffer
from ckptstore.capture import Captured, TensorSource
from ckptstore.errors import RefusedError
from ckptstore.format import packs
from ckptstore.format.digest import Digest
from ckptstore.format.page import Entry, HyperEntry, Role, ValueEntry, make_tensor_entry, paginate, sort_key
from ckptstore.format.shard import PageRef, RolePacks, Shard
from ckptstore.format.tensors import INLINE, SHORT
from ckptstore.tensors import DTYPES, chunks
from ckptstore.threads import in_threads


class Sink(Protocol):
    """Where objects and documents go: a store, or only a hash."""

    def put_object(self, data: Buffer, /) -> Digest:
        """Take an object; returns its digest."""
        ...

    def put_document(self, data: bytes, /) -> Digest:
        """Take a document; returns its digest."""
        ...


class HashSink:
    """Keeps nothing: what a live state would be stored as."""

    def put_object(self, data: Buffer, /) -> Digest:
        """Digest of an object."""
        return Digest.of(data)

    def put_document(self, data: bytes, /) -> Digest:
        """Digest of a document."""
        return Digest.of(data)


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A shard as it was written: its document's digest, the document, its entries in order."""

    digest: Digest
    shard: Shard
    entries: tuple[Entry, ...]


def write_shard(captured: Captured, index: int, count: int, sink: Sink) -> WrittenShard:
    """Write everything that one worker owns: objects, then pages, then the shard document.

    Args:
        captured: the state; its tensors must not change meanwhile.
        index: this shard's number, from 0.
        count: number of shards of the checkpoint.
        sink: takes objects and documents; called from several threads.

    Raises:
        RefusedError: an entry is given twice or is too large; nothing of it was written.
    """
    given: list[TensorSource | ValueEntry | HyperEntry] = [*captured.tensors, *captured.values, *captured.hypers]
    keys = Counter((item.role, item.path) for item in given)
    for (role, path), times in keys.items():
        if times > 1:
            raise RefusedError(f"{'/'.join(role)} {path!r:.120}", "the state gives this entry twice")
    sources = sorted(captured.tensors, key=lambda source: sort_key(source.role, source.path))
    entries: list[Entry] = [*captured.values, *captured.hypers]
    role_packs: list[RolePacks] = []
    for role, group in groupby(_hashed(sources, sink), key=lambda item: item.source.role):
        writer = _PackWriter(sink)
        digests: list[Digest] = []
        for item in group:
            if item.digest is not None:
                digests.append(item.digest)
            if item.short is not None:
                digests.append(writer.add(item.source.path, item.short))
            if item.last:
                entries.append(_entry(item.source, digests, item.inline))
                digests = []
        writer.close()
        if writer.digests:
            role_packs.append(RolePacks(role, tuple(writer.digests)))
    entries.sort(key=lambda entry: sort_key(entry.role, entry.path))
    pages = [
        PageRef(sink.put_document(data), len(page), page[0].role, page[0].path) for page, data in paginate(entries)
    ]
    shard = Shard(
        index=index,
        count=count,
        pages=tuple(pages),
        packs=tuple(role_packs),
        rng=tuple(captured.rng),
        optimizers=tuple(sorted(captured.optimizers, key=lambda optimizer: optimizer.name)),
        aliases=tuple(sorted(captured.aliases, key=lambda alias: alias.path.encode())),
    )
    return WrittenShard(sink.put_document(shard.encode()), shard, tuple(entries))


@dataclass(frozen=True, slots=True)
class _Piece:
    """One chunk of a tensor on its way: stored (``digest``), or short and bound for a pack, or the whole of an
    inline tensor."""

    source: TensorSource
    last: bool
    digest: Digest | None = None
    short: memoryview | None = None
    inline: bytes | None = None


def _hashed(sources: list[TensorSource], sink: Sink) -> Iterator[_Piece]:
    """Chunks of all tensors in order; the long ones are hashed and stored in threads."""

    def pieces() -> Iterator[tuple[TensorSource, memoryview, bool]]:
        for source in sources:
            previous: memoryview | None = None
            for chunk in chunks(source.tensor):
                if previous is not None:
                    yield source, previous, False
                previous = chunk
            yield source, memoryview(b"") if previous is None else previous, True

    def store(item: tuple[TensorSource, memoryview, bool]) -> _Piece:
        source, data, last = item
        if source.tensor.numel() * source.tensor.element_size() <= INLINE:
            return _Piece(source, last, inline=bytes(data))
        if len(data) < SHORT:
            return _Piece(source, last, short=data)
        return _Piece(source, last, digest=sink.put_object(data))

    return in_threads(store, pieces())


class _PackWriter:
    """Fills the packs of one role as the layout rule says."""

    def __init__(self, sink: Sink) -> None:
        self.digests: list[Digest] = []
        self._sink = sink
        self._layout = packs.PackLayout()
        self._buffer = bytearray()

    def add(self, path: str, data: memoryview) -> Digest:
        """Take a short chunk; returns its digest."""
        digest = Digest.of(data)
        if self._layout.place(path, digest, len(data)):
            if self._layout.slots[digest].pack > len(self.digests):
                self.close()
            self._buffer += data
        return digest

    def close(self) -> None:
        """Store the pack that is being filled."""
        if self._buffer:
            self.digests.append(self._sink.put_object(bytes(self._buffer)))
            self._buffer.clear()


def _entry(source: TensorSource, digests: list[Digest], inline: bytes | None) -> Entry:
    role: Role = source.role
    dtype = DTYPES[source.tensor.dtype]
    return make_tensor_entry(source.path, role, dtype, tuple(source.tensor.shape), digests, inline)
