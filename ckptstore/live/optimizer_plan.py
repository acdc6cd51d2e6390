"""The plan of an optimizer: stored hyper-parameters and state back into the live one, once all differences are told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ckptstore.errors import RefusedError
from ckptstore.format import values
from ckptstore.format.canonical import Json, encode
from ckptstore.format.page import HYPER, OPTIM, Entry, HyperEntry, Role, TensorEntry, ValueEntry, show_role
from ckptstore.format.shard import Group, Optimizer
from ckptstore.format.values import entry_refs
from ckptstore.live.optimizers import MEMBERS, NAMES, ORDER, SCHEDULED, SELECTORS, order_of
from ckptstore.live.tensors import TORCH_DTYPES, bits, live, plain, put_back, type_name

Slots: TypeAlias = "Mapping[tuple[str, Role], Tensor]"
"""Restored tensors by path and role."""


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
        moving: hyper-parameters that are taken from the checkpoint besides those that schedulers change.
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
        moving: Collection[str] = (),
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self.stored = stored
        self.scheduled = scheduled
        self.moving = SCHEDULED | frozenset(moving)
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
        self.differing: set[str] = set()

    def problems(self) -> Iterator[str]:
        """Every difference between the live and the stored optimizer that a restore does not settle."""
        if self.stored.type != type_name(self.optimizer):
            yield f"optimizer {self.name} is stored as {self.stored.type} and live as {type_name(self.optimizer)}"
            return
        held: set[str] = set()
        for index, group in enumerate(self.optimizer.param_groups):
            members = {self.paths[id(parameter)] for parameter in group["params"] if id(parameter) in self.paths}
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
        if order and order[0] != order_of(self.optimizer, self.paths):
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
            keys = {key for key in group if (key in SELECTORS) == (kind == "implementation")}
            for key in sorted(keys | {str(key) for key in expected}):
                if key in MEMBERS or (key in self.moving and kind == "hyper-parameter"):
                    continue
                if key not in group or key not in expected:
                    self.differing |= {key} - {*SELECTORS}
                    found = "stored and not live" if key in expected else "live and not stored"
                    yield f"{where} {kind} {key} is {found}"
                elif _typed(group[key], f"{where} {key}") != _typed(live(expected[key]), where):
                    self.differing |= {key} - {*SELECTORS}
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
        for key in [key for key in group if key in self.moving and key not in stored]:
            del group[key]
        for name, value in stored.items():
            if name not in MEMBERS:
                group[str(name)] = _settled(live(value), group.get(str(name)))

    def _home(self, path: str, role: Role) -> tuple[Any, str | None]:
        """Key in the optimizer's ``state``, and in what stands there (None: it is the state itself)."""
        if path:
            return self.parameters[path], role[2]
        if isinstance(self.optimizer, torch.optim.LBFGS) and len(role) == 3:
            return self.optimizer.param_groups[0]["params"][0], role[2]
        return role[2], role[3] if len(role) > 3 else None


def _settled(new: Any, old: Any) -> Any:
    """``new``, in the tensors of ``old`` where these have its type and shape: a scheduler may hold on to them, and they
    are on the device where the optimizer wants them."""
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            return new.to(old.device)
        bits(old.detach()).copy_(bits(new))
        return old
    if type(new) in (list, tuple) and type(old) is type(new) and len(new) == len(old):
        return type(new)(_settled(*pair) for pair in zip(new, old, strict=True))
    return new


def without_names(optimizers: Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """Descriptions of optimizers without the names of their members, which writers once stored among the settings."""
    return tuple(
        Optimizer(o.name, o.type, tuple(Group(_unnamed(group.hyper), group.selectors) for group in o.groups))
        for o in optimizers
    )


def _unnamed(hyper: Json) -> Json:
    settings = values.from_json(hyper)
    assert isinstance(settings, dict)
    return values.to_json({key: value for key, value in settings.items() if key != NAMES})


def value_of(entry: ValueEntry, slots: Slots) -> Any:
    """The live value of an entry, with the tensors that stand as entries of their own put back in."""
    return put_back(values.from_json(entry.value), lambda suffix: slots[entry.path, entry.role + suffix])


def _typed(value: Any, where: str) -> bytes:
    """Canonical bytes of a hyper-parameter, to compare type and bits; none if it has no exact form."""
    try:
        return encode(values.to_json(plain(value, where), where))
    except RefusedError:
        return b""
