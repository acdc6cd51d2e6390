"""Inventory: what modules and optimizers hold beside what is saved of them, and what of it a save would refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ckptstore.errors import CkptStoreError, RefusedError
from ckptstore.gaps import Gap, Part, Severity, listed
from ckptstore.live.aliases import find_aliases
from ckptstore.live.capture import TrainingState, parameter_paths
from ckptstore.live.modules import extra_states
from ckptstore.live.optimizers import SCHEDULED, SELECTORS, capture_optimizer
from ckptstore.live.rng import capture_rng
from ckptstore.live.tensors import check_tensor

_LISTED = 5

_OPTIMIZER_MARKS = ("state", "param_groups", "defaults", "step", "_opt_called", "_step_count", "_warned_capturable")
"""What torch and its schedulers put on an optimizer beside what it has from the beginning."""

_DERIVED = ("_orig", "_g")
"""Endings under which the old normalisations and prunings keep what an attribute is computed from."""


def refusals(state: TrainingState) -> Iterator[Gap]:
    """What a save would refuse, all of it and not only the first."""
    for part, error in refused(state):
        yield Gap(Severity.SEVERE, part, error.what, f"a save refuses it: {error.why}", error.hint or "see there")


def refused(state: TrainingState) -> list[tuple[Part, CkptStoreError]]:
    """Every error of a save of ``state``, with the part of the process that it is about. Data sources are not asked:
    some draw random numbers when they are."""
    return list(_refused(state))


def _refused(state: TrainingState) -> Iterator[tuple[Part, CkptStoreError]]:
    def attempt(part: Part, look: Callable[[], object]) -> Iterator[tuple[Part, CkptStoreError]]:
        try:
            look()
        except CkptStoreError as error:
            yield part, error

    try:
        live = state.tensors()
    except RefusedError as error:
        yield Part.WEIGHTS, error
        live = {}
    fine = {}
    for path, (role, tensor) in live.items():
        found = list(attempt(Part.WEIGHTS, lambda t=tensor, n=f"{role[0]} {path!r:.120}": check_tensor(t, n)))  # type: ignore[misc]
        yield from found
        if not found:
            fine[path] = tensor
    owners = {path: path for path in live}
    try:
        owners |= find_aliases(fine)
    except RefusedError as error:
        yield Part.WEIGHTS, error
    yield from attempt(Part.WEIGHTS, lambda: extra_states(state.modules))
    paths = parameter_paths(live, owners)
    for name, optimizer in state.optimizers.items():
        saved = state.optimizers.values()
        yield from attempt(
            Part.OPTIMIZER,
            lambda n=name, o=optimizer, s=saved: capture_optimizer(n, o, paths, s),  # type: ignore[misc]
        )
    yield from attempt(Part.SCHEDULER, lambda: state.capture_states(("scheduler", "scaler")))
    for generator, item in state.generators.items():
        yield from attempt(Part.GENERATOR, lambda g={generator: item}: capture_rng(g))  # type: ignore[misc]


def module_gaps(state: TrainingState) -> Iterator[Gap]:
    """Tensors and modules that saved modules hold where no ``state_dict`` names them."""
    try:
        live = state.tensors()
    except RefusedError:
        return  # said by refusals
    saved = {id(tensor) for _, tensor in live.values()}
    places = {_place(tensor) for _, tensor in live.values()}
    modules = {id(module) for root in state.modules.values() for module in root.modules()}
    for prefix, root in state.modules.items():
        for name, module in root.named_modules(prefix=prefix):
            yield from _left_out(name, module, saved)
            yield from _unkept_buffers(name, module, saved, places)
            for attribute, item in vars(module).items():
                if attribute not in _TABLES:
                    path = f"{name}.{attribute}" if name else attribute
                    if not any(f"{attribute}{end}" in module._parameters for end in _DERIVED):
                        yield from _attribute_gaps(path, item, saved, places, modules)


_TABLES = frozenset(vars(nn.Module()))
"""What every module has: the tables of its parameters, buffers and modules, and hooks."""


def _left_out(name: str, module: nn.Module, saved: set[int]) -> Iterator[Gap]:
    kept = [("parameter", key, tensor) for key, tensor in module._parameters.items() if tensor is not None] + [
        ("buffer", key, tensor)
        for key, tensor in module._buffers.items()
        if tensor is not None and key not in module._non_persistent_buffers_set
    ]
    for kind, key, tensor in kept:
        if id(tensor) not in saved:
            path = f"{name}.{key}" if name else key
            why = "the state_dict of its module does not name it, so it is not saved"
            hint = "nothing to do if the program makes it anew; else let state_dict name it"
            yield Gap(Severity.WARNING, Part.WEIGHTS, f"{kind} {path!r:.120}", why, hint)


def _unkept_buffers(name: str, module: nn.Module, saved: set[int], places: set[object]) -> Iterator[Gap]:
    for key in sorted(module._non_persistent_buffers_set):
        tensor = module._buffers.get(key)
        if tensor is None or id(tensor) in saved or _place(tensor) in places:
            continue
        path = f"{name}.{key}" if name else key
        hint = "register it with persistent=True, if it changes while it trains"
        why = "it is not persistent: its module makes it anew, and what changed in it is not saved"
        yield Gap(Severity.NOTE, Part.BUFFER, f"buffer {path!r:.120}", why, hint)


def _attribute_gaps(path: str, item: object, saved: set[int], places: set[object], modules: set[int]) -> Iterator[Gap]:
    """What an attribute holds that is saved nowhere: in itself, or in a list or mapping."""
    kind = type(item)
    inner = [("", item)]
    if kind in (list, tuple):
        inner = [(f"[{index}]", value) for index, value in enumerate(item)]  # type: ignore[arg-type, var-annotated]
    elif kind is dict:
        inner = [(f"[{key!r:.40}]", value) for key, value in item.items()]  # type: ignore[attr-defined]
    for step, value in inner:
        what = f"{path}{step}"
        if isinstance(value, nn.Parameter):
            if id(value) not in saved and _place(value) not in places:
                why = "no module registers this parameter: neither state_dict nor parameters() has it"
                yield Gap(Severity.SEVERE, Part.WEIGHTS, f"parameter {what!r:.120}", why, "keep it in a ParameterList")
        elif isinstance(value, Tensor):
            if id(value) not in saved and value.grad_fn is None and _place(value) not in places:
                why = "it is an attribute and no buffer, so it is not saved"
                hint = "use register_buffer, if it changes while it trains"
                severity = Severity.WARNING
                yield Gap(severity, Part.BUFFER, f"tensor {what!r:.120}", why, hint)
        elif isinstance(value, nn.Module) and id(value) not in modules:
            lost = [p for p in value.parameters() if id(p) not in saved]
            if lost:
                why = f"no module registers it: {len(lost)} parameters of it are in no state_dict"
                yield Gap(Severity.SEVERE, Part.WEIGHTS, f"module {what!r:.120}", why, "keep it in a ModuleList")


def optimizer_gaps(state: TrainingState, *, has_scheduler: bool) -> Iterator[Gap]:
    """What the saved optimizers show: parameters that none has, rates that a schedule moved, settings that move.

    Args:
        state: the objects that are saved.
        has_scheduler: whether there is a scheduler, saved or found.
    """
    held = {id(p) for o in state.optimizers.values() for group in o.param_groups for p in group["params"]}
    for prefix, root in state.modules.items():
        trained = [(name, p) for name, p in root.named_parameters(prefix=prefix) if p.requires_grad]
        free = [name for name, parameter in trained if id(parameter) not in held]
        # Of an average, or of what another program trains, none is held.
        if free and len(free) < len(trained):
            why = f"{listed(free)} would be trained (requires_grad), and no optimizer that is saved has them"
            hint = "nothing to do if they stay as they are; else pass their optimizer too"
            yield Gap(Severity.WARNING, Part.OPTIMIZER, "parameters without optimizer", why, hint)
    for name, optimizer in state.optimizers.items():
        if not has_scheduler and any("initial_lr" in group for group in optimizer.param_groups):
            why = "a scheduler was made for it (its groups have initial_lr), and none is passed: rates would begin anew"
            yield Gap(Severity.SEVERE, Part.SCHEDULER, f"optimizer {name}: scheduler", why, "pass it as scheduler=")
        yield from _moving_settings(name, optimizer, state.moving)
        yield from _kept_apart(name, optimizer)


def _kept_apart(name: str, optimizer: torch.optim.Optimizer) -> Iterator[Gap]:
    """What an optimizer of somebody else's keeps in attributes of its own, which no ``state_dict`` has: a tensor is
    state, and a number may be a setting or count something."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    known = {*vars(torch.optim.SGD([torch.zeros(0, device="cpu")])), *_OPTIMIZER_MARKS}
    held = {key: item for key, item in vars(optimizer).items() if key not in known}
    tensors = [key for key, item in held.items() if any(isinstance(one, Tensor) for one in _inner(item))]
    numbers = [key for key, item in held.items() if any(type(one) in (int, float) for one in _inner(item))]
    if tensors:
        why = f"{listed(tensors)} of {type(optimizer).__name__} holds tensors and is an attribute, so it is not saved"
        hint = "keep them in .state, if they change while it trains"
        yield Gap(Severity.WARNING, Part.OPTIMIZER, f"optimizer {name}: tensors", why, hint)
    if numbers:
        why = f"{listed(numbers)} of {type(optimizer).__name__} is a number and an attribute, so it is not saved"
        hint = "nothing to do for a setting; keep what changes while it trains in .state or in the groups"
        yield Gap(Severity.NOTE, Part.OPTIMIZER, f"optimizer {name}: numbers", why, hint)


