"""Optimizers: hyper-parameters by group and state by parameter, as entries; the way back is in ``optimizer_plan``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ckptstore.errors import RefusedError
from ckptstore.format import values
from ckptstore.format.page import HYPER, OPTIM, HyperEntry, Role, ValueEntry
from ckptstore.format.shard import Group, Optimizer
from ckptstore.live.modules import asked
from ckptstore.live.tensors import TensorSource, plain, state_entries, type_name

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

NAMES = "param_names"
"""Key of a parameter group under which torch keeps the names of its members, if it was given names: they are members,
and no setting."""

ORDER = ""
"""Key under which the order of an optimizer's parameters stands, if it has state that runs over several of them."""

MEMBERS = ("params", NAMES)
"""Keys of a parameter group that say who its members are, and not how they are updated."""


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
        settings = {key: plain(value, f"{where} {key}") for key, value in group.items() if key not in MEMBERS}
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
        order = values.to_json(order_of(optimizer, paths))
        captured.values.append(ValueEntry("", (OPTIM, name, ORDER), order))
    return captured


def _check_whole(name: str, optimizer: torch.optim.Optimizer, saved: Collection[torch.optim.Optimizer]) -> None:
    """RefusedError if the optimizer keeps state beside its groups and its ``state``."""
    for attribute, held in vars(optimizer).items():
        for item in held if type(held) in (list, tuple) else held.values() if type(held) is dict else (held,):
            if not isinstance(item, torch.optim.Optimizer) or item is optimizer:
                continue
            if item.state is optimizer.state:
                why = f"it wraps another optimizer, {attribute}, and has the state of that one"
                raise RefusedError(f"optimizer {name}", why, f"pass the inner one alone: optimizer=….{attribute}")
            if not any(item is other for other in saved):
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


def order_of(optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> list[str]:
    """Paths of the optimizer's parameters as they stand in its groups."""
    return [paths.get(id(member), "") for group in optimizer.param_groups for member in group["params"]]
