"""Save: a captured state of live torch objects, written as a shard."""

from __future__ import annotations

from functools import partial

from ckptstore.backends.protocol import Buffer
from ckptstore.capture import Captured
from ckptstore.format.digest import Digest
from ckptstore.tensors import DTYPES, chunks
from ckptstore.write import Contents, Sink, TensorBytes, WrittenShard, write_contents


class HashSink:
    """Keeps nothing: what a live state would be stored as."""

    def put_object(self, data: Buffer, /) -> Digest:
        """Digest of an object."""
        return Digest.of(data)

    def put_document(self, data: bytes, /) -> Digest:
        """Digest of a document."""
        return Digest.of(data)


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
    tensors = [
        TensorBytes(
            path=source.path,
            role=source.role,
            dtype=DTYPES[source.tensor.dtype],
            shape=tuple(source.tensor.shape),
            chunks=partial(chunks, source.tensor),
        )
        for source in captured.tensors
    ]
    contents = Contents(
        tensors=tensors,
        values=captured.values,
        hypers=captured.hypers,
        optimizers=captured.optimizers,
        aliases=captured.aliases,
        rng=captured.rng,
    )
    return write_contents(contents, index, count, sink)
