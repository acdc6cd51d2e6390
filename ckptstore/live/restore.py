"""Restore: stored state into live objects, in place, verified while it lands, and armed before the first step.

Everything is checked before the first byte of live state changes: documents, names, shapes, dtypes,
hyper-parameters, progress, generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ckptstore.closure import Closure, ShardView, read_closure
from ckptstore.commits.presence import check_presence
from ckptstore.errors import (
    CkptStoreError,
    MismatchError,
    NotArmedError,
    RefusedError,
    TornRestoreError,
    UsageError,
)
from ckptstore.format import values
from ckptstore.format.canonical import Json, encode
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.page import (
    BUFFER,
    EXTRA,
    OPTIM,
    WEIGHT,
    Entry,
    HyperEntry,
    Role,
    ValueEntry,
)
from ckptstore.format.progress import NamedState
from ckptstore.format.shard import Optimizer
from ckptstore.format.state import differences, shard_leaves
from ckptstore.gaps import Part
from ckptstore.live.aliases import find_aliases
from ckptstore.live.capture import TrainingState, parameter_paths
from ckptstore.live.fill import Target, fill_tensors
from ckptstore.live.inventory import refused
from ckptstore.live.modules import Slot, extra_states, find_slot
from ckptstore.live.optimizer_plan import OptimizerPlan, value_of, without_names
from ckptstore.live.rng import capture_rng, restore_rng, rng_problem
from ckptstore.live.save import HashSink, write_shard
from ckptstore.live.schedules import setting_problems
from ckptstore.live.tensors import DTYPES, TORCH_DTYPES, TensorSource, live
from ckptstore.objects import Objects
from ckptstore.threads import in_threads


@dataclass(slots=True)
class Restored:
    """What a restore put back, kept for the arm check."""

    root: Digest
    checkpoint: Checkpoint
    view: ShardView
    overwritten: list[str] = field(default_factory=list)
    bytes_read: int = 0


def restore(
    objects: Objects, root: Digest, state: TrainingState, *, shard: int | None = None, atomic: bool = False
) -> Restored:
    """Put the stored state of ``root`` into the live objects of ``state``, in place.

    Args:
        objects: the store.
        root: digest of the checkpoint.
        state: the live objects, built as they were when it was saved.
        shard: which shard this process holds; may be left out if there is one.
        atomic: read and verify every byte first, so that a bad one leaves the live state untouched; costs a second
        read.

    Memory stays where it is: parameters, buffers and the optimizer state that is there already are overwritten in
    place, strides, flags and hooks are kept, and gradients are left alone.

    Raises:
        MismatchError, RefusedError: live and stored state do not fit; lists every difference; nothing was changed.
        CorruptError, NotFoundError, MalformedError: stored bytes are bad; nothing was changed.
        TornRestoreError: a chunk turned out bad after something was overwritten; lists what.
        NotArmedError: an object did not take its state, or something else changed it; the live state is unusable.
    """
    closure = read_closure(objects, root, None if shard is None else [shard], files=False)
    checkpoint = closure.checkpoint
    assert checkpoint is not None
    if shard is None:
        if len(checkpoint.shards) > 1:
            why = f"it has {len(checkpoint.shards)} shards and each has generators of its own"
            raise UsageError(f"checkpoint {root.short}", why, "say which one this process holds: shard=…")
        shard = 0
    view = closure.shards[shard]
    # Tensors that are made in inference mode could not be trained any more.
    with torch.inference_mode(False), torch.no_grad():
        try:
            plan = _Plan(state, view, checkpoint)
        except RefusedError as error:
            hint = "nothing was changed; build the objects as they were when it was saved"
            raise MismatchError(
                f"live state for checkpoint {root.short}", f"{error.what}: {error.why}", hint
            ) from error
        plan.check(root)
        check_presence(objects, closure)
        if atomic:
            _verify_all(objects, closure)
        restored = Restored(root, checkpoint, view)
        plan.fill(objects, restored)
        arm(state, restored)
    return restored


def arm(state: TrainingState, restored: Restored) -> None:
    """Recompute the live state and compare it with what was restored: entries, values, generators, progress.

    Raises:
        NotArmedError: lists everything that is not what it was; something changed it after the restore.
    """
    view = restored.view
    try:
        captured = state.capture()
        written = write_shard(captured, view.shard.index, view.shard.count, HashSink())
    except CkptStoreError as error:
        raise NotArmedError(error.what, error.why, error.hint) from error
    actual = shard_leaves(written.entries, written.shard.optimizers, written.shard.aliases)
    described = without_names(view.shard.optimizers)
    wrong = differences(shard_leaves(view.entries, described, view.shard.aliases), actual)
    if _empty_groups(described, view.entries) != _empty_groups(written.shard.optimizers, written.entries):
        wrong.append("a group without parameters has other hyper-parameters")
    wrong += rng_differences(view, captured.rng_by_name())
    stored = {(s.kind, s.name): s.value for s in restored.checkpoint.progress.states}
    for item in captured.states:
        if stored.get((item.kind, item.name)) != item.value:
            wrong.append(f"{item.kind} {item.name} is not in its stored state")
    if wrong:
        what = f"live state against checkpoint {restored.root.short} shard {view.shard.index}"
        hint = "restore last, after everything that seeds or initialises was built"
        raise NotArmedError(what, "; ".join(wrong), hint)


def _empty_groups(optimizers: Iterable[Optimizer], entries: Iterable[Entry]) -> list[tuple[str, bytes]]:
    """Optimizer and values of each group without parameters, which no entry leads to."""
    held = {(entry.role[1], entry.group) for entry in entries if isinstance(entry, HyperEntry)}
    return [
        (optimizer.name, encode([group.hyper, group.selectors]))
        for optimizer in sorted(optimizers, key=lambda optimizer: optimizer.name)
        for number, group in enumerate(optimizer.groups)
        if (optimizer.name, number) not in held
    ]


def rng_differences(view: ShardView, actual: Mapping[str, Json]) -> list[str]:
    """Generators whose live state is not the stored one."""
    wrong = []
    for entry in view.shard.rng:
        if entry.name not in actual:
            wrong.append(f"generator {entry.name} is not live")
        elif actual[entry.name] != entry.value:
            wrong.append(f"generator {entry.name} is not in its stored state")
    return wrong


class _Plan:
    """Which live object takes which stored entry."""

    def __init__(self, state: TrainingState, view: ShardView, checkpoint: Checkpoint) -> None:
        self.refused: list[str] = []
        sources = self._captured(state)
        self.state = state
        self.view = view
        self.checkpoint = checkpoint
        self.tensors = state.tensors()
        addresses = {source.path: source.address for source in sources if source.role in (WEIGHT, BUFFER)}
        self.copies = [p for p, (_, t) in self.tensors.items() if addresses.get(p, t.data_ptr()) != t.data_ptr()]
        self.extras = extra_states(state.modules)
        self.owners = find_aliases({path: tensor for path, (_, tensor) in self.tensors.items()})
        self.aliases = {alias.path: alias.owner for alias in view.shard.aliases}
        self.retie: list[tuple[Slot, str]] = []
        stored = {optimizer.name: optimizer for optimizer in without_names(view.shard.optimizers)}
        paths = parameter_paths(self.tensors, {path: self.aliases.get(path, path) for path in self.tensors})
        live = {path: tensor for path, (_, tensor) in self.tensors.items()}
        scheduled = any(kind == "scheduler" for kind, _ in state.stateful)
        self.optimizers = {
            name: OptimizerPlan(
                name, state.optimizers[name], stored[name], view.entries, paths, live, scheduled, state.moving
            )
            for name in sorted(stored.keys() & state.optimizers.keys())
        }

    def _captured(self, state: TrainingState) -> list[TensorSource]:
        """The live tensors; what could not be armed afterwards is refused now, all of it at once."""
        try:
            return state.capture_tensors().tensors
        except RefusedError as error:
            found = refused(state)
            self.refused = [f"{one.what}: {one.why}" for _, one in found] or [f"{error.what}: {error.why}"]
            if not found or any(part is Part.WEIGHTS for part, _ in found):
                raise RefusedError("live tensors", "; ".join(self.refused)) from error
            return []  # only optimizers are not fit, and all else can be compared

    def check(self, root: Digest) -> None:
        """MismatchError with every difference between live and stored state."""
        wrong = [*self.refused, *self._tensor_problems(), *self._optimizer_problems()]
        wrong += [*self._state_problems(), *self._rng_problems()]
        if wrong:
            what = f"checkpoint {root.short} shard {self.view.shard.index} does not fit the live state"
            hint = "nothing was changed; build the objects as they were when it was saved"
            moved = sorted({key for plan in self.optimizers.values() for key in plan.differing})
            if moved:
                hint += f"; or, where the optimizer or the loop changes it while it trains: moving={moved!r:.200}"
            raise MismatchError(what, "; ".join(wrong), hint)

    def _tensor_problems(self) -> Iterator[str]:
        for path in self.copies:
            yield f"{path!r:.160} is a copy that a state_dict makes anew each time: no restore can reach through it"
        stored = {entry.path: entry for entry in self.view.tensors() if entry.role[0] in ("weight", "buffer")}
        for path in sorted(stored.keys() | self.aliases.keys() | self.tensors.keys()):
            name = repr(path)[:160]
            if path not in self.tensors:
                yield f"{name} is stored and not live"
                continue
            role, tensor = self.tensors[path]
            entry = stored.get(self.aliases.get(path, path))
            if entry is None:
                yield f"{role[0]} {name} is live and not stored"
                continue
            if path not in self.aliases and entry.role != role:
                yield f"{name} is stored as {entry.role[0]} and live as {role[0]}"
            shape, dtype = tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype))
            if (entry.shape, entry.dtype) != (shape, dtype):
                yield f"{name} is stored as {entry.dtype} {entry.shape} and live as {dtype} {shape}"
            yield from self._tie_problems(path)
        extras = {e.path for e in self.view.entries if e.role == EXTRA}
        for path in sorted(extras ^ self.extras.keys()):
            yield f"extra state {path!r:.160} is {'stored and not live' if path in extras else 'live and not stored'}"

    def _tie_problems(self, path: str) -> Iterator[str]:
        """Where the live names of one tensor are not the stored ones, and cannot be made so."""
        owner, live_owner = self.aliases.get(path, path), self.owners[path]
        if owner == live_owner:
            return
        if owner != self.aliases.get(live_owner, live_owner):
            yield f"{path!r:.160} shares storage with {live_owner!r:.120} live, and not in the checkpoint"
            return
        tensor = self.tensors[path][1]
        slot = find_slot(self.state.modules, path, tensor)
        shared = f"{path!r:.160} shares storage with {owner!r:.120} in the checkpoint"
        if slot is None:
            yield f"{shared}, and no module holds it live under that name, so they cannot be tied again"
        elif slot.holds_parameter and not isinstance(self.tensors[owner][1], nn.Parameter):
            yield f"{shared}, and that one is no parameter, so they cannot be tied again"
        elif self._is_optimized(tensor):
            yield f"{shared}, but an optimizer holds it apart"
        else:
            self.retie.append((slot, owner))

    def _optimizer_problems(self) -> Iterator[str]:
        stored = {optimizer.name for optimizer in self.view.shard.optimizers}
        for name in sorted(stored ^ self.state.optimizers.keys()):
            yield f"optimizer {name} is {'stored and not live' if name in stored else 'live and not stored'}"
        for plan in self.optimizers.values():
            yield from plan.problems()

    def _state_problems(self) -> Iterator[str]:
        stored = {(state.kind, state.name) for state in self.checkpoint.progress.states}
        for kind, name in sorted(stored ^ self.state.stateful.keys()):
            where = "stored and not live" if (kind, name) in stored else "live and not stored"
            yield f"{kind} {name} is {where}"
        for state in self.checkpoint.progress.states:
            item = self.state.stateful.get((state.kind, state.name))
            given = values.from_json(state.value)
            yield from setting_problems(f"{state.kind} {state.name}", item, given, self.state.moving)

    def _rng_problems(self) -> Iterator[str]:
        stored = {entry.name: entry.value for entry in self.view.shard.rng}
        required = {entry.name for entry in capture_rng(self.state.generators)}
        for name in sorted(stored.keys() | required):
            if name in stored and name in required:
                problem = rng_problem(name, stored[name], self.state.generators)
                if problem:
                    yield problem
            else:
                yield f"generator {name} is {'stored and not live' if name in stored else 'live and not stored'}"

    def fill(self, objects: Objects, restored: Restored) -> None:
        """Overwrite the live state; the first change to it happens here."""
        slots: dict[tuple[str, Role], Tensor] = {}
        targets: list[Target] = []
        for entry in self.view.tensors():
            if entry.role[0] in ("weight", "buffer"):
                targets.append(Target(entry, self.tensors[entry.path][1], True))
                continue
            if entry.role[0] == OPTIM:
                plan = self.optimizers[entry.role[1]]
                found = plan.live_tensor(entry)
                target = Target(entry, plan.new_tensor(entry) if found is None else found, found is not None)
            else:
                tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device=self._extra_device())
                target = Target(entry, tensor, False)
            slots[entry.path, entry.role] = target.tensor
            targets.append(target)
        try:
            restored.bytes_read = fill_tensors(objects, self.view, targets, restored.overwritten)
        except CkptStoreError as error:
            if not restored.overwritten:
                raise
            listed = ", ".join(restored.overwritten)
            why = f"{error}; overwritten before that: {listed}"
            raise TornRestoreError("live state", why, "do not step or save; restore again from a good copy") from error
        for slot, owner in self.retie:
            slot.put(self.tensors[owner][1])
        for plan in self.optimizers.values():
            plan.fill(slots)
        extras: dict[str, Any] = {path: tensor for (path, role), tensor in slots.items() if role == EXTRA}
        extras |= {
            e.path: value_of(e, slots) for e in self.view.entries if isinstance(e, ValueEntry) and e.role == EXTRA
        }
        for path, value in extras.items():
            _give(f"extra state {path!r:.120}", self.extras[path][0].set_extra_state, value)
        for state in self.checkpoint.progress.states:
            what, item = f"{state.kind} {state.name}", self.state.stateful[state.kind, state.name]
            _give(what, item.load_state_dict, state_value(state))
            # Some data loaders draw random numbers when they are first asked: before the generators are put back.
            _give(what, item.state_dict)
        for plan in self.optimizers.values():
            plan.fill_groups()
        for rng in self.view.shard.rng:
            restore_rng(rng.name, rng.value, self.state.generators)

    def _extra_device(self) -> torch.device:
        """Where extra state is handed to its module: with the model."""
        return next((tensor.device for _, tensor in self.tensors.values()), torch.device("cpu"))

    def _is_optimized(self, tensor: Tensor) -> bool:
        return any(
            member is tensor
            for o in self.state.optimizers.values()
            for group in o.param_groups
            for member in group["params"]
        )


def _give(what: str, take: Callable[..., object], *given: object) -> None:
    """Let the user's object take its state. NotArmedError if it raises."""
    try:
        take(*given)
    except Exception as error:
        why = f"it did not take its stored state: {type(error).__name__}: {error}"
        raise NotArmedError(what, why, "live state is overwritten in part; do not step or save") from error


def state_value(state: NamedState) -> Any:
    """The state dict of a stored scheduler, scaler, data source or value, with live tensors."""
    return live(values.from_json(state.value))


def _verify_all(objects: Objects, closure: Closure) -> None:
    """Read and hash every object of the closure's shards."""

    def read(need: Any) -> None:
        objects.read(need.digest, need.length, need.places[0])

    for _ in in_threads(read, closure.objects.values(), objects.threads):
        pass
