"""A leg of a run for workers that somebody else's launcher starts: from the head of a ref on, with a commit at its end.

The orders are written into the prepared folder before any worker begins, and the checkpoint is committed when all have
ended, so that no controller has to live beside them. The folder has to be the same for all workers, by a file system
that they share. Needs no torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ckptstore
from ckptstore import Attempt, Digest, ShardReceipt
from ckptstore.errors import CommitAbortedError, MalformedError, NotFoundError, UsageError
from trainer.compute.numerics import env_for
from trainer.lifecycle import fingerprints
from trainer.lifecycle.admission import drift
from trainer.lifecycle.expect import require, unexpected
from trainer.lifecycle.replay import first_difference
from trainer.preparation.plan import Plan
from trainer.preparation.prepare import read_plan
from trainer.preparation.staged import INPUTS, PLAN, SOURCES
from trainer.workers import events, orders
from trainer.workers.events import Event
from trainer.workers.fingerprints import make, state_of
from trainer.workers.hosts import STORE
from trainer.workers.orders import Arm, Close, Restore, Save, Start, Train
from trainer.workers.reports import check, update_result
from trainer.workers.worker import events_path

ORDERS = "orders.jsonl"


@dataclass(frozen=True, slots=True)
class Leg:
    """The updates ``first`` to ``last`` of a plan, from the checkpoint ``root`` (None: from the starting weights)."""

    folder: Path
    plan: Plan
    identity: Digest
    root: Digest | None
    first: int
    last: int

    def shell(self) -> list[str]:
        """Lines of a shell that make the leg on this machine, by torchrun."""
        folder = shlex.quote(str(self.folder))
        world = len(self.plan.owners)
        return [
            *(f"export {name}={shlex.quote(value)}" for name, value in self.variables().items()),
            f"torchrun --nnodes=1 --nproc-per-node={world} --rdzv-backend=static --master-addr=127.0.0.1 "
            "--master-port=29500 --max-restarts=0 \\",
            f"  -m trainer worker --host {folder} --identity {self.identity} --orders {folder}/{ORDERS}",
            f"python -m trainer commit {folder}",
        ]

    def variables(self) -> dict[str, str]:
        """Variables that every worker has to be started with: torch reads them when it is imported."""
        return {**env_for(self.plan.numerics.kernels), "PYTHONPATH": str(self.folder / SOURCES)}


def begin(folder: Path, last: int | None, ref: str) -> Leg:
    """Begin an attempt in the prepared folder's store, and write the orders of a leg.

    Args:
        folder: as ``python -m trainer prepare`` made it, at the path that the workers know.
        last: the last update (None: the plan's next commit).
        ref: in the folder's store.

    Raises:
        RefusedError: the folder was not prepared.
        UsageError: there is nothing left to do up to ``last``.
    """
    folder = Path(os.path.abspath(folder))
    plan = read_plan(folder / PLAN)
    store = ckptstore.open(folder / STORE, create=True)
    root = store.head(ref)
    done = 0 if root is None else store.checkpoint(root).step
    last = next((step for step in plan.commits if step > done), len(plan.updates)) if last is None else last
    if not done < last <= len(plan.updates):
        why = (
            f"update {last} is not after update {done}, which {ref} has reached, and in the plan of {len(plan.updates)}"
        )
        raise UsageError(f"leg of {folder}", why)
    identity = store.put_preparation(*(store.put_tree(folder / name) for name in (PLAN, INPUTS, SOURCES)))
    begun = store.begin(ref)
    beginning = [Start()] if root is None else [Restore(root, STORE), Arm()]
    lines = [*beginning, Train(done + 1, last), Save(str(begun), last, STORE), Close()]
    (folder / ORDERS).write_bytes(b"".join(orders.encode(order) for order in lines))
    return Leg(folder, plan, identity, root, done + 1, last)


def commit(folder: Path) -> Digest:
    """Commit what the workers of a leg have saved, with the fingerprints of its updates; returns the root.

    Args:
        folder: as for :func:`begin`.

    Raises:
        NotFoundError: no leg was begun there.
        NotAsPlannedError: the workers disagree about an update.
        CommitAbortedError, ConflictError: there is no checkpoint; says why.
    """
    try:
        lines = (folder / ORDERS).read_bytes().splitlines()
    except FileNotFoundError:
        raise NotFoundError(f"{folder / ORDERS}", "no leg was begun here", "python -m trainer orders") from None
    found = {type(order): order for order in map(orders.parse, lines)}
    train, save = found.get(Train), found.get(Save)
    if not (isinstance(train, Train) and isinstance(save, Save)):
        raise MalformedError(f"{folder / ORDERS}", "they are not those of a leg", "begin one")
    store, attempt = ckptstore.open(folder / STORE), Attempt.parse(save.attempt)
    count = len(read_plan(folder / PLAN).owners)
    told = [_told(folder, shard, attempt) for shard in range(count)]
    results = [{number: update_result(event) for number, event in one.updates.items()} for one in told]
    for shard, other in enumerate(results[1:], 1):
        if (difference := first_difference(results[0], other)) is not None:
            raise unexpected(f"losses and norms of shard {shard}", "those of shard 0", difference)
    updates = range(train.first, train.last + 1)
    require("updates of the leg", list(updates), sorted(results[0]))
    made = [make(results[0][number], [state_of(one.updates[number]) for one in told]) for number in updates]
    parent = None if attempt.parent is None else store.checkpoint(attempt.parent)
    with store.lease():  # from the tree, which nothing names yet, to the checkpoint that does
        files = fingerprints.put(store, made)
        receipts = [replace(one.receipt, files=files) for one in told]
        return store.commit(attempt, receipts, deviations=drift(parent, receipts[0].binding))


@dataclass(frozen=True, slots=True)
class _Told:
    receipt: ShardReceipt
    updates: Mapping[int, Event]


def _told(folder: Path, shard: int, attempt: Attempt) -> _Told:
    """What a worker told of the leg that ended with ``attempt``: its file has those of earlier ones, too."""
    updates: dict[int, Event] = {}
    path = events_path(folder, 0, shard)
    for event in map(check, events.read(path) if path.exists() else ()):
        if event.name == "joined":
            updates = {}
        elif event.name == "update":
            updates[event["update"]] = event
        elif event.name == "saved":
            receipt = ShardReceipt.parse(event["receipt"].encode())
            if receipt.attempt == attempt.nonce:
                return _Told(receipt, updates)
    raise CommitAbortedError(
        f"leg of {folder}", f"the worker of shard {shard} has not saved", "run it, or begin it again"
    )
