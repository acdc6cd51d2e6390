"""A group's shards become one checkpoint: saved by workers, moved and read back by the controller, committed there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ckptstore
from ckptstore import Attempt, Checkpoint, Digest, ShardReceipt, Store
from ckptstore.format.canonical import Json
from trainer.lifecycle import fingerprints
from trainer.lifecycle.admission import drift
from trainer.lifecycle.expect import require
from trainer.lifecycle.replay import agreed_results
from trainer.workers.events import Event
from trainer.workers.fingerprints import Fingerprint
from trainer.workers.group import LaunchedGroup
from trainer.workers.hosts import STORE, Host
from trainer.workers.orders import Save

OPERATOR, REFERENCE = "operator", "reference"
"""Names of the two stores of a run: everybody's, and the one of the run without a loss."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A shard of a checkpoint on its way between two stores, in bytes; all that was there at its end was read back."""

    shard: int
    source: str
    target: str
    sent_bytes: int
    present_keys: int
    readback_bytes: int
    method: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint, and what it took. ``verified_bytes`` are those of its closure, read again after the commit."""

    step: int
    root: Digest
    parent: Digest | None
    state_root: Digest
    generation: int
    store: str
    moved: tuple[Moved, ...]
    save_ms: tuple[float, ...]
    verified_bytes: int
    method: str
    seconds: float


def commit_by_way_of_hosts(
    group: LaunchedGroup, operator: Store, ref: str, step: int, parent: Digest | None, *, binding: Json = None
) -> Committed:
    """Workers save to their hosts' stores; each shard goes to the operator's store, is read back and committed there.

    Args:
        group: has made ``step`` updates, among them all since the parent.
        operator, ref: where the checkpoint is to be.
        step: updates made.
        parent: what the state of the group was restored from; the ref has to name it still.
        binding: what the checkpoint is to say instead of what the workers measured, for one that is only made to be
            compared.

    Raises:
        NotAsPlannedError: the workers disagree about an update, or the ref names something else.
        CommitAbortedError, ConflictError, CorruptError, GroupLostError: there is no checkpoint.
    """
    return _commit(group, operator, OPERATOR, ref, step, parent, STORE, binding)


def commit_reference(group: LaunchedGroup, store: Store, ref: str, step: int, parent: Digest | None) -> Committed:
    """The same, to the reference's store, and by way of stores that are removed: hosts keep nothing of it.

    Arguments and errors as in :func:`commit_by_way_of_hosts`.
    """
    for host in group.hosts:
        ckptstore.open(host.directory / REFERENCE, create=True)
        host.publish()
    committed = _commit(group, store, REFERENCE, ref, step, parent, REFERENCE)
    for host in group.hosts:
        host.remove(REFERENCE)
    return committed


def _commit(
    group: LaunchedGroup,
    store: Store,
    name: str,
    ref: str,
    step: int,
    parent: Digest | None,
    where: str,
    binding: Json = None,
) -> Committed:
    with store.lease():  # from the tree, which nothing names yet, to the checkpoint that does
        begun = begin_commit(group, store, name, ref, step, parent)
        order = Save(str(begun.attempt), step, where, begun.files)
        saved = group.tell(order, group.launch.plan.timeouts.commit)
        return conclude(group, store, name, begun, saved, where=where, binding=binding)


@dataclass(frozen=True, slots=True)
class Begun:
    """A commit that has begun, at ``at`` seconds of the monotonic clock: its attempt, the checkpoint ``before`` it, and
    the fingerprints of the updates in between with the tree that they are in."""

    attempt: Attempt
    before: Checkpoint | None
    fingerprints: tuple[Fingerprint, ...]
    files: Digest
    at: float


def begin_commit(group: LaunchedGroup, store: Store, name: str, ref: str, step: int, parent: Digest | None) -> Begun:
    """Begin to commit what a group has made; arguments and errors as in :func:`commit_by_way_of_hosts`."""
    began = time.monotonic()
    agreed_results(group)
    attempt = store.begin(ref)
    require(f"root of ref {ref} in the {name} store before the commit of step {step}", parent, attempt.parent)
    before = None if parent is None else store.checkpoint(parent)
    made = fingerprints.taken(group, 1 if before is None else before.step + 1, step)
    return Begun(attempt, before, made, fingerprints.put(store, made), began)


def conclude(
    group: LaunchedGroup,
    store: Store,
    name: str,
    begun: Begun,
    saved: Sequence[Event],
    *,
    where: str = STORE,
    binding: Json = None,
) -> Committed:
    """What comes of a commit whose shards are saved: they are moved if they have to be, committed, and read back.

    Tells the group nothing, so it may do anything else meanwhile.

    Args:
        group: the group whose workers saved.
        store, name: where the checkpoint is to be, and what that store is called.
        begun: the commit.
        saved: the ``saved`` event of each worker, by shard.
        where: the folder of the hosts' own stores that the workers saved to.
        binding: as in :func:`commit_by_way_of_hosts`.

    Raises:
        CommitAbortedError, ConflictError, CorruptError, NotFoundError: there is no checkpoint.
    """
    receipts = [ShardReceipt.parse(event["receipt"].encode()) for event in saved]
    if binding is not None:
        receipts = [replace(one, binding=binding) for one in receipts]
    with store.lease():
        fingerprints.put(store, begun.fingerprints)  # nothing named the tree so far, and it may be long since
        moved = push_shards(group.hosts, receipts, store, name, where)
        root = store.commit(begun.attempt, receipts, deviations=drift(begun.before, receipts[0].binding))
    report = store.verify(root)
    require(f"findings in the closure of {root.short} in the {name} store", [], [str(f) for f in report.findings])
    store.add_receipt(report.receipt(store.url))
    checkpoint = store.checkpoint(root)
    return Committed(
        step=checkpoint.step,
        root=root,
        parent=checkpoint.parent,
        state_root=checkpoint.state_root,
        generation=group.generation,
        store=name,
        moved=moved,
        save_ms=tuple(event["ms"] for event in saved),
        verified_bytes=report.bytes_read,
        method=report.method.value,
        seconds=time.monotonic() - begun.at,
    )


def push_shards(
    hosts: Sequence[Host], receipts: Sequence[ShardReceipt], store: Store, name: str, where: str = STORE
) -> tuple[Moved, ...]:
    """Copy each host's shard from its store to ``store``, called ``name``, and read all of it back there.

    ``where`` is the folder of the hosts' own stores.
    """
    moved = []
    for host, receipt in zip(hosts, receipts, strict=True):
        host.collect()
        done = ckptstore.push_shard(ckptstore.open(host.directory / where), store, receipt)
        moved.append(
            Moved(
                receipt.index,
                host.name,
                name,
                done.sent_bytes,
                done.present_keys,
                done.receipt.bytes_read,
                done.receipt.method,
            )
        )
    return tuple(moved)
