"""Optimizers: hyper-parameters by group and state by parameter, as entries and back into the live optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ckptstore.errors import RefusedError
from ckptstore.format import values
from ckptstore.format.canonical import Json, encode
from ckptstore.format.page import HYPER, OPTIM, Entry, HyperEntry, Role, TensorEntry, ValueEntry, show_role
from ckptstore.format.shard import Group, Optimizer
from ckptstore.format.values import entry_refs
from ckptstore.live.modules import asked
from ckptstore.live.tensors import TORCH_DTYPES, TensorSource, live, plain, put_back, state_entries, type_name

SELECTORS = ("foreach", "fused", "capturable", "differentiable")
"""Keys of a parameter group that choose an implementation and are no part of what was learned."""

SCHEDULED = frozenset(
    (
        "lr",
        "initial_lr",
        "max_lr",
        "min_lr",
        "momentum",
        "betas",
        "max_momentum",
        "base_momentum",
        "swa_lr",
        "anneal_lr",
    )
)
"""Hyper-parameters that schedulers change or add: the stored value is taken. Every other one must agree beforehand."""

ORDER = ""
"""Key under which the order of an optimizer's parameters stands, if it has state that runs over several of them."""

Slots: TypeAlias = "Mapping[tuple[str, Role], Tensor]"
"""Restored tensors by path and role."""


@dataclass(slots=True)
class CapturedOptimizer:
    """An optimizer as a description and entries, referring to live tensors."""

    description: Optimizer
    hypers: list[HyperEntry] = field(default_factory=list)
    tensors: list[TensorSource] = field(default_factory=list)
    values: list[ValueEntry] = field(default_factory=list)


def capture_optimizer(
    name: str, optimizer: torch.optim.Optimizer, paths: Mapping[int, str], saved: Collection[torch.optim.Optimizer]
) -> CapturedOptimizer:
    """An optimizer as entries. Takes no step and fills in nothing.

    Args:
        name: its name.
        optimizer: the live one.
        paths: path of each parameter that is saved, by its identity.
        saved: all optimizers that are saved.

    Raises:
        RefusedError: something of it cannot be stored exactly, or would be left out; named.
    """
    _check_whole(name, optimizer, saved)
    groups = []
    hypers: dict[str, HyperEntry] = {}
    for index, group in enumerate(optimizer.param_groups):
        where = f"optimizer {name} group {index}"
        if any(type(key) is not str for key in group):
            raise RefusedError(where, "it has a setting whose name is not a text", "name it by a text")
        settings = {key: plain(value, f"{where} {key}") for key, value in group.items() if key != "params"}
        selectors = {key: settings.pop(key) for key in SELECTORS if key in settings}
        groups.append(Group(values.to_json(settings, where), values.to_json(selectors, where)))
        for position, parameter in enumerate(group["params"]):
            path = paths.get(id(parameter))
            if path is None:
                why = f"parameter {position} of shape {tuple(parameter.shape)} belongs to no module that is saved"
                raise RefusedError(where, why, "pass the module that owns it, or a ParameterList")
            if path in hypers:
                why = (
                    f"{path!r:.120} is in the optimizer twice: one parameter is listed twice, or two share their memory"
                )
                raise RefusedError(where, why, "let the modules hold one and the same parameter, and list it once")
            hypers[path] = HyperEntry(path, (HYPER, name), index)
    captured = CapturedOptimizer(Optimizer(name, type_name(optimizer), tuple(groups)), list(hypers.values()))
    for key, state in dict(optimizer.state).items():
        for path, role, value in _state_items(name, optimizer, key, state, paths):
            tensors, entries = state_entries(path, role, value)
            captured.tensors += tensors
            captured.values += entries
    if "" in {source.path for source in captured.tensors} | {entry.path for entry in captured.values}:
        order = values.to_json(_order(optimizer, paths))
        captured.values.append(ValueEntry("", (OPTIM, name, ORDER), order))
    return captured


