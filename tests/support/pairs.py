"""Checkpoints of two shards, for tests of what moves them."""

from __future__ import annotations

import torch
from torch import nn

import ckptstore


def states(shift: float = 0.0) -> list[ckptstore.TrainingState]:
    torch.manual_seed(0)
    found = []
    for name in ("first", "second"):
        module = nn.ModuleDict({name: nn.Linear(300, 300), f"{name}_norm": nn.LayerNorm(300)})
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(shift)
        found.append(ckptstore.TrainingState(model=module))
    return found
