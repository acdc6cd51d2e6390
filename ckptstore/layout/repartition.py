"""Repartition: a checkpoint of the same learned state, owned by other shards. Needs no torch.

Chunks of 256 KiB or more are named by the new documents as they lie in the store; only packs and documents are
written, and the state root stays what it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ckptstore.chunks import ChunkSource
from ckptstore.closure import Need
from ckptstore.commits.commit import Declared
from ckptstore.errors import ConflictError, RefusedError
from ckptstore.format.checkpoint import Checkpoint, Deviation
from ckptstore.format.digest import Digest
from ckptstore.format.keys import check_ref_name, object_key
from ckptstore.format.page import TensorEntry
from ckptstore.format.records import ShardReceipt
from ckptstore.format.tensors import SHORT
from ckptstore.layout.division import Division, divide, is_divided_so
from ckptstore.layout.rewriting import CountingReader, CountingSink, write_division
from ckptstore.meter import Meter, OnProgress
from ckptstore.store import Store
from ckptstore.threads import in_threads
from ckptstore.write import WrittenShard

GENERATORS = "generators"
"""Code of the deviation by which a repartitioned checkpoint says whose generators its shards have."""


@dataclass(frozen=True, slots=True)
class Repartitioned:
    """A checkpoint that was given other shards, and what that took.

    Args:
        root, parent: the new checkpoint and the one that it was made from; equal if that had these shards already,
            and then nothing was written.
        state_root: of both.
        shards: how many there are now.
        generators: for each of them, the shard of the parent whose generators it has.
        chunks, chunk_bytes: distinct chunks that are objects of their own, taken over as they lie, and their bytes.
        rewritten: how many of them were written.
        packs, pack_bytes: distinct packs of the new shards, and their bytes.
        documents, document_bytes: distinct pages, shards and the checkpoint, and their bytes.
        written_bytes: of packs and documents, those that were not in the store before, and the checkpoint.
        read_bytes: objects that were read and hashed; what this process wrote or verified before is not read again.
        deviations: in what the new checkpoint is no exact continuation.
    """

    root: Digest
    parent: Digest
    state_root: Digest
    shards: int
    generators: tuple[int, ...]
    chunks: int
    chunk_bytes: int
    rewritten: int
    packs: int
    pack_bytes: int
    documents: int
    document_bytes: int
    written_bytes: int
    read_bytes: int
    deviations: tuple[Deviation, ...]


def repartition(
    store: Store,
    root: Digest,
    shards: Sequence[Collection[str]],
    *,
    ref: str,
    progress: OnProgress | None = None,
) -> Repartitioned:
    """Give the state of a checkpoint to other shards, and let ``ref`` name the checkpoint that says so.

    The new checkpoint has ``root`` as its parent, and its step, progress, binding, preparation and files. Its state
    root is that of ``root``. Every object that it takes over is read and hashed, unless this process wrote or verified
    it before. Generators cannot be divided: shard ``i`` of ``n`` takes over those of the parent's shard ``i`` modulo
    the number of its shards, and ``deviations`` say so.

    Args:
        store: holds all of ``root``.
        root: the checkpoint.
        shards: the paths of each new shard; see :func:`ckptstore.layout.division.divide`.
        ref: names ``root`` now, or nothing yet; then it names ``root`` first.
        progress: called with (bytes read, bytes in all) while chunks are verified.

    Returns:
        The new root and the figures. Where ``root`` has exactly these shards already, it is left as it is.

    Raises:
        UsageError: a new shard gets nothing, or a path has no place, or is not in the checkpoint.
        RefusedError: what an optimizer keeps over all of its parameters would be torn apart.
        ConflictError: ``ref`` names another root, or was moved meanwhile.
        CorruptError, NotFoundError, MalformedError: something of ``root`` is bad or missing; the ref was not moved.
    """
    head = store.head(check_ref_name(ref))
    if head not in (root, None):
        raise _moved(ref, head, root)
    with store.lease():
        closure = store.closure(root)
        checkpoint = closure.checkpoint
        assert checkpoint is not None
        views = [closure.shards[index] for index in range(len(checkpoint.shards))]
        division = divide(checkpoint, views, shards)
        reader, sink = CountingReader(store.objects), CountingSink(store.objects)
        new = root
        if not is_divided_so(checkpoint, views, division):
            _verify(reader, [need for need in closure.objects.values() if not need.slots], progress)
            written = write_division(division, [ChunkSource(reader, view) for view in views], sink)
            new = _commit(store, ref, root, checkpoint, division, written)
        elif head is None:
            store.move_ref(ref, root, None)
        return _figures(new, root, store.checkpoint(new), division, reader, sink)


def _verify(reader: CountingReader, needs: Sequence[Need], progress: OnProgress | None) -> None:
    """Read and hash every object that is taken over and that this process does not know yet."""
    unread = [need for need in needs if not reader.knows(need.digest)]
    meter = Meter(sum(need.length for need in unread), progress)

    def read(need: Need) -> bytes:
        data = reader.read(need.digest, need.length, need.places[0])
        assert data is not None
        return data

    for _ in meter.passing(in_threads(read, unread, reader.threads)):
        pass


def _commit(
    store: Store, ref: str, root: Digest, checkpoint: Checkpoint, division: Division, written: Sequence[WrittenShard]
) -> Digest:
    """Let ``ref`` go from ``root`` to the checkpoint of these shards, which are durable; returns its root."""

    def check(new: Digest) -> None:
        state_root = store.checkpoint(new).state_root
        if state_root != checkpoint.state_root:
            why = f"the new shards have the state root {state_root}, expected {checkpoint.state_root}"
            raise RefusedError(f"repartition of {root.short}", why, "this is a bug; the ref was not moved")

    if store.head(ref) is None:
        store.move_ref(ref, root, None)
    attempt = store.begin(ref)
    if attempt.parent != root:
        raise _moved(ref, attempt.parent, root)
    receipts = [
        ShardReceipt(
            attempt=attempt.nonce,
            index=index,
            count=len(written),
            step=checkpoint.step,
            parent=root,
            run=checkpoint.run,
            binding=checkpoint.binding,
            progress=replace(checkpoint.progress, counters=()),
            files=checkpoint.files,
            shard=shard.digest,
        )
        for index, shard in enumerate(written)
    ]
    declared = Declared(
        division.ties,
        division.replicas,
        _deviations(division),
        {counter.name: counter.tracks_step for counter in checkpoint.progress.counters},
    )
    committed = store.commits.conclude(attempt, receipts, declared, before_ref=check)
    store.note_in_catalogue(committed.root)
    return committed.root


def _deviations(division: Division) -> list[Deviation]:
    """That the generators are not those of processes that went on, where there are any."""
    if not any(part.rng for part in division.parts):
        return []
    taken = ", ".join(str(source) for source in division.generators)
    shards = "shard" if len(division.parts) == 1 else "shards"
    return [Deviation(GENERATORS, "each shard's own", f"those of the parent's {shards} {taken}")]


def _figures(
    new: Digest,
    root: Digest,
    checkpoint: Checkpoint,
    division: Division,
    reader: CountingReader,
    sink: CountingSink,
) -> Repartitioned:
    lengths = {
        object_key(digest): length
        for part in division.parts
        for held in part.held
        if isinstance(held.entry, TensorEntry)
        for digest, length in zip(held.entry.chunks, held.entry.lengths(), strict=True)
        if length >= SHORT
    }
    own = len(checkpoint.encode()) if new != root else 0
    return Repartitioned(
        root=new,
        parent=root,
        state_root=checkpoint.state_root,
        shards=len(division.parts),
        generators=division.generators,
        chunks=len(lengths),
        chunk_bytes=sum(lengths.values()),
        rewritten=len(sink.created & lengths.keys()),
        packs=sink.packs.keys,
        pack_bytes=sink.packs.nbytes,
        documents=sink.documents.keys + (own > 0),
        document_bytes=sink.documents.nbytes + own,
        written_bytes=sink.packs.new_bytes + sink.documents.new_bytes + own,
        read_bytes=reader.nbytes,
        deviations=checkpoint.deviations if new != root else (),
    )


def _moved(ref: str, head: Digest | None, expected: Digest) -> ConflictError:
    hint = "repartition its head, or give a ref that names nothing yet"
    return ConflictError(f"ref {ref}", f"it names {head}, expected {expected}", hint)
