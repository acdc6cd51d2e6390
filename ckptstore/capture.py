"""Capture: live torch objects as entries. References only; nothing is copied, stepped or cached.

What cannot be stored exactly is refused by name here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from ckptstore.errors import RefusedError, UsageError
from ckptstore.format import values
from ckptstore.format.canonical import Json
from ckptstore.format.page import BUFFER, EXTRA, HYPER, OPTIM, WEIGHT, HyperEntry, Role, ValueEntry, show_role
from ckptstore.format.progress import NamedState
from ckptstore.format.shard import Alias, Group, Optimizer, RngEntry
from ckptstore.format.values import EntryRef
from ckptstore.rng import capture_rng
from ckptstore.tensors import check_depth, check_tensor, find_aliases, plain, type_name

SELECTORS = ("foreach", "fused", "capturable", "differentiable")
"""Keys of a parameter group that choose an implementation and are no part of what was learned."""


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


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A live tensor that becomes an entry."""

    path: str
    role: Role
    tensor: Tensor


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

    Args:
        model: a module, or modules by name (the name and a dot then lead each path).
        optimizer: an optimizer, or optimizers by name (default name ``optimizer``).
        scheduler: a learning-rate scheduler, or schedulers by name (default name ``scheduler``).
        scaler: a gradient scaler, or scalers by name (default name ``scaler``).
        data: a data source with ``state_dict`` and ``load_state_dict``, or several by name (default name ``data``).
        generators: torch generators by name, or a sequence of them (named ``0``, ``1`` …); the global ones of Python,
            NumPy and torch, with every accelerator in use, are always captured.
        values: any other objects with ``state_dict`` and ``load_state_dict``, by name.

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
        generators: Mapping[str, torch.Generator] | Sequence[torch.Generator] = (),
        values: Mapping[str, Stateful] | None = None,
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
        if not isinstance(generators, Mapping):
            generators = {str(index): generator for index, generator in enumerate(generators)}
        self.generators = dict(_named(generators, "generator", torch.Generator, "generators"))

    def tensors(self) -> dict[str, tuple[Role, Tensor]]:
        """Live parameters and persistent buffers by path, with their roles; every name of a shared one.

        Raises:
            RefusedError: two modules give the same path.
        """
        found: dict[str, tuple[Role, Tensor]] = {}
        for prefix, module in self.modules.items():
            parameters = dict(module.named_parameters(remove_duplicate=False))
            for name, value in module.state_dict(keep_vars=True).items():
                if not isinstance(value, Tensor) or name.endswith(_EXTRA):
                    continue
                path = f"{prefix}.{name}" if prefix else name
                values.check_text(path, f"tensor {path!r:.120}")
                if path in found:
                    raise RefusedError(f"tensor {path!r:.120}", "two modules give this path", "name them differently")
                role = WEIGHT if name in parameters or isinstance(value, nn.Parameter) else BUFFER
                found[path] = (role, value)
        return found

    def extras(self) -> dict[str, tuple[nn.Module, Any]]:
        """Extra state of modules (``get_extra_state``) by path, with the module that takes it back."""
        found: dict[str, tuple[nn.Module, Any]] = {}
        for prefix, root in self.modules.items():
            for name, module in root.named_modules(remove_duplicate=False):
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    path = ".".join(part for part in (prefix, name, _EXTRA) if part)
                    found[path] = (module, module.get_extra_state())
        return found

    def retie(self, path: str, owner: str) -> None:
        """Make the parameter or buffer at ``path`` the very tensor at ``owner`` again."""
        tensor = self.tensors()[owner][1]
        for prefix, root in self.modules.items():
            name = path.removeprefix(f"{prefix}.") if prefix else path
            if (prefix and name == path) or name not in root.state_dict(keep_vars=True):
                continue
            parent, _, attribute = name.rpartition(".")
            module = root.get_submodule(parent)
            table = module._parameters if attribute in module._parameters else module._buffers
            table[attribute] = tensor  # type: ignore[assignment]
            return

    def capture(self) -> Captured:
        """All of the state as entries, refusing by name what cannot be stored exactly. Has no side effects."""
        captured = Captured()
        live = self.tensors()
        for path, (role, tensor) in live.items():
            check_tensor(tensor, f"{role[0]} {path!r:.120}")
        owners = find_aliases({path: tensor for path, (_, tensor) in live.items()})
        captured.aliases = [Alias(path, owner) for path, owner in sorted(owners.items()) if owner != path]
        captured.tensors = [TensorSource(p, role, t) for p, (role, t) in live.items() if owners[p] == p]
        for path, (_, extra) in self.extras().items():
            _put_value(captured, path, EXTRA, extra)
        for name, optimizer in self.optimizers.items():
            self._capture_optimizer(captured, name, optimizer, parameter_paths(live, owners))
        captured.states = [
            NamedState(kind, name, values.to_json(plain(item.state_dict(), f"{kind} {name}"), f"{kind} {name}"))
            for (kind, name), item in sorted(self.stateful.items(), key=lambda pair: pair[0])
        ]
        captured.rng = capture_rng(self.generators)
        return captured

    def _capture_optimizer(
        self, captured: Captured, name: str, optimizer: torch.optim.Optimizer, paths: Mapping[int, str]
    ) -> None:
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            where = f"optimizer {name} group {index}"
            settings = {key: plain(value, f"{where} {key}") for key, value in group.items() if key != "params"}
            selectors = {key: settings.pop(key) for key in SELECTORS if key in settings}
            groups.append(Group(values.to_json(settings, where), values.to_json(selectors, where)))
            for position, parameter in enumerate(group["params"]):
                path = paths.get(id(parameter))
                if path is None:
                    why = f"parameter {position} of shape {tuple(parameter.shape)} belongs to no module that is saved"
                    raise RefusedError(where, why, "pass the module that owns it as model=")
                captured.hypers.append(HyperEntry(path, (HYPER, name), index))
        captured.optimizers.append(Optimizer(name, type_name(optimizer), tuple(groups)))
        states: dict[Any, Any] = dict(optimizer.state)
        for key, state in states.items():
            if isinstance(key, Tensor):
                path = "" if isinstance(optimizer, torch.optim.LBFGS) else paths.get(id(key))
                if path is None:
                    raise RefusedError(f"optimizer {name}", f"has state for an unknown tensor {tuple(key.shape)}")
                prefix: Role = (OPTIM, name)
            else:
                if type(key) is not str or not key:
                    raise RefusedError(f"optimizer {name}", f"has state under a key of type {type(key).__name__}")
                path, prefix = "", (OPTIM, name, key)
            if type(state) is not dict:
                raise RefusedError(f"optimizer {name}", f"its state of {path!r:.120} is a {type(state).__name__}")
            for field_name, value in state.items():
                if type(field_name) is not str:
                    raise RefusedError(f"optimizer {name} {path!r:.120}", f"key {field_name!r:.60} is not a text")
                _put_value(captured, path, (*prefix, field_name), value)


