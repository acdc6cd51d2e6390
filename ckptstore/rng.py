"""Random generators: their states as typed values, and back."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckptstore.format import values
from ckptstore.format.canonical import Json
from ckptstore.format.shard import RngEntry
from ckptstore.tensors import tensor_value, value_tensor


def capture_rng(generators: Mapping[str, torch.Generator]) -> list[RngEntry]:
    """State of every random generator: Python, NumPy, torch CPU, accelerators in use, and the given ones, sorted by
    name."""
    states: dict[str, object] = {
        "python": random.getstate(),
        "torch.cpu": tensor_value(torch.get_rng_state(), "rng torch.cpu"),
    }
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        keys_bytes = np.ascontiguousarray(keys, dtype="<u4").tobytes()
        states["numpy"] = (str(kind), keys_bytes, int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            states[f"torch.cuda:{index}"] = tensor_value(torch.cuda.get_rng_state(index), f"rng torch.cuda:{index}")
    for name, generator in generators.items():
        states[f"generator.{name}"] = tensor_value(generator.get_state(), f"rng generator.{name}")
    return [RngEntry(name, values.to_json(state, f"rng {name}")) for name, state in sorted(states.items())]


def restore_rng(name: str, node: Json, generators: Mapping[str, torch.Generator]) -> None:
    """Put one generator back to a captured state."""
    state: Any = values.from_json(node, f"rng {name}")
    if name == "python":
        random.setstate(state)
    elif name == "numpy":
        kind, keys, position, has_gauss, gauss = state
        np.random.set_state((kind, np.frombuffer(keys, dtype="<u4"), position, has_gauss, gauss))
    elif name == "torch.cpu":
        torch.set_rng_state(value_tensor(state))
    elif name.startswith("torch.cuda:"):
        torch.cuda.set_rng_state(value_tensor(state), int(name.removeprefix("torch.cuda:")))
    else:
        generators[name.removeprefix("generator.")].set_state(value_tensor(state))
