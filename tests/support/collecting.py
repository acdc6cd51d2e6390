"""Stores in which a collection finds something to delete, and states that share their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import torch
from torch import nn

import ckptstore
from ckptstore.collection.collect import Collection, collect
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.errors import CommitAbortedError, ConflictError, CorruptError, NotFoundError
from ckptstore.format.digest import Digest
from ckptstore.pinning import pin
from ckptstore.store import Store
from tests.support.claims import dead

LAST = Policy((KeepLast(1),))
"""Keeps the newest checkpoint of each lineage."""


@cache
def weights(number: int) -> torch.Tensor:
    """One of a few weights, each an object of its own."""
    return torch.randn(260, 260, generator=torch.Generator().manual_seed(number))


def state(*numbers: int) -> ckptstore.TrainingState:
    """A model with these weights."""
    model = nn.ParameterDict({f"w{number}": nn.Parameter(weights(number).clone()) for number in numbers})
    return ckptstore.TrainingState(model=model)


def commit(store: Store, ref: str, *numbers: int) -> Digest:
    """The next checkpoint of a ref, and a receipt that it was read back."""
    head = store.head(ref)
    step = 1 if head is None else store.checkpoint(head).step + 1
    attempt = store.begin(ref)
    receipt = store.save_shard(state(*numbers), attempt, step=step)
    root = store.commit(attempt, [receipt])
    verified(store, root)
    return root


def verified(store: Store, root: Digest) -> None:
    """Say of a checkpoint that it was read back from its medium: where the tests run may be memory."""
    store.add_receipt(replace(store.verify(root).receipt(store.url), method="direct"))


def abandon(store: Store, *numbers: int) -> None:
    """An attempt that stored its shard and came to nothing."""
    store.save_shard(state(*numbers), store.begin("main"), step=1000)


def littered(url: str | Path) -> Store:
    """A store of which a collection that keeps the last ones keeps some, retires some, and finds some that is nobody's.

    The weights 0 to 2 stay, 3 and 4 go with checkpoints, 5 with an attempt.
    """
    store = ckptstore.open(url, create=True)
    commit(store, "main", 3, 4)
    pin(store, commit(store, "main", 0, 1))
    commit(store, "main", 4, 1)
    commit(store, "main", 1, 2)
    abandon(store, 5, 2)
    return store


def collected(store: Store, **options: object) -> Collection:
    """Collect all but the last ones."""
    return collect(store, LAST, delete=True, **options)  # type: ignore[arg-type]


def bury(store: Store) -> None:
    """Let leases and markers that a simulated death of this process left be those of a dead one."""
    mine, gone = str(ckptstore.backends.owners.this_process()).encode(), str(dead_once()).encode()
    for prefix in ("leases/", "gc/"):
        for stat in store.backend.list(prefix):
            store.backend.replace(stat.key, store.backend.get(stat.key).replace(mine, gone))


@cache
def dead_once() -> object:
    """A process that has ended."""
    return dead()


def kept(store: Store) -> dict[str, int]:
    """Keys and sizes of what a collection decides on."""
    prefixes = ("objects/", "documents/", "pins/", "retired/")
    return {stat.key: stat.size for stat in store.backend.list("") if stat.key.startswith(prefixes)}


def problems(store: Store) -> list[str]:
    """What a ref or a pin names and is not there whole."""
    roots = {root for name in store.refs.names() if (root := store.head(name)) is not None}
    roots |= {Digest.parse(stat.key.split("/")[1]) for stat in store.backend.list("pins/")}
    reader = Store(store.backend)  # which has verified nothing yet
    return [f"{root.short}: {finding}" for root in roots for finding in reader.verify(root).findings]


def save_at_random(store: Store, ref: str, seed: int, rounds: int) -> dict[str, int]:
    """Save states that share weights, some of which were stored before and some of which nothing names any more; pin
    some. How often which of it came about, and how often a collection came in between, was told."""
    draw = Random(seed)
    counts = {"saved": 0, "pinned": 0, "told": 0}
    for _ in range(rounds):
        numbers = sorted(draw.sample(range(6), 2))
        with told(counts):
            if draw.random() < 0.2:
                abandon(store, *numbers)
            elif draw.random() < 0.5:
                with store.lease():  # as a run does
                    commit(store, ref, *numbers)
                counts["saved"] += 1
            else:
                commit(store, ref, *numbers)
                counts["saved"] += 1
        if draw.random() < 0.3:
            with told(counts):
                roots = [root for root, _ in store.history(store.resolve(ref))]
                pin(store, draw.choice(roots))
                counts["pinned"] += 1
    return counts


@contextmanager
def told(counts: dict[str, int]) -> Iterator[None]:
    """Counts what a loser is told in the block, and goes on behind it."""
    try:
        yield
    except (ConflictError, CommitAbortedError, NotFoundError, CorruptError):
        counts["told"] += 1
