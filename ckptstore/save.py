"""Save: a captured state of live torch objects, written as a shard."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ckptstore.backends.protocol import Buffer
from ckptstore.capture import Captured, TrainingState
from ckptstore.commit import Attempt, give_up, publish
from ckptstore.errors import CkptStoreError
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.progress import Cursor, Progress
from ckptstore.format.records import ShardReceipt
from ckptstore.objects import Objects
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


def save_shard(
    objects: Objects,
    state: TrainingState,
    attempt: Attempt,
    *,
    step: int,
    index: int,
    count: int,
    run: Digest | None,
    binding: Mapping[str, object],
    cursors: Mapping[str, Cursor],
    files: Digest | None,
) -> ShardReceipt:
    """Write one worker's shard durably, and publish its receipt if there are others; see :meth:`Store.save_shard`."""
    try:
        captured = state.capture()
        written = write_shard(captured, index, count, objects)
        receipt = ShardReceipt(
            attempt=attempt.nonce,
            index=index,
            count=count,
            step=step,
            parent=attempt.parent,
            run=run,
            binding=values.to_json(dict(binding), "binding"),
            progress=Progress(cursors=tuple(sorted(cursors.items())), states=tuple(captured.states)),
            files=files,
            shard=written.digest,
        )
    except CkptStoreError as error:
        if count > 1:
            give_up(objects, attempt, index=index, count=count, step=step, reason=str(error))
        raise
    if count > 1:
        publish(objects, receipt)
    return receipt
