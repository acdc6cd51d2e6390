"""Schedules: what of a scheduler's or scaler's state the program sets, and must have set as it was."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptstore.errors import RefusedError
from ckptstore.format import values
from ckptstore.format.canonical import encode
from ckptstore.live.tensors import plain

PROGRESS = frozenset(
    [
        *("T_cur", "T_i", "base_lrs", "best", "cooldown_counter", "last_epoch", "lr_lambdas", "num_bad_epochs"),
        *("_get_lr_called_within_step", "_is_initial", "_last_lr", "_scale_fn_custom", "_step_count"),
    ]
)
"""Keys of the state of torch's schedulers that change as they go, or follow the rates of the optimizer. Every other one
is an argument of the scheduler."""

_NESTED = "_schedulers"

_SCALER_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


def setting_problems(what: str, item: object, stored: object, moving: Collection[str]) -> Iterator[str]:
    """Every argument of a live scheduler or scaler of torch's that is another one in its stored state, which would
    take its place without a word. Of what others wrote nothing is known.

    Args:
        what: kind and name, for messages.
        item: the live object.
        stored: its state in the checkpoint, with tensors as values.
        moving: names that may differ.
    """
    if not isinstance(stored, dict):
        return
    if isinstance(item, LRScheduler) and type(item).__module__.startswith("torch.optim"):
        try:
            live: Any = plain(item.state_dict(), what)
        except RefusedError as error:
            yield f"{error.what}: {error.why}"
            return
        yield from _differences(what, live, stored, moving)
    elif isinstance(item, torch.amp.GradScaler):
        live = item.state_dict()
        for key in _SCALER_SETTINGS:
            if key in live and key in stored and key not in moving and _typed(live[key]) != _typed(stored[key]):
                yield f"{what} {key} is stored as {stored[key]!r:.60} and live as {live[key]!r:.60}"


def _differences(what: str, live: dict[Any, Any], stored: dict[Any, Any], moving: Collection[str]) -> Iterator[str]:
    for key in sorted((live.keys() | stored.keys()) - PROGRESS - set(moving) - {_NESTED}, key=str):
        if key not in live or key not in stored:
            yield f"{what} {key} is {'stored and not live' if key in stored else 'live and not stored'}"
        elif _typed(live[key]) != _typed(stored[key]):
            yield f"{what} {key} is stored as {stored[key]!r:.60} and live as {live[key]!r:.60}"
    inner, inner_stored = live.get(_NESTED, []), stored.get(_NESTED, [])
    if type(inner_stored) is not list or len(inner) != len(inner_stored):
        yield f"{what} has other schedulers inside than in the checkpoint"
        return
    for number, (one, other) in enumerate(zip(inner, inner_stored, strict=True)):
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(f"{what}[{number}]", one, other, moving)


def _typed(value: object) -> bytes:
    return encode(values.to_json(value))