def _inner(item: object) -> list[object]:
    """What an attribute holds: itself, or the items of a list or mapping."""
    if type(item) in (list, tuple):
        return list(item)  # type: ignore[call-overload, no-any-return]
    return list(item.values()) if isinstance(item, dict) else [item]


def _moving_settings(name: str, optimizer: torch.optim.Optimizer, moving: frozenset[str]) -> Iterator[Gap]:
    """Settings that an optimizer of somebody else's seems to change itself: a restore refuses those that differ."""
    if type(optimizer).__module__.startswith("torch.optim") or not optimizer.state:
        return
    known = SCHEDULED | moving | {*SELECTORS, "params", "param_names"}
    changed = [
        key
        for key in sorted({str(key) for group in optimizer.param_groups for key in group} - known)
        if all(_differs(group.get(key), optimizer.defaults.get(key)) for group in optimizer.param_groups)
    ]
    if changed:
        why = f"{', '.join(changed)[:200]} in its groups are not as it was made: a fresh one will not fit"
        hint = f"if it changes them itself: moving={changed!r:.200}"
        yield Gap(Severity.WARNING, Part.OPTIMIZER, f"optimizer {name}", why, hint)


def _differs(value: object, default: object) -> bool:
    """Whether a plain setting is another one; of others nothing is said."""
    plain = (bool, int, float, str, type(None))
    return type(value) in plain and type(default) in plain and (type(value), value) != (type(default), default)


def _place(tensor: Tensor) -> object:
    """The memory that a tensor lies in; for one that has none, itself."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # what torch raises for sparse, nested and functional tensors
        return id(tensor)
