"""Random generators: their states as typed values, and back."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ckptstore.errors import CkptStoreError, RefusedError
from ckptstore.format import values
from ckptstore.format.canonical import Json
from ckptstore.format.shard import RngEntry
from ckptstore.format.values import TensorValue
from ckptstore.live.tensors import tensor_value, value_tensor

RandomGenerator: TypeAlias = "torch.Generator | np.random.Generator | np.random.RandomState | random.Random"

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Types of the generators that a process can register by name."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A generator: its state as a plain value, that state set, and another generator of its kind to try one on."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    spare: Callable[[], _Source]


def capture_rng(generators: Mapping[str, RandomGenerator]) -> list[RngEntry]:
    """State of every random generator: Python, NumPy, torch CPU, accelerators in use, and the given ones, sorted by
    name.

    Raises:
        RefusedError: one of them has no state that could be stored.
    """
    return [RngEntry(name, _state(name, source)) for name, source in sorted(_sources(generators).items())]


def rng_problem(name: str, node: Json, generators: Mapping[str, RandomGenerator]) -> str:
    """Why a captured state is none that the live generator ``name`` can take; empty if it can. Changes nothing."""
    try:
        spare = _sources(generators)[name].spare()
        spare.set(values.from_json(node, f"rng {name}"))
        taken = _state(name, spare)
    except Exception as error:  # whatever a generator says to a state that is none of its own
        return f"generator {name} cannot take its stored state: {type(error).__name__}: {error}"
    return "" if taken == node else f"generator {name} does not keep its stored state as it is"


def restore_rng(name: str, node: Json, generators: Mapping[str, RandomGenerator]) -> None:
    """Put one generator back to a captured state."""
    _sources(generators)[name].set(values.from_json(node, f"rng {name}"))


def _state(name: str, source: _Source) -> Json:
    try:
        state = source.get()
    except CkptStoreError:
        raise
    except Exception as error:
        why = f"it gives no state: {type(error).__name__} {error}".rstrip()
        raise RefusedError(f"generator {name}", why, "use a generator whose state can be read") from error
    return values.to_json(state, f"rng {name}")


def _sources(generators: Mapping[str, RandomGenerator]) -> dict[str, _Source]:
    """Every generator by name."""
    found = {
        "python": _Source(random.getstate, random.setstate, lambda: _source(random.Random())),
        "numpy": _numpy_legacy(np.random.get_state, np.random.set_state, _spare_numpy),
        "torch.cpu": _torch(torch.default_generator),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            found[f"torch.cuda:{index}"] = _torch(torch.cuda.default_generators[index])
    for name, generator in generators.items():
        found[f"generator.{name}"] = _source(generator)
    return found


def _source(generator: RandomGenerator) -> _Source:
    if isinstance(generator, torch.Generator):
        return _torch(generator)
    if isinstance(generator, random.Random):
        return _Source(generator.getstate, generator.setstate, lambda: _source(_spare_python(generator)))
    if isinstance(generator, np.random.RandomState):
        return _numpy_legacy(generator.get_state, generator.set_state, lambda: deepcopy(generator))
    bits: Any = generator.bit_generator
    return _Source(
        lambda: _without_arrays(bits.state),
        lambda state: setattr(bits, "state", _with_arrays(state)),
        lambda: _source(deepcopy(generator)),
    )


def _torch(generator: torch.Generator) -> _Source:
    return _Source(
        lambda: tensor_value(generator.get_state(), "state of a torch generator"),
        lambda state: generator.set_state(value_tensor(state)),
        lambda: _torch(torch.Generator(generator.device)),
    )


def _numpy_legacy(
    get: Callable[..., Any], set_: Callable[[Any], object], copy: Callable[[], np.random.RandomState]
) -> _Source:
    """NumPy's RandomState, and its global one: Mersenne Twister, unless somebody gave it other bits."""

    def state() -> object:
        found = get(legacy=False)
        if found["bit_generator"] != "MT19937":
            return _without_arrays(found)
        keys = np.ascontiguousarray(found["state"]["key"], dtype="<u4").tobytes()
        return "MT19937", keys, int(found["state"]["pos"]), int(found["has_gauss"]), float(found["gauss"])

    def take(state: Any) -> None:
        if type(state) is tuple:
            kind, keys, position, has_gauss, gauss = state
            state = (kind, np.frombuffer(keys, dtype="<u4"), position, has_gauss, gauss)
        set_(_with_arrays(state))

    return _Source(state, take, lambda: _source(copy()))


def _spare_python(generator: random.Random) -> random.Random:
    """A generator of the same class in the same state; not as ``copy`` makes it, for which the class must need no
    arguments."""
    spare = random.Random.__new__(type(generator))
    vars(spare).update(deepcopy(vars(generator)))
    return spare


def _spare_numpy() -> np.random.RandomState:
    """A generator with bits of the kind of NumPy's global one."""
    return np.random.RandomState(deepcopy(np.random.get_bit_generator()))  # type: ignore[attr-defined]


def _without_arrays(state: Any) -> Any:
    """A state of NumPy's as plain values: arrays of unsigned words as tensors, its integers as Python's."""
    if isinstance(state, dict):
        return {key: _without_arrays(item) for key, item in state.items()}
    if isinstance(state, np.ndarray):
        name = {"uint32": "u32", "uint64": "u64"}[state.dtype.name]
        return TensorValue(
            name, state.shape, np.ascontiguousarray(state, dtype=state.dtype.newbyteorder("<")).tobytes()
        )
    return int(state) if isinstance(state, np.integer) else state


def _with_arrays(state: Any) -> Any:
    """The inverse of :func:`_without_arrays`."""
    if type(state) is dict:
        return {key: _with_arrays(item) for key, item in state.items()}
    if type(state) is TensorValue:
        return np.frombuffer(state.data, dtype={"u32": "<u4", "u64": "<u8"}[state.dtype]).reshape(state.shape).copy()
    return state
