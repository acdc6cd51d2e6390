"""Whether a training process that goes through a checkpoint ends where the uninterrupted one does."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ckptstore
from ckptstore import TrainingState
from ckptstore.store import Store
from tests.support.training import commit_state

Objects = dict[str, Any]


def memory_store() -> Store:
    """An empty store in memory."""
    return ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)


def save(store: Store, objects: Objects, step: int = 1, ref: str = "main", **options: Any) -> ckptstore.Digest:
    """Commit ``objects``; returns the root."""
    return commit_state(store, ref, [TrainingState(**objects)], step, **options)


def copy_through(objects: Objects, fresh: Objects, **options: Any) -> bool:
    """Save ``objects``, restore them into ``fresh`` with a reader that verified nothing yet, and save that: whether the
    roots are equal."""
    store = memory_store()
    root = save(store, objects, **options)
    reader = ckptstore.open(store.url)
    reader.restore(root, TrainingState(**fresh))
    return save(reader, fresh, ref="again", **options) == root


def resumes_exactly(build: Callable[[], Objects], train: Callable[[Objects], object], steps: int = 2) -> bool:
    """Whether training ``steps`` more ends in the same state with and without a checkpoint in between."""
    store = memory_store()
    torch.manual_seed(0)
    straight = build()
    for _ in range(steps):
        train(straight)
    root = save(store, straight, steps)
    for _ in range(steps):
        train(straight)
    expected = store.checkpoint(save(store, straight, 2 * steps))
    torch.manual_seed(77)
    resumed = build()
    ckptstore.open(store.url).restore(root, TrainingState(**resumed))
    for _ in range(steps):
        train(resumed)
    actual = store.checkpoint(save(store, resumed, 2 * steps, "resumed"))
    return (actual.state_root, actual.rng_root, actual.progress) == (
        expected.state_root,
        expected.rng_root,
        expected.progress,
    )


def mlp() -> nn.Module:
    """Two layers of 4 inputs and outputs."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def train_step(objects: Objects) -> None:
    """One update on a random batch, and one of the scheduler if there is one."""
    optimizer = objects["optimizer"]
    optimizer.zero_grad()
    objects["model"](torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    scheduler = objects.get("scheduler")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    elif scheduler is not None:
        scheduler.step()


class Held:
    """An object with a state of its own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
