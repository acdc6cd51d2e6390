"""Small training processes for tests: everything that a run has, seeded, with a data source that can be resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ckptstore
from ckptstore.store import Store


def seed_everything(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Shuffled:
    """Sample numbers in an order shuffled anew each epoch; position counted in samples."""

    def __init__(self, samples: int, batch: int, seed: int = 0) -> None:
        self.samples, self.batch = samples, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.position = 0
        self.order = torch.randperm(samples, generator=self.generator)

    def next(self) -> Tensor:
        start = self.position % self.samples
        if self.position and start == 0:
            self.order = torch.randperm(self.samples, generator=self.generator)
        self.position += self.batch
        return self.order[start : start + self.batch]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.order = state["order"]
        self.generator.set_state(state["generator"])


@dataclass
class Training:
    """A model with dropout, an optimizer, a scheduler and a shuffling data source; ``seen`` are the sample numbers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    data: Shuffled
    seen: list[int]

    def step(self) -> None:
        batch = self.data.next()
        self.seen.extend(batch.tolist())
        x = torch.sin(batch.float()[:, None] * torch.arange(1.0, 9.0))
        loss = (self.model(x) - x[:, :3]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.data,
        }

    def state(self) -> ckptstore.TrainingState:
        return ckptstore.TrainingState(**self.objects())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 80), nn.BatchNorm1d(80), nn.ReLU(), nn.Dropout(0.1), nn.Linear(80, 3))


def make_training(
    seed: int = 0,
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None,
    model: nn.Module | None = None,
) -> Training:
    seed_everything(seed)
    model = model or make_model()
    made = optimizer(model.parameters()) if optimizer else torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(made, [4, 9])
    return Training(model, made, scheduler, Shuffled(24, 6), [])


def save_steps(store: Store, ref: str, training: Training, steps: int, every: int = 1) -> list[ckptstore.Digest]:
    """Resume ``ref``, train up to ``steps`` and save each ``every``; the roots saved."""
    roots = []
    with store.run(ref, **training.objects()) as run:
        step = run.resume()
        while step < steps:
            training.step()
            step += 1
            if step % every == 0:
                roots.append(run.save(step))
    return roots


def commit_state(
    store: Store, ref: str, states: list[ckptstore.TrainingState], step: int, **options: Any
) -> ckptstore.Digest:
    """Commit one checkpoint whose shards are ``states``."""
    attempt = store.begin(ref)
    receipts = [
        store.save_shard(state, attempt, step=step, index=index, count=len(states))
        for index, state in enumerate(states)
    ]
    return store.commit(attempt, receipts, **options)
