"""A leg of a run for workers that somebody else's launcher starts: from the head of a ref on, with a commit at its end.

The orders are written into the prepared folder before any worker begins, and the checkpoint is committed when all have
ended, so that no controller has to live beside them. The folder has to be the same for all workers, by a file system
that they share. Needs no torch.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import ckptstore
from ckptstore import Attempt, Digest
from ckptstore.errors import NotFoundError, UsageError
from trainer.compute.numerics import env_for
from trainer.preparation.plan import Plan
from trainer.preparation.prepare import read_plan
from trainer.preparation.staged import INPUTS, PLAN, SOURCES
from trainer.workers import orders
from trainer.workers.hosts import STORE
from trainer.workers.orders import Arm, Close, Restore, Save, Start, Train

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
    identity = store.put_preparation(*(store.put_tree(folder / name) for name in (PLAN, INPUTS, SOURCES)))
    root = store.head(ref)
    done = 0 if root is None else store.checkpoint(root).step
    last = next((step for step in plan.commits if step > done), len(plan.updates)) if last is None else last
    if not done < last <= len(plan.updates):
        why = (
            f"update {last} is not after update {done}, which {ref} has reached, and in the plan of {len(plan.updates)}"
        )
        raise UsageError(f"leg of {folder}", why)
    begun = store.begin(ref)
    beginning = [Start()] if root is None else [Restore(root, STORE), Arm()]
    lines = [*beginning, Train(done + 1, last), Save(str(begun), last, STORE), Close()]
    (folder / ORDERS).write_bytes(b"".join(orders.encode(order) for order in lines))
    return Leg(folder, plan, identity, root, done + 1, last)


def commit(folder: Path, *, deadline: float = 60.0) -> Digest:
    """Commit what the workers of a leg have saved; returns the root.

    Args:
        folder: as for :func:`begin`.
        deadline: seconds to wait for shards that are not there yet.

    Raises:
        NotFoundError: no leg was begun there.
        CommitAbortedError, ConflictError: there is no checkpoint; says why.
    """
    try:
        lines = (folder / ORDERS).read_bytes().splitlines()
    except FileNotFoundError:
        raise NotFoundError(f"{folder / ORDERS}", "no leg was begun here", "python -m trainer orders") from None
    (save,) = (order for order in map(orders.parse, lines) if isinstance(order, Save))
    store = ckptstore.open(folder / STORE)
    count = len(read_plan(folder / PLAN).owners)
    return store.commit(Attempt.parse(save.attempt), count=count, deadline=deadline)