def _check_whole(name: str, optimizer: torch.optim.Optimizer, saved: Collection[torch.optim.Optimizer]) -> None:
    """RefusedError if the optimizer keeps state beside its groups and its ``state``."""
    for attribute, held in vars(optimizer).items():
        for item in held if type(held) in (list, tuple) else held.values() if type(held) is dict else (held,):
            if isinstance(item, torch.optim.Optimizer) and not any(item is other for other in saved):
                why = f"it wraps another optimizer, {attribute}, which is not saved"
                raise RefusedError(f"optimizer {name}", why, "name both: optimizer={'outer': ..., 'inner': ...}")
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not getattr(
        optimizer, "_optimizer_state_dict_post_hooks", None
    ):
        return
    what = f"state_dict of optimizer {name}"
    given = asked(what, optimizer.state_dict)
    extra = [str(key) for key in given if key not in ("state", "param_groups")]
    if extra:
        raise RefusedError(what, f"holds {', '.join(extra)[:200]} beside groups and state", "keep it in .state")
    if len(given.get("state", ())) != len(optimizer.state):
        raise RefusedError(what, "holds state that is not in the optimizer's .state", "keep it in .state")


def _state_items(
    name: str, optimizer: torch.optim.Optimizer, key: Any, state: Any, paths: Mapping[int, str]
) -> Iterator[tuple[str, Role, Any]]:
    """Path, role and value of each state that stands under ``key`` of the optimizer's ``state``."""
    whole = isinstance(optimizer, torch.optim.LBFGS)  # keeps one state for all, under its first parameter
    if isinstance(key, Tensor):
        path = "" if whole else paths.get(id(key))
        prefix: Role = (OPTIM, name)
        if path is None:
            raise RefusedError(f"optimizer {name}", f"has state for an unknown tensor {tuple(key.shape)}")
        if type(state) is not dict:
            raise RefusedError(f"optimizer {name}", f"its state of {path!r:.120} is a {type(state).__name__}")
    else:
        path, prefix = "", (OPTIM, name, key)
        if type(key) is not str or key == ORDER:
            raise RefusedError(f"optimizer {name}", f"has state under a key of type {type(key).__name__}: {key!r:.60}")
        if type(state) is not dict:
            if whole:
                raise RefusedError(f"optimizer {name}", f"its state {key!r:.60} is a {type(state).__name__}")
            yield path, prefix, state
            return
    for field_name, value in state.items():
        if type(field_name) is not str or (not path and field_name == ORDER):
            raise RefusedError(f"optimizer {name} {path!r:.120}", f"key {field_name!r:.60} is not a text")
        yield path, (*prefix, field_name), value