_EXTRA = "_extra_state"


def parameter_paths(live: Mapping[str, tuple[Role, Tensor]], owners: Mapping[str, str]) -> dict[int, str]:
    """Path of the owner by identity of each live tensor."""
    return {id(tensor): owners[path] for path, (_, tensor) in live.items()}


def _put_value(captured: Captured, path: str, role: Role, value: Any) -> None:
    """Add a state value: a tensor as an entry, a container as a value whose tensors are entries below its role."""
    where = f"{show_role(role)} {path!r:.120}"

    def lift(item: Any, suffix: tuple[str, ...]) -> Any:
        check_depth(len(suffix), where)
        if isinstance(item, Tensor):
            check_tensor(item, where)
            captured.tensors.append(TensorSource(path, role + suffix, item))
            return EntryRef(suffix)
        if type(item) in (list, tuple):
            return type(item)(lift(part, (*suffix, str(i))) for i, part in enumerate(item))
        if type(item) is dict:
            if any(type(key) is not str for key in item):
                raise RefusedError(where, "a nested dict with keys that are not texts cannot be stored exactly")
            return {key: lift(part, (*suffix, key)) for key, part in item.items()}
        return item

    lifted = lift(value, ())
    if type(lifted) is not EntryRef:
        captured.values.append(ValueEntry(path, role, values.to_json(lifted, where)))


def _named(given: Any, default: str, kind: type, argument: str) -> dict[str, Any]:
    """``given`` as a mapping by name, each item of ``kind``."""
    if given is None:
        return {}
    items = dict(given) if isinstance(given, Mapping) and not isinstance(given, kind) else {default: given}
    for name, item in items.items():
        if type(name) is not str or (not name and argument != "model"):
            raise UsageError(f"{argument}=", f"the name {name!r:.60} is not a text")
        if not isinstance(item, kind):
            why = f"{name or 'it'} is a {type_name(item)}, not a {kind.__name__}"
            raise UsageError(f"{argument}=", why, "see the docstring of TrainingState")
    return items
