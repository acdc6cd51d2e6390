"""Lines of small checkpoints, each with weights of its own, read back or not."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import ckptstore
from ckptstore import Digest, TrainingState
from ckptstore.backends.protocol import PruneBackend
from ckptstore.collection.collect import collect
from ckptstore.collection.plan import Plan
from ckptstore.collection.policy import Policy, Rule
from ckptstore.format.keys import STORE_KEY, document_key
from ckptstore.store import Store
from tests.support.training import commit_state, make_training


def state(value: float, shard: int = 0) -> TrainingState:
    """A weight of 9 numbers: a pack of its own, and a page."""
    layer = nn.Linear(3, 6, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(18.0).reshape(6, 3) + 100 * value)
    return TrainingState(model=nn.ModuleDict({f"layer{shard}": layer}))


def saved(
    store: Store,
    step: int,
    ref: str = "main",
    *,
    verified: bool = True,
    value: float | None = None,
    shards: int = 1,
    time: str | None = None,
    metrics: Mapping[str, object] | None = None,
) -> Digest:
    """Commit a checkpoint; its weights follow from ``value`` (default: step). ``time``: when it was read back."""
    states = [state(step if value is None else value, index) for index in range(shards)]
    root = commit_state(store, ref, states, step, metrics=metrics)
    if verified:
        read_back(store, root, time)
    return root


def read_back(store: Store, root: Digest, time: str | None = None) -> None:
    """Leave the receipt of a readback."""
    receipt = store.verify(root).receipt(store.url)
    store.add_receipt(receipt if time is None else replace(receipt, time=time))


def line(store: Store, steps: Sequence[int], ref: str = "main", *, verified: bool = True) -> list[Digest]:
    """Checkpoints one after the other."""
    return [saved(store, step, ref, verified=verified) for step in steps]


def planned(store: Store, *rules: Rule, **options: object) -> Plan:
    """The plan of a collection under these rules."""
    return collect(store, Policy(rules), **options).plan  # type: ignore[arg-type]


def kept(plan: Plan) -> set[Digest]:
    """Roots of closures that stay."""
    return {item.root for item in plan.kept}


def reasons(plan: Plan, root: Digest) -> str:
    """Why one stays, as one text."""
    return "; ".join(next(item.reasons for item in plan.kept if item.root == root))


def whole(store: Store, root: Digest, shards: Sequence[int] | None = None) -> bool:
    """Whether a fresh reader finds nothing wrong with a checkpoint."""
    return ckptstore.open(store.url).verify(root, shards).ok


def keys(store: Store) -> dict[str, int]:
    """Everything but what comes and goes with a writer."""
    return {stat.key: stat.size for stat in store.backend.list("") if not stat.key.startswith(("leases/", "gc/"))}


def content(store: Store) -> set[str]:
    """Keys of objects and documents."""
    return {key for key in keys(store) if key.startswith(("objects/", "documents/"))}


def needed(store: Store, *roots: Digest) -> set[str]:
    """What the readers of these need, by the code that readers use, and the documents of their ancestors."""
    return {
        key
        for root in roots
        for key in (
            *(key for key, _ in store.closure(root, store.scope(root)).sizes()),
            *(document_key(ancestor) for ancestor, _ in store.history(root)),
        )
    }


def rich(store: Store, folder: Path, ref: str = "wide", step: int = 7) -> Digest:
    """A checkpoint with two shards, optimizer state, files and a preparation, in an attempt of its own."""
    (folder / "plan").mkdir(exist_ok=True)
    (folder / "plan" / "plan.json").write_bytes(b"%d" % step * 100)
    (folder / "plan" / "big.bin").write_bytes(secrets.token_bytes(300_000))
    tree = store.put_tree(folder / "plan")
    run = store.put_preparation(tree, tree, tree)
    attempt = store.begin(ref)
    training = make_training(step)
    training.step()
    shards = [ckptstore.TrainingState(model=training.model, optimizer=training.optimizer), state(step, 1)]
    receipts = [
        store.save_shard(shard, attempt, step=step, index=index, count=2, run=run, files=tree)
        for index, shard in enumerate(shards)
    ]
    return store.commit(attempt, receipts, tracks_step={"optimizer.optimizer": False})


def aborted(store: Store, ref: str = "main", *, failure: bool = False) -> set[str]:
    """An attempt of which one shard was stored, and no more; the keys that it left."""
    before = set(keys(store))
    attempt = store.begin(ref)
    store.save_shard(state(1000.5), attempt, step=99, index=0, count=2)
    if failure:
        store.give_up(attempt, index=1, count=2, step=99, reason="out of memory")
    return set(keys(store)) - before


def store_over(backend: PruneBackend) -> Store:
    """An empty store over a backend."""
    template = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    backend.create(STORE_KEY, template.backend.get(STORE_KEY))
    return Store(backend)
