"""Capture: live torch objects as entries. References only; nothing is copied, stepped or cached.

What cannot be stored exactly is refused by name here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from ckptstore.errors import RefusedError, UsageError
from ckptstore.format import canonical, values
from ckptstore.format.canonical import Json
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.page import EXTRA, HyperEntry, Role, ValueEntry
from ckptstore.format.progress import STATE_KINDS, NamedState
from ckptstore.format.shard import Alias, Optimizer, RngEntry
from ckptstore.live.aliases import find_aliases
from ckptstore.live.modules import asked, extra_states, module_tensors
from ckptstore.live.optimizers import capture_optimizer
from ckptstore.live.rng import GENERATORS, RandomGenerator, capture_rng
from ckptstore.live.tensors import TensorSource, check_tensor, plain, state_entries, type_name


@runtime_checkable
class Stateful(Protocol):
    """What schedulers, scalers and data loaders have: torchdata's StatefulDataLoader, torch's schedulers."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain nested values."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Take the state back."""
        ...


Named: TypeAlias = "Mapping[str, Any] | Any | None"


@dataclass(slots=True)
class Captured:
    """A training state as entries and values, referring to live tensors."""

    tensors: list[TensorSource] = field(default_factory=list)
    values: list[ValueEntry] = field(default_factory=list)
    hypers: list[HyperEntry] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    rng: list[RngEntry] = field(default_factory=list)
    states: list[NamedState] = field(default_factory=list)

    def rng_by_name(self) -> dict[str, Json]:
        """State of each generator by name."""
        return {entry.name: entry.value for entry in self.rng}


class TrainingState:
    """The live objects of a training process that belong to its checkpoints.

    Gradients are none of them: a checkpoint is taken between updates, and a restore leaves them as they are. Functions
    that were given to a scheduler are code, and no state either.

    Args:
        model: a module, or modules by name (the name and a dot then lead each path).
        optimizer: an optimizer, or optimizers by name (default name ``optimizer``).
        scheduler: a learning-rate scheduler, or schedulers by name (default name ``scheduler``).
        scaler: a gradient scaler, or scalers by name (default name ``scaler``).
        data: a data source with ``state_dict`` and ``load_state_dict``, or several by name (default name ``data``).
        generators: generators of torch, NumPy and Python (``torch.Generator``, ``numpy.random.Generator``,
            ``numpy.random.RandomState``, ``random.Random``) by name, or a sequence of them (named ``0``, ``1`` …); the
            global ones of Python, NumPy and torch, with every accelerator in use, are always captured.
        values: any other objects with ``state_dict`` and ``load_state_dict``, by name.
        moving: names of hyper-parameters that change while it trains, besides the rates and momenta that schedulers
            change: a counter or an estimate that an optimizer keeps in its groups, a weight decay under a schedule of
            its own. A restore takes them from the checkpoint; every other one must be as it was.

    Raises:
        UsageError: an argument is not what it should be.
    """

    def __init__(
        self,
        *,
        model: Named = None,
        optimizer: Named = None,
        scheduler: Named = None,
        scaler: Named = None,
        data: Named = None,
        generators: Mapping[str, RandomGenerator] | Sequence[RandomGenerator] = (),
        values: Mapping[str, Stateful] | None = None,
        moving: Collection[str] = (),
    ) -> None:
        self.modules: dict[str, nn.Module] = _named(model, "", nn.Module, "model")
        self.optimizers: dict[str, torch.optim.Optimizer] = _named(
            optimizer, "optimizer", torch.optim.Optimizer, "optimizer"
        )
        self.stateful: dict[tuple[str, str], Stateful] = {
            (kind, name): item
            for kind, given in (("scheduler", scheduler), ("scaler", scaler), ("data", data), ("value", values))
            for name, item in _named(given, kind, Stateful, kind).items()
        }
        if isinstance(generators, Sequence):
            generators = {str(index): generator for index, generator in enumerate(generators)}
        self.generators: dict[str, RandomGenerator] = _named(generators, "generator", GENERATORS, "generators")
        self.moving = _moving(moving)

    def tensors(self) -> dict[str, tuple[Role, Tensor]]:
        """Live parameters and persistent buffers by path; see :func:`ckptstore.live.modules.module_tensors`."""
        return module_tensors(self.modules)

    def capture(self) -> Captured:
        """All of the state as entries, refusing by name what cannot be stored exactly. Has no side effects."""
        captured = self.capture_tensors()
        captured.states = self.capture_states()
        # Last: some data loaders draw random numbers when they are asked for their state for the first time.
        captured.rng = capture_rng(self.generators)
        return captured

    def capture_tensors(self) -> Captured:
        """What modules and optimizers hold, as entries.

        Raises:
            RefusedError: something of it cannot be stored exactly.
        """
        captured = Captured()
        live = self.tensors()
        for path, (role, tensor) in live.items():
            check_tensor(tensor, f"{role[0]} {path!r:.120}")
        owners = find_aliases({path: tensor for path, (_, tensor) in live.items()})
        captured.aliases = [Alias(path, owner) for path, owner in sorted(owners.items()) if owner != path]
        captured.tensors = [TensorSource.of(p, role, t) for p, (role, t) in live.items() if owners[p] == p]
        for path, (_, extra) in extra_states(self.modules).items():
            tensors, entries = state_entries(path, EXTRA, extra)
            captured.tensors += tensors
            captured.values += entries
        states: list[TensorSource] = []
        for name, optimizer in self.optimizers.items():
            taken = capture_optimizer(name, optimizer, parameter_paths(live, owners), self.optimizers.values())
            captured.optimizers.append(taken.description)
            captured.hypers += taken.hypers
            captured.values += taken.values
            states += taken.tensors
        _check_apart({path: tensor for path, (_, tensor) in live.items()}, states)
        captured.tensors += states
        return captured

    def capture_states(self, kinds: Collection[str] = STATE_KINDS) -> list[NamedState]:
        """State of schedulers, scalers, data sources and values, by kind and name."""
        found = []
        for (kind, name), item in sorted(self.stateful.items(), key=lambda pair: pair[0]):
            if kind not in kinds:
                continue
            what = f"{kind} {name}"
            state = asked(f"state_dict of {what}", item.state_dict)
            value = values.to_json(plain(state, what), what)
            size = len(canonical.encode(value))
            if size > DOCUMENT_LIMIT:
                why = f"its state takes {size} bytes, and all states of a checkpoint at most {DOCUMENT_LIMIT}"
                raise RefusedError(what, why, "make what is large in it a buffer of a module that is saved")
            found.append(NamedState(kind, name, value))
        return found


def parameter_paths(live: Mapping[str, tuple[Role, Tensor]], owners: Mapping[str, str]) -> dict[int, str]:
    """Path of the owner by identity of each live tensor."""
    return {id(tensor): owners[path] for path, (_, tensor) in live.items()}


def _check_apart(weights: Mapping[str, Tensor], states: Sequence[TensorSource]) -> None:
    """RefusedError if a tensor of optimizer state shares its memory with another one, or with a weight.

    Only names of weights can be tied in a checkpoint, so after a restore the two would go their own ways.
    """
    named = {f"{'/'.join(source.role)!a} of {source.path!a}": source.tensor for source in states}
    for name, owner in find_aliases({**weights, **named}).items():
        if name != owner and (name in named or owner in named):
            why = f"it is one tensor with {owner:.300}, and only modules can hold one tensor under two names"
            raise RefusedError(f"{name:.300}", why, "give each parameter state of its own")


def _moving(given: Collection[str]) -> frozenset[str]:
    if isinstance(given, str) or any(type(name) is not str for name in given):
        raise UsageError("moving=", f"{given!r:.60} is no list of names of hyper-parameters", "as in moving=['d', 'k']")
    return frozenset(given)


def _named(given: Any, default: str, kind: type | tuple[type, ...], argument: str) -> dict[str, Any]:
    """``given`` as a mapping by name, each item of ``kind``."""
    if given is None:
        return {}
    items = dict(given) if isinstance(given, Mapping) and not isinstance(given, kind) else {default: given}
    for name, item in items.items():
        if type(name) is not str or (not name and argument != "model"):
            raise UsageError(f"{argument}=", f"the name {name!r:.60} is not a text")
        values.check_text(name, f"{argument}= name {name!r:.60}")
        if not isinstance(item, kind):
            wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            why = f"{name or 'it'} is a {type_name(item)}, not a {wanted}"
            raise UsageError(f"{argument}=", why, "see the docstring of TrainingState")
        if kind is Stateful and isinstance(item, torch.optim.Optimizer):
            why = f"{name} is an optimizer, whose own load_state_dict changes types"
            raise UsageError(f"{argument}=", why, "pass it as optimizer=")
    return items
