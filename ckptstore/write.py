"""Write a shard: tensors as chunks, packs, pages and a shard document, streamed with bounded memory. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from ckptstore.backends.protocol import Buffer
from ckptstore.errors import RefusedError
from ckptstore.format.digest import Digest
from ckptstore.format.packs import PackLayout
from ckptstore.format.page import Entry, HyperEntry, Role, ValueEntry, make_tensor_entry, paginate, show_role, sort_key
from ckptstore.format.shard import Alias, Optimizer, PageRef, RngEntry, RolePacks, Shard
from ckptstore.format.tensors import INLINE, SHORT
from ckptstore.format.values import checked_nbytes
from ckptstore.threads import in_threads


class Sink(Protocol):
    """Where objects and documents go: a store, or only a hash."""

    @property
    def threads(self) -> int | None:
        """Objects at a time that are worth giving it, None for one by processor."""
        ...

    def put_object(self, data: Buffer, /) -> Digest:
        """Take an object; returns its digest."""
        ...

    def put_document(self, data: bytes, /) -> Digest:
        """Take a document; returns its digest."""
        ...


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor to be written, and a call that gives its row-major little-endian bytes in chunks of 16 MiB."""

    path: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that one shard owns, in any order."""

    tensors: Sequence[TensorBytes]
    values: Sequence[ValueEntry] = ()
    hypers: Sequence[HyperEntry] = ()
    optimizers: Sequence[Optimizer] = ()
    aliases: Sequence[Alias] = ()
    rng: Sequence[RngEntry] = ()


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A shard as it was written: its document's digest, the document, its entries in order."""

    digest: Digest
    shard: Shard
    entries: tuple[Entry, ...]


def write_contents(contents: Contents, index: int, count: int, sink: Sink) -> WrittenShard:
    """Write everything that one shard owns: objects, then pages, then the shard document.

    Args:
        contents: what it owns; the bytes must not change meanwhile.
        index: this shard's number, from 0.
        count: number of shards of the checkpoint.
        sink: takes objects and documents; called from several threads.

    Raises:
        RefusedError: an entry is given twice or is too large; nothing of it was written.
    """
    keys = Counter((item.role, item.path) for item in contents.tensors)
    keys.update((item.role, item.path) for item in contents.values)
    keys.update((item.role, item.path) for item in contents.hypers)
    for (role, path), times in keys.items():
        if times > 1:
            raise RefusedError(f"{show_role(role)} {path!r:.120}", "the state gives this entry twice")
    sources = sorted(contents.tensors, key=lambda source: sort_key(source.role, source.path))
    entries: list[Entry] = [*contents.values, *contents.hypers]
    role_packs: list[RolePacks] = []
    for role, group in groupby(_hashed(sources, sink), key=lambda item: item.source.role):
        writer = PackWriter(sink)
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
    return write_documents(
        entries,
        role_packs,
        index,
        count,
        sink,
        optimizers=contents.optimizers,
        aliases=contents.aliases,
        rng=contents.rng,
    )


def write_documents(
    entries: Iterable[Entry],
    packs: Iterable[RolePacks],
    index: int,
    count: int,
    sink: Sink,
    *,
    optimizers: Iterable[Optimizer],
    aliases: Iterable[Alias],
    rng: Iterable[RngEntry],
) -> WrittenShard:
    """Write the pages and the document of a shard whose objects are stored: its entries in any order, its packs by
    role. Raises RefusedError for an entry that is too large."""
    ordered = sorted(entries, key=lambda entry: sort_key(entry.role, entry.path))
    pages = [
        PageRef(sink.put_document(data), len(page), page[0].role, page[0].path) for page, data in paginate(ordered)
    ]
    shard = Shard(
        index=index,
        count=count,
        pages=tuple(pages),
        packs=tuple(packs),
        rng=tuple(rng),
        optimizers=tuple(sorted(optimizers, key=lambda optimizer: optimizer.name)),
        aliases=tuple(sorted(aliases, key=lambda alias: alias.path.encode())),
    )
    return WrittenShard(sink.put_document(shard.encode()), shard, tuple(ordered))


@dataclass(frozen=True, slots=True)
class _Piece:
    """One chunk on its way: stored (``digest``), or short and bound for a pack, or all of an inline tensor."""

    source: TensorBytes
    last: bool
    digest: Digest | None = None
    short: memoryview | None = None
    inline: bytes | None = None


def _hashed(sources: list[TensorBytes], sink: Sink) -> Iterator[_Piece]:
    """Chunks of all tensors in order; the long ones are hashed and stored in threads."""

    def pieces() -> Iterator[tuple[TensorBytes, memoryview, bool]]:
        for source in sources:
            previous: memoryview | None = None
            for chunk in source.chunks():
                if previous is not None:
                    yield source, previous, False
                previous = chunk
            yield source, memoryview(b"") if previous is None else previous, True

    def store(item: tuple[TensorBytes, memoryview, bool]) -> _Piece:
        source, data, last = item
        if checked_nbytes(source.dtype, source.shape) <= INLINE:
            return _Piece(source, last, inline=bytes(data))
        if len(data) < SHORT:
            return _Piece(source, last, short=data)
        return _Piece(source, last, digest=sink.put_object(data))

    return in_threads(store, pieces(), sink.threads)


class PackWriter:
    """Fills the packs of one role as the layout rule says."""

    def __init__(self, sink: Sink) -> None:
        self.digests: list[Digest] = []
        self._sink = sink
        self._layout = PackLayout()
        self._buffer = bytearray()

    def add(self, path: str, data: memoryview) -> Digest:
        """Take a short chunk; returns its digest."""
        data = memoryview(bytes(data))  # what is hashed is what is stored, whatever happens to live memory
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


def _entry(source: TensorBytes, digests: list[Digest], inline: bytes | None) -> Entry:
    return make_tensor_entry(source.path, source.role, source.dtype, source.shape, digests, inline)
