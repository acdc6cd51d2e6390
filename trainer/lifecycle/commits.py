"""A group's shards become one checkpoint: saved by workers, moved and read back by the controller, committed there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import ckptstore
from ckptstore import Digest, ShardReceipt, Store
from trainer.lifecycle.expect import require
from trainer.workers.group import LaunchedGroup
from trainer.workers.hosts import STORE
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


def commit_by_way_of_hosts(group: LaunchedGroup, operator: Store, ref: str, step: int) -> Committed:
    """Workers save to their hosts' stores; each shard goes to the operator's store, is read back and committed there.

    Raises:
        CommitAbortedError, ConflictError, CorruptError, GroupLostError: there is no checkpoint.
    """
    began = time.monotonic()
    attempt = operator.begin(ref)
    saved = group.tell(Save(str(attempt), step, STORE))
    receipts = [ShardReceipt.parse(event["receipt"].encode()) for event in saved]
    moved = []
    for host, receipt in zip(group.hosts, receipts, strict=True):
        done = ckptstore.push_shard(ckptstore.open(host.store), operator, receipt)
        moved.append(
            Moved(
                receipt.index,
                host.name,
                OPERATOR,
                done.sent_bytes,
                done.present_keys,
                done.receipt.bytes_read,
                done.receipt.method,
            )
        )
    root = operator.commit(attempt, receipts)
    times = tuple(event["ms"] for event in saved)
    return _committed(group, operator, OPERATOR, step, root, tuple(moved), times, began)


def commit_reference(group: LaunchedGroup, store: Store, path: Path, ref: str, step: int) -> Committed:
    """Workers save to the reference's store, at ``path``, which all of them reach; committed there. Errors as above."""
    began = time.monotonic()
    attempt = store.begin(ref)
    saved = group.tell(Save(str(attempt), step, str(path)))
    receipts = [ShardReceipt.parse(event["receipt"].encode()) for event in saved]
    root = store.commit(attempt, receipts)
    return _committed(group, store, REFERENCE, step, root, (), tuple(event["ms"] for event in saved), began)


def _committed(
    group: LaunchedGroup,
    store: Store,
    name: str,
    step: int,
    root: Digest,
    moved: tuple[Moved, ...],
    save_ms: tuple[float, ...],
    began: float,
) -> Committed:
    report = store.verify(root)
    require(f"findings in the closure of {root.short} in the {name} store", [], [str(f) for f in report.findings])
    store.add_receipt(report.receipt(store.url))
    checkpoint = store.checkpoint(root)
    return Committed(
        step=step,
        root=root,
        parent=checkpoint.parent,
        state_root=checkpoint.state_root,
        generation=group.generation,
        store=name,
        moved=moved,
        save_ms=save_ms,
        verified_bytes=report.bytes_read,
        method=report.method.value,
        seconds=time.monotonic() - began,
    )
