"""The states of the golden store, as live objects. Their values follow from what is stored; nothing here is random."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import ckptstore
from tests.support.states import Held

BULK = 262_144
"""Bytes of a buffer of zeros: the shortest chunk that is an object of its own."""

CURSOR = "samples"
BATCH = 6


class Whole(nn.Module):
    """A model with a pack, a tied weight, a large buffer, and one of no bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(8, 12, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("bulk", torch.zeros(BULK, dtype=torch.uint8))
        self.register_buffer("empty", torch.zeros(0, 3))


class Part(nn.Module):
    """What one of two workers owns: a weight, and a buffer of each of many dtypes."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 7))
        for dtype in dtypes:
            self.register_buffer(
                "of_" + str(dtype).removeprefix("torch."), torch.zeros(24, dtype=torch.uint8).view(dtype)
            )


DTYPES: tuple[tuple[torch.dtype, ...], ...] = (
    (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool),
    (torch.int16, torch.int32, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)


class Samples:
    """Sample numbers in their order, and how many were taken."""

    def __init__(self) -> None:
        self.taken = 0

    def next(self) -> torch.Tensor:
        self.taken += BATCH
        return torch.arange(self.taken - BATCH, self.taken)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "seen": torch.arange(self.taken, dtype=torch.int16)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]
        assert torch.equal(state["seen"], torch.arange(self.taken, dtype=torch.int16))


def whole() -> tuple[nn.Module, dict[str, Any]]:
    """A model, and everything of its training that belongs to a checkpoint."""
    torch.manual_seed(0)
    np.random.seed(0)
    model = Whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    return model, {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0),
        "data": Samples(),
        "generators": {"noise": np.random.default_rng(5)},
        "values": {"notes": Held({"words": ["a", ("b", 1, 1.0, True, None)], "nan": float("nan"), b"key": -0.0})},
    }


def part(index: int) -> tuple[nn.Module, dict[str, Any]]:
    """The same of one of two workers; its weight of index 1 is under the name of worker 0's as well."""
    torch.manual_seed(index)
    np.random.seed(index)
    model = Part(DTYPES[index])
    optimizer = torch.optim.SGD([model.weight], lr=0.5, momentum=0.9)
    return model, {"model": {f"part{index}": model}, "optimizer": {f"sgd{index}": optimizer}}


def fill(tensor: torch.Tensor, number: int) -> None:
    """Give a tensor bytes that follow from ``number``."""
    with torch.no_grad():
        raw = tensor.view(-1).view(torch.uint8)
        raw.copy_((torch.arange(raw.numel()) * 37 + number) % (2 if tensor.dtype is torch.bool else 251))


def state(objects: dict[str, Any]) -> ckptstore.TrainingState:
    return ckptstore.TrainingState(**objects)
