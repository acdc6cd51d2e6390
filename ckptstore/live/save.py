"""Save: a captured state of live torch objects, written as a shard.

Live memory is read while it is written. Whatever other threads do to it meanwhile, what is stored has the digest that
it is stored under; and a state that changed before all of it was written is refused, and no checkpoint names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ckptstore.backends.protocol import Buffer
from ckptstore.commits.attempts import Attempt, give_up, publish
from ckptstore.errors import UsageError
from ckptstore.format import values
from ckptstore.format.canonical import MAX_INT
from ckptstore.format.digest import Digest
from ckptstore.format.progress import Cursor, Progress
from ckptstore.format.records import ShardReceipt
from ckptstore.live.capture import Captured, TrainingState
from ckptstore.live.preflight import check_fits, check_receipt
from ckptstore.live.snapshot import Snapshot, check_unchanged
from ckptstore.live.tensors import DTYPES, chunks
from ckptstore.objects import Objects
from ckptstore.write import Contents, Sink, TensorBytes, WrittenShard, write_contents


class HashSink:
    """Keeps nothing: what a live state would be stored as."""

    threads = None

    def put_object(self, data: Buffer, /) -> Digest:
        """Digest of an object."""
        return Digest.of(data)

    def put_document(self, data: bytes, /) -> Digest:
        """Digest of a document."""
        return Digest.of(data)


class _OwnBytes:
    """Gives a store bytes that nobody else can change between hashing and writing."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.threads = sink.threads

    def put_object(self, data: Buffer, /) -> Digest:
        """Store an object."""
        return self._sink.put_object(bytes(data))

    def put_document(self, data: bytes, /) -> Digest:
        """Store a document."""
        return self._sink.put_document(data)


def write_shard(captured: Captured, index: int, count: int, sink: Sink) -> WrittenShard:
    """Write everything that one worker owns: objects, then pages, then the shard document.

    Args:
        captured: the state.
        index: this shard's number, from 0.
        count: number of shards of the checkpoint.
        sink: takes objects and documents; called from several threads.

    Raises:
        RefusedError: an entry is given twice or is too large, or a tensor changed before all of them were written.
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
    written = write_contents(contents, index, count, sink)
    check_unchanged(captured)
    return written


def check_place(step: int, index: int, count: int, cursors: Mapping[str, Cursor]) -> None:
    """UsageError for a step, a shard number or a cursor that no checkpoint can hold."""
    limits = {"step": (step, 0), "index": (index, 0), "count": (count, 1)}
    for name, cursor in cursors.items():
        if type(name) is not str or not name or type(cursor.unit) is not str or not cursor.unit:
            raise UsageError(f"cursor {name!r:.60}", f"its name or its unit {cursor.unit!r:.60} is not a text")
        values.check_text(name + cursor.unit, f"cursor {name!r:.60}")
        limits[f"position of cursor {name}"] = (cursor.position, 0)
        if cursor.per_step is not None:
            limits[f"per_step of cursor {name}"] = (cursor.per_step, 0)
    for what, (number, least) in limits.items():
        if type(number) is not int or not least <= number <= MAX_INT:
            raise UsageError(what, f"{number!r:.60} is not an int from {least} to 2^53 - 1", "convert it with int()")
    if index >= count:
        raise UsageError("index", f"{index} of {count} shards, which are numbered from 0")


def save_shard(
    objects: Objects,
    state: TrainingState | Snapshot,
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
    check_place(step, index, count, cursors)
    for what, digest in (("run", run), ("files", files)):
        if digest is not None and type(digest) is not Digest:
            raise UsageError(
                f"{what}=", f"{digest!r:.60} is no digest", "give what put_preparation or put_tree returned"
            )
    try:
        captured = state.capture()
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
            shard=Digest.of(b""),  # known when it is written
        )
        check_receipt(receipt)
        check_fits(captured)
        written = write_shard(captured, index, count, _OwnBytes(objects))
        receipt = replace(receipt, shard=written.digest)
    except Exception as error:  # whatever it was, the other workers must not wait for it
        if count > 1:
            give_up(objects, attempt, index=index, count=count, step=step, reason=str(error))
        raise
    if count > 1:
        publish(objects, receipt)
    return receipt
