"""Restore: stored state into live objects, in place, verified while it lands, and armed before the first step.

Everything is checked before the first byte of live state changes: documents, names, shapes, dtypes,
hyper-parameters, progress, generators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckptstore.capture import SELECTORS, TrainingState, parameter_paths
from ckptstore.chunks import ChunkSource
from ckptstore.closure import Closure, ShardView, check_presence, read_closure
from ckptstore.errors import CkptStoreError, MismatchError, TornRestoreError, UsageError
from ckptstore.format import values
from ckptstore.format.canonical import Json, encode
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.page import EXTRA, OPTIM, HyperEntry, Role, TensorEntry, ValueEntry
from ckptstore.format.progress import NamedState
from ckptstore.format.state import differences, shard_leaves
from ckptstore.format.tensors import CHUNK
from ckptstore.format.values import EntryRef
from ckptstore.objects import Objects
from ckptstore.rng import capture_rng, restore_rng
from ckptstore.save import HashSink, write_shard
from ckptstore.tensors import DTYPES, TORCH_DTYPES, find_aliases, live, plain, type_name
from ckptstore.threads import in_threads

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

    Raises:
        MismatchError: live and stored state do not fit; lists every difference; nothing was changed.
        CorruptError, NotFoundError, MalformedError: stored bytes are bad; nothing was changed.
        TornRestoreError: a chunk turned out bad after something was overwritten; lists what.
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
    plan = _Plan(state, view, checkpoint)
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
        MismatchError: lists everything that is not what it was; something changed it after the restore.
    """
    view = restored.view
    captured = state.capture()
    written = write_shard(captured, view.shard.index, view.shard.count, HashSink())
    actual = shard_leaves(written.entries, written.shard.optimizers, written.shard.aliases)
    wrong = differences(view.leaves(), actual)
    wrong += rng_differences(view, captured.rng_by_name())
    stored = {(s.kind, s.name): s.value for s in restored.checkpoint.progress.states}
    for item in captured.states:
        if stored.get((item.kind, item.name)) != item.value:
            wrong.append(f"{item.kind} {item.name} is not in its stored state")
    if wrong:
        what = f"live state against checkpoint {restored.root.short} shard {view.shard.index}"
        hint = "restore last, after everything that seeds or initialises was built"
        raise MismatchError(what, "; ".join(wrong), hint)


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
        self.state = state
        self.view = view
        self.checkpoint = checkpoint
        self.tensors = state.tensors()
        self.owners = find_aliases({path: tensor for path, (_, tensor) in self.tensors.items()})
        self.aliases = {alias.path: alias.owner for alias in view.shard.aliases}
        self.retie: list[tuple[str, str]] = []
        self.groups: dict[tuple[str, int], Json] = {}

    def check(self, root: Digest) -> None:
        """MismatchError with every difference between live and stored state."""
        wrong = [*self._tensor_problems(), *self._optimizer_problems(), *self._state_problems(), *self._rng_problems()]
        if wrong:
            what = f"checkpoint {root.short} shard {self.view.shard.index} does not fit the live state"
            raise MismatchError(
                what, "; ".join(wrong), "nothing was changed; build the objects as they were when it was saved"
            )

    def _tensor_problems(self) -> Iterator[str]:
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
            if self.owners[path] != self.aliases.get(path, path):
                if path in self.aliases and self.owners[path] == path:
                    self.retie.append((path, self.aliases[path]))
                    if self._is_optimized(tensor):
                        owner = repr(self.aliases[path])[:120]
                        yield f"{name} shares storage with {owner} in the checkpoint, but an optimizer holds it apart"
                else:
                    yield f"{name} shares storage with {self.owners[path]!r:.120} live, and not in the checkpoint"
        extras = {entry.path for entry in self._values(EXTRA)} | {
            e.path for e in self.view.tensors() if e.role == EXTRA
        }
        for path in sorted(extras ^ self.state.extras().keys()):
            yield f"extra state {path!r:.160} is {'stored and not live' if path in extras else 'live and not stored'}"

    def _optimizer_problems(self) -> Iterator[str]:
        stored = {optimizer.name: optimizer for optimizer in self.view.shard.optimizers}
        groups = {(e.path, e.role[1]): e.group for e in self.view.entries if isinstance(e, HyperEntry)}
        paths = parameter_paths(self.tensors, self._stored_owners())
        for name in sorted(stored.keys() ^ self.state.optimizers.keys()):
            yield f"optimizer {name} is {'stored and not live' if name in stored else 'live and not stored'}"
        for name in sorted(stored.keys() & self.state.optimizers.keys()):
            optimizer = self.state.optimizers[name]
            if stored[name].type != type_name(optimizer):
                yield f"optimizer {name} is stored as {stored[name].type} and live as {type_name(optimizer)}"
                continue
            seen: set[str] = set()
            for index, group in enumerate(optimizer.param_groups):
                members = [paths.get(id(parameter)) for parameter in group["params"]]
                seen.update(member for member in members if member is not None)
                if any(member is None for member in members):
                    yield f"optimizer {name} group {index} holds a parameter of no module that is restored"
                unknown = sorted(m for m in members if m is not None and (m, name) not in groups)
                for member in unknown:
                    yield f"optimizer {name} holds {member!r:.160} live, and not in the checkpoint"
                numbers = {
                    groups[member, name] for member in members if member is not None and (member, name) in groups
                }
                yield from self._group_problems(name, index, group, [stored[name].groups[n] for n in sorted(numbers)])
            for path, owner in groups:
                if owner == name and path not in seen:
                    yield f"optimizer {name} held {path!r:.160} in the checkpoint, and does not live"

    def _group_problems(self, name: str, index: int, group: dict[str, Any], stored: list[Any]) -> Iterator[str]:
        where = f"optimizer {name} group {index}"
        if not stored:
            return
        if any((g.hyper, g.selectors) != (stored[0].hyper, stored[0].selectors) for g in stored[1:]):
            yield f"{where} joins parameters whose groups had different hyper-parameters"
            return
        self.groups[name, index] = stored[0].hyper
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
                elif _typed(group[key]) != _typed(live(expected[key])):
                    yield f"{where} {kind} {key} is stored as {expected[key]!r:.60} and live as {group[key]!r:.60}"

    def _state_problems(self) -> Iterator[str]:
        stored = {(state.kind, state.name) for state in self.checkpoint.progress.states}
        for kind, name in sorted(stored ^ self.state.stateful.keys()):
            where = "stored and not live" if (kind, name) in stored else "live and not stored"
            yield f"{kind} {name} is {where}"

    def _rng_problems(self) -> Iterator[str]:
        stored = {entry.name for entry in self.view.shard.rng}
        required = {entry.name for entry in capture_rng(self.state.generators)}
        for name in sorted(stored ^ required):
            yield f"generator {name} is {'stored and not live' if name in stored else 'live and not stored'}"

    def fill(self, objects: Objects, restored: Restored) -> None:
        """Overwrite the live state; the first change to it happens here."""
        for path, owner in self.retie:
            self.state.retie(path, owner)
        slots: dict[tuple[str, Role], Tensor] = {}
        targets: list[tuple[TensorEntry, Tensor]] = []
        paths = {path: tensor for path, (_, tensor) in self.tensors.items()}
        for entry in self.view.tensors():
            if entry.role[0] in ("weight", "buffer"):
                targets.append((entry, paths[entry.path].detach()))
            else:
                device = self._state_device(entry, paths)
                tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device=device)
                slots[entry.path, entry.role] = tensor
                targets.append((entry, tensor))
        try:
            fill_tensors(objects, self.view, targets, restored)
        except CkptStoreError as error:
            if not restored.overwritten:
                raise
            listed = ", ".join(restored.overwritten)
            why = f"{error}; overwritten before that: {listed}"
            raise TornRestoreError("live state", why, "do not step or save; restore again from a good copy") from error
        self._fill_optimizers(slots, paths)
        extras = self.state.extras()
        for path, value in [
            *((entry.path, self._value(entry, slots)) for entry in self._values(EXTRA)),
            *((path, tensor) for (path, role), tensor in slots.items() if role == EXTRA),
        ]:
            extras[path][0].set_extra_state(value)
        for state in self.checkpoint.progress.states:
            self.state.stateful[state.kind, state.name].load_state_dict(state_value(state))
        self._fill_hypers()
        for rng in self.view.shard.rng:
            restore_rng(rng.name, rng.value, self.state.generators)

    def _fill_optimizers(self, slots: Mapping[tuple[str, Role], Tensor], paths: Mapping[str, Tensor]) -> None:
        """Give each optimizer exactly the stored per-parameter state: present what was, absent what was absent."""
        stored: dict[tuple[str, str, str], dict[str, Any]] = {}
        found = [(path, role, tensor) for (path, role), tensor in slots.items() if role[0] == OPTIM]
        found += [
            (e.path, e.role, self._value(e, slots))
            for e in self.view.entries
            if isinstance(e, ValueEntry) and e.role[0] == OPTIM
        ]
        nested = {
            (e.path, e.role + ref.suffix)
            for e in self.view.entries
            if isinstance(e, ValueEntry)
            for ref in _refs(values.from_json(e.value))
        }
        for path, role, value in found:
            if (path, role) in nested:
                continue
            key = role[2] if len(role) == 4 else ""
            stored.setdefault((role[1], path, key), {})[role[-1]] = value
        for name, optimizer in self.state.optimizers.items():
            optimizer.state.clear()
            for (owner, path, key), fields in stored.items():
                if owner != name:
                    continue
                if path:
                    parameter: Any = paths[path]
                elif key:
                    parameter = key
                else:
                    parameter = optimizer.param_groups[0]["params"][0]
                optimizer.state[parameter] = fields

    def _fill_hypers(self) -> None:
        for (name, index), hyper in self.groups.items():
            group = self.state.optimizers[name].param_groups[index]
            stored = values.from_json(hyper)
            assert isinstance(stored, dict)
            for key in [key for key in group if key in SCHEDULED and key not in stored]:
                del group[key]
            for name_of_value, value in stored.items():
                key = str(name_of_value)
                new = live(value)
                if isinstance(new, Tensor) and isinstance(group.get(key), Tensor) and group[key].shape == new.shape:
                    group[key].detach().copy_(new)  # a scheduler may hold on to the tensor itself
                else:
                    group[key] = new

    def _state_device(self, entry: TensorEntry, paths: Mapping[str, Tensor]) -> torch.device:
        """Where torch keeps this state: with its parameter, but a step counter on the CPU unless fused or
        capturable."""
        if entry.path not in paths:
            return next(iter(paths.values())).device if paths else torch.device("cpu")
        parameter = paths[entry.path]
        if entry.role[-1] != "step":
            return parameter.device
        for group in self.state.optimizers[entry.role[1]].param_groups:
            if any(member is parameter for member in group["params"]):
                return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        return parameter.device

    def _values(self, role: Role) -> list[ValueEntry]:
        return [entry for entry in self.view.entries if isinstance(entry, ValueEntry) and entry.role == role]

    def _value(self, entry: ValueEntry, slots: Mapping[tuple[str, Role], Tensor]) -> Any:
        """A value entry as a live value, with the tensors that stand as entries of their own put back in."""

        def put_back(item: Any) -> Any:
            if type(item) is EntryRef:
                return slots[entry.path, entry.role + item.suffix]
            if type(item) in (list, tuple):
                return type(item)(put_back(part) for part in item)
            if type(item) is dict:
                return {key: put_back(part) for key, part in item.items()}
            return live(item)

        return put_back(values.from_json(entry.value))

    def _stored_owners(self) -> dict[str, str]:
        return {path: self.aliases.get(path, path) for path in self.tensors}

    def _is_optimized(self, tensor: Tensor) -> bool:
        return any(
            member is tensor
            for o in self.state.optimizers.values()
            for group in o.param_groups
            for member in group["params"]
        )