def _order(optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> list[str]:
    """Paths of the optimizer's parameters as they stand in its groups."""
    return [paths.get(id(member), "") for group in optimizer.param_groups for member in group["params"]]


class OptimizerPlan:
    """Which part of a live optimizer takes which stored entry.

    Args:
        name: its name.
        optimizer: the live one.
        stored: its description in the checkpoint.
        entries: the entries of its shard.
        paths: path of each live parameter by its identity.
        parameters: live parameters and buffers by path.
        scheduled: whether there are schedulers, which know groups by their number.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        stored: Optimizer,
        entries: Collection[Entry],
        paths: Mapping[int, str],
        parameters: Mapping[str, Tensor],
        scheduled: bool,
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self.stored = stored
        self.scheduled = scheduled
        self.paths = paths
        self.group_of = {e.path: e.group for e in entries if isinstance(e, HyperEntry) and e.role == (HYPER, name)}
        self.values = [e for e in entries if isinstance(e, ValueEntry) and e.role[:2] == (OPTIM, name)]
        self.nested = {
            (e.path, e.role + ref.suffix) for e in self.values for ref in entry_refs(values.from_json(e.value))
        }
        self.tensors = [e for e in entries if isinstance(e, TensorEntry) and e.role[:2] == (OPTIM, name)]
        # The optimizer's own objects: of two parameters that share their memory it may hold either.
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.parameters = {**parameters, **{paths[id(p)]: p for p in members if id(p) in paths}}
        self.hypers: dict[int, Json] = {}

    def problems(self) -> Iterator[str]:
        """Every difference between the live and the stored optimizer that a restore does not settle."""
        if self.stored.type != type_name(self.optimizer):
            yield f"optimizer {self.name} is stored as {self.stored.type} and live as {type_name(self.optimizer)}"
            return
        held: set[str] = set()
        for index, group in enumerate(self.optimizer.param_groups):
            members = {self.paths.get(id(parameter), "") for parameter in group["params"]}
            held |= members
            for member in sorted(members - self.group_of.keys()):
                yield f"optimizer {self.name} holds {member!r:.160} live, and not in the checkpoint"
            numbers = sorted({self.group_of[member] for member in members if member in self.group_of})
            if numbers:
                yield from self._group_problems(index, group, numbers)
        for path in self.group_of:
            if path not in held:
                yield f"optimizer {self.name} held {path!r:.160} in the checkpoint, and does not live"
        yield from self._empty_group_problems()
        entries: list[TensorEntry | ValueEntry] = [*self.values, *self.tensors]
        for entry in entries:
            if entry.path and entry.path not in self.parameters:
                yield f"optimizer {self.name} has state of {entry.path!r:.160}, which is not live"
            elif (entry.path, entry.role) not in self.nested and len(entry.role) > (3 if entry.path else 4):
                yield f"{show_role(entry.role)} of {entry.path!r:.160} is state that nothing refers to"
        order = [values.from_json(entry.value) for entry in self.values if entry.role[2:] == (ORDER,)]
        if order and order[0] != _order(self.optimizer, self.paths):
            yield f"optimizer {self.name} has state that runs over its parameters, and these have another order live"

    def _empty_group_problems(self) -> Iterator[str]:
        """Groups without parameters: nothing names them but their order."""
        stored = [number for number in range(len(self.stored.groups)) if number not in set(self.group_of.values())]
        empty = [(index, group) for index, group in enumerate(self.optimizer.param_groups) if not group["params"]]
        if len(stored) != len(empty):
            yield f"optimizer {self.name} has {len(stored)} empty groups in the checkpoint, and {len(empty)} live"
            return
        for number, (index, group) in zip(stored, empty, strict=True):
            yield from self._group_problems(index, group, [number])

    def _group_problems(self, index: int, group: dict[str, Any], numbers: list[int]) -> Iterator[str]:
        where = f"optimizer {self.name} group {index}"
        if self.scheduled and numbers != [index]:
            listed = ", ".join(str(number) for number in numbers)
            yield f"{where} is group {listed} in the checkpoint, and schedulers know groups by their number"
        stored = [self.stored.groups[number] for number in numbers]
        if any((g.hyper, g.selectors) != (stored[0].hyper, stored[0].selectors) for g in stored[1:]):
            yield f"{where} joins parameters whose groups had different hyper-parameters"
            return
        self.hypers[index] = stored[0].hyper
        for kind, node in (("hyper-parameter", stored[0].hyper), ("implementation", stored[0].selectors)):
            expected = values.from_json(node)
            assert isinstance(expected, dict)
            keys = {key for key in group if key != "params" and (key in SELECTORS) == (kind == "implementation")}
            for key in sorted(keys | {str(key) for key in expected}):
                if key in SCHEDULED:
                    continue
                if key not in group or key not in expected:
                    found = "stored and not live" if key in expected else "live and not stored"
                    yield f"{where} {kind} {key} is {found}"
                elif _typed(group[key], f"{where} {key}") != _typed(live(expected[key]), where):
                    yield f"{where} {kind} {key} is stored as {expected[key]!r:.60} and live as {group[key]!r:.60}"

    def live_tensor(self, entry: TensorEntry) -> Tensor | None:
        """The live state tensor of an entry, if it has its type and shape: an optimizer may hold on to it elsewhere."""
        if (entry.path, entry.role) in self.nested:
            return None
        key, name = self._home(entry.path, entry.role)
        state = self.optimizer.state.get(key)
        tensor = state.get(name) if type(state) is dict else state if name is None else None
        if type(tensor) is not Tensor or tensor.is_inference():
            return None
        fits = tensor.shape == entry.shape and tensor.dtype == TORCH_DTYPES[entry.dtype]
        return tensor if fits else None

    def new_tensor(self, entry: TensorEntry) -> Tensor:
        """Memory for a state entry where torch's optimizers would have made it: with its parameter and laid out alike,
        but a counter of updates on the CPU unless the implementation needs it beside the parameter."""
        dtype = TORCH_DTYPES[entry.dtype]
        parameter = self.parameters.get(entry.path)
        if parameter is None:
            device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
            return torch.empty(entry.shape, dtype=dtype, device=device)
        if entry.role[2:] == ("step",) and not isinstance(self.optimizer, torch.optim.ASGD):
            groups = [g for g in self.optimizer.param_groups if any(member is parameter for member in g["params"])]
            if not any(group.get("fused") or group.get("capturable") for group in groups):
                return torch.empty(entry.shape, dtype=dtype, device="cpu")
        if parameter.shape == entry.shape:
            return torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
        return torch.empty(entry.shape, dtype=dtype, device=parameter.device)

    def fill(self, slots: Slots) -> None:
        """Give the optimizer exactly the stored state: present what was, absent what was not."""
        found = [(path, role, tensor) for (path, role), tensor in slots.items() if role[:2] == (OPTIM, self.name)]
        found += [(e.path, e.role, value_of(e, slots)) for e in self.values if e.role[2:] != (ORDER,)]
        states: dict[Any, Any] = {}
        for path, role, value in found:
            if (path, role) in self.nested:
                continue
            key, name = self._home(path, role)
            if name is None:
                states[key] = value
            else:
                states.setdefault(key, {})[name] = value
        self.optimizer.state.clear()
        members = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        rank = {id(parameter): number for number, parameter in enumerate(members)}
        for key in sorted(states, key=lambda key: rank.get(id(key), len(rank))):
            self.optimizer.state[key] = states[key]

    def fill_groups(self) -> None:
        """Give the groups their stored hyper-parameters."""
        for index, hyper in self.hypers.items():
            self._fill_group(self.optimizer.param_groups[index], hyper)

    def _fill_group(self, group: dict[str, Any], hyper: Json) -> None:
        stored = values.from_json(hyper)
        assert isinstance(stored, dict)
        for key in [key for key in group if key in SCHEDULED and key not in stored]:
            del group[key]
        for name, value in stored.items():
            key, new, old = str(name), live(value), group.get(str(name))
            if isinstance(new, Tensor) and isinstance(old, Tensor) and (new.shape, new.dtype) == (old.shape, old.dtype):
                old.detach().copy_(new)  # a scheduler may hold on to the tensor itself
            else:
                group[key] = new

    def _home(self, path: str, role: Role) -> tuple[Any, str | None]:
        """Key in the optimizer's ``state``, and in what stands there (None: it is the state itself)."""
        if path:
            return self.parameters[path], role[2]
        if isinstance(self.optimizer, torch.optim.LBFGS) and len(role) == 3:
            return self.optimizer.param_groups[0]["params"][0], role[2]
        return role[2], role[3] if len(role) > 3 else None


def value_of(entry: ValueEntry, slots: Slots) -> Any:
    """The live value of an entry, with the tensors that stand as entries of their own put back in."""
    return put_back(values.from_json(entry.value), lambda suffix: slots[entry.path, entry.role + suffix])


def _typed(value: Any, where: str) -> bytes:
    """Canonical bytes of a hyper-parameter, to compare type and bits."""
    return encode(values.to_json(plain(value, where), where))
