"""Small training states that follow from a few numbers, and what a store must give back of each.

A state has a tensor that lies in a pack and in momentum, one under a second name, one that is an object of its own, one
that stands inline, an optimizer, and values that are no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import ckptstore
from tests.support.states import Held

BIG = 65_600  # of 4 bytes: more than 256 KiB, so no pack


@dataclass(frozen=True, slots=True)
class Recipe:
    """The numbers that all of a state follows from, one for each of its parts."""

    packed: int
    big: int
    inline: int
    note: int


class Small(nn.Module):
    """The first shard, or all of an unsharded state."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(12, 40))
        self.tied = self.packed
        self.big = nn.Parameter(torch.zeros(BIG))
        self.register_buffer("inline", torch.zeros((), dtype=torch.int64))


class Second(nn.Module):
    """The second shard."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = nn.Parameter(torch.zeros(30, 30))


@dataclass(slots=True)
class Live:
    """Live objects, and what of them belongs to a checkpoint."""

    model: nn.Module
    state: ckptstore.TrainingState
    note: Held

    def content(self) -> dict[str, Any]:
        """Every bit that a restore has to bring back."""
        found: dict[str, Any] = {name: bits(tensor) for name, tensor in self.model.state_dict().items()}
        for optimizer in self.state.optimizers.values():
            for index, held in enumerate(optimizer.state.values()):
                found |= {f"optim {index} {key}": bits(value) for key, value in held.items() if value is not None}
            found["lr"] = optimizer.param_groups[0]["lr"]
        found["note"] = repr(self.note.state)
        return found


def live(recipe: Recipe | None, shard: int | None) -> Live:
    """A state made by ``recipe`` (None: of zeros, to be restored into): shard 0 or 1 of two, or (None) all of it."""
    note = Held({})
    if recipe is not None:
        note.state = {"count": recipe.note, "kind": (recipe.note, float(recipe.note), bool(recipe.note))}
    if shard == 1:
        second = Second()
        if recipe is not None:
            fill(second.upper, recipe.big + 7)
        return Live(second, ckptstore.TrainingState(model={"second": second}, values={"note": note}), note)
    model = Small()
    optimizer = torch.optim.SGD([model.packed], lr=0.0, momentum=0.9)
    if recipe is not None:
        fill(model.packed, recipe.packed)
        fill(model.big, recipe.big)
        model.get_buffer("inline").fill_(recipe.inline)
        moment = torch.zeros_like(model.packed)
        fill(moment, recipe.packed + 3)
        optimizer.state[model.packed]["momentum_buffer"] = moment
        optimizer.param_groups[0]["lr"] = recipe.note / 8
    named: Any = model if shard is None else {"first": model}
    return Live(model, ckptstore.TrainingState(model=named, optimizer=optimizer, values={"note": note}), note)


def fill(tensor: torch.Tensor, number: int) -> None:
    """Give a tensor values that follow from ``number``; a NaN with a payload and a negative zero are among them."""
    with torch.no_grad():
        whole = torch.arange(tensor.numel(), dtype=torch.int32) * 31 + number
        whole[:2] = torch.tensor([0x7FC0_1234, -0x8000_0000], dtype=torch.int32)
        tensor.copy_(whole.view(torch.float32).reshape(tensor.shape))


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