def state_value(state: NamedState) -> Any:
    """The state dict of a stored scheduler, scaler, data source or value, with live tensors."""
    return live(values.from_json(state.value))


def fill_tensors(
    objects: Objects, view: ShardView, targets: list[tuple[TensorEntry, Tensor]], restored: Restored
) -> None:
    """Read the chunks of ``targets`` (entries in order), verify each, and put them into the tensors one after the
    other."""
    source = ChunkSource(objects, view)

    def load(item: tuple[int, int]) -> bytes:
        return source.read(targets[item[0]][0], item[1])

    order = [(index, number) for index, (entry, _) in enumerate(targets) for number in range(max(1, len(entry.chunks)))]
    filler: _Filler | None = None
    for (index, number), data in zip(order, in_threads(load, order), strict=True):
        entry, tensor = targets[index]
        if number == 0:
            filler = _Filler(tensor)
        assert filler is not None
        if number == 0 and entry.role[0] in ("weight", "buffer"):
            restored.overwritten.append(f"{entry.role[0]} {entry.path}")
        filler.put(number * CHUNK, data)
        restored.bytes_read += len(data)
        if number == max(1, len(entry.chunks)) - 1:
            filler.finish()


class _Filler:
    """Puts row-major bytes into a tensor: straight into contiguous memory, else by way of a contiguous copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        whole = tensor if self._direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._whole = whole
        self._bytes = whole.reshape(-1).view(torch.uint8)

    def put(self, offset: int, data: bytes) -> None:
        """Bytes at ``offset`` from the tensor's start."""
        part = self._bytes[offset : offset + len(data)]
        if part.device.type == "cpu":
            part.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        else:
            part.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def finish(self) -> None:
        """All bytes are there."""
        if self._direct:
            return
        target, whole = self._tensor, self._whole
        for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if size > 1 and stride == 0:  # an expanded dimension: one element stands for all
                target, whole = target.narrow(dim, 0, 1), whole.narrow(dim, 0, 1)
        target.copy_(whole)


def _verify_all(objects: Objects, closure: Closure) -> None:
    """Read and hash every object of the closure's shards."""

    def read(need: Any) -> None:
        objects.read(need.digest, need.length, need.places[0])

    for _ in in_threads(read, closure.objects.values()):
        pass


def _refs(value: Any) -> Iterator[EntryRef]:
    if type(value) is EntryRef:
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _refs(item)


def _typed(value: Any) -> bytes:
    """Canonical bytes of a hyper-parameter, to compare type and bits."""
    return encode(values.to_json(plain(value, "hyper-parameter")))
