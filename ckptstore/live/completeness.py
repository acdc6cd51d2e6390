"""Completeness of a live process: what of it the checkpoints of these objects would not cover, before the first save.

Nothing is changed by looking: no data source is asked for its state (some draw random numbers then), and no generator
is drawn from.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ckptstore.format.digest import Digest
from ckptstore.format.tree import Tree
from ckptstore.gaps import Completeness, Gap, Part, Severity, tree_gaps
from ckptstore.live.binding import default_binding
from ckptstore.live.capture import Named, Stateful, TrainingState
from ckptstore.live.inventory import module_gaps, optimizer_gaps, refusals
from ckptstore.live.kinds import LIVING, has_template, is_asked_for, is_average, is_stateful, is_tokenizer
from ckptstore.live.process import Reached, defaults, elsewhere, program, reach
from ckptstore.live.rng import GENERATORS, RandomGenerator
from ckptstore.live.tensors import type_name


def inspect_completeness(
    *,
    model: Named = None,
    optimizer: Named = None,
    scheduler: Named = None,
    scaler: Named = None,
    data: Named = None,
    generators: Mapping[str, RandomGenerator] | Sequence[RandomGenerator] = (),
    values: Mapping[str, Stateful] | None = None,
    moving: Collection[str] = (),
    cursors: Collection[str] | Mapping[str, object] = (),
    binding: Mapping[str, object] | None = None,
    files: Tree | Digest | None = None,
    run: Digest | None = None,
) -> Completeness:
    """What of this process a checkpoint of the given objects would not cover, with what to pass instead.

    The objects are looked at, and so is what else the program holds: variables of its functions that run, globals of
    its modules, and what hangs on them. What is in neither, or only in a library's hands, is not seen. Nothing is
    changed by it.

    Args:
        model, optimizer, scheduler, scaler, data, generators, values, moving: as for a run; see
            :class:`~ckptstore.live.capture.TrainingState`.
        cursors: the cursors that will be saved, or their names.
        binding: what will be saved as binding; None: what a run takes by itself.
        files: the tree of files that belongs to the checkpoints, or its digest (then nothing is said about what it
            holds).
        run: the prepared identity, whose inputs are files of the checkpoints as well.

    Raises:
        UsageError: an argument is not what it should be.
    """
    state = TrainingState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        data=data,
        generators=generators,
        values=values,
        moving=moving,
    )
    return inspect_state(state, cursors=cursors, binding=binding, files=run if files is None else files)


def inspect_state(
    state: TrainingState,
    *,
    cursors: Collection[str] | Mapping[str, object] = (),
    binding: Mapping[str, object] | None = None,
    files: Tree | Digest | None = None,
) -> Completeness:
    """The same for a training state."""
    return Completeness.of(_Inspection(state, bool(cursors), binding, files).gaps())


class _Inspection:
    """One look at a process."""

    def __init__(
        self, state: TrainingState, cursors: bool, binding: Mapping[str, object] | None, files: Tree | Digest | None
    ) -> None:
        self.state = state
        self.cursors = cursors
        self.binding = binding
        self.files = files
        self.modules = {id(m) for root in state.modules.values() for m in root.modules()}
        self.optimizers = {id(optimizer) for optimizer in state.optimizers.values()}
        self.given = {id(item) for item in state.stateful.values()}
        self.parameters = {id(p) for root in state.modules.values() for p in root.parameters()}

    def gaps(self) -> Iterator[Gap]:
        """Every gap."""
        yield from refusals(self.state)
        yield from module_gaps(self.state)
        given = {f"{kind} {name}": item for (kind, name), item in self.state.stateful.items()}
        apart = [*self.state.modules.values(), *self.state.optimizers.values(), self.state]
        within = reach(given, is_asked_for, apart)
        found = reach({**_objects(self.state), **program()}, is_asked_for, [self.state, self])
        for item in elsewhere(LIVING, found.seen):
            found.names[id(item)] = f"a {type(item).__name__} that a library holds"
            found.items[id(item)] = item
        missed = list(self._schedulers(found))
        yield from optimizer_gaps(self.state, has_scheduler=bool(missed) or self._has("scheduler"))
        yield from missed
        yield from self._optimizers(found)
        yield from self._scalers(found)
        yield from self._averages(found)
        yield from self._generators(found, within)
        yield from self._data(found, within)
        yield from self._others(found, within)
        yield from self._file_gaps(found)
        yield from self._binding_gaps()
        if not found.whole:
            why = "the program holds more objects than are looked at: some may be missing here"
            yield Gap(Severity.NOTE, Part.STATE, "process", why, "look before the data is loaded")

    def _has(self, kind: str) -> bool:
        return any(one == kind for one, _ in self.state.stateful)

    def _optimizers(self, found: Reached) -> Iterator[Gap]:
        wrapped = {id(v) for o in self.state.optimizers.values() for v in vars(o).values()}
        for name, item in found.of(torch.optim.Optimizer):
            if id(item) in self.optimizers or id(item) in wrapped:
                continue
            mine = any(id(p) in self.parameters for group in item.param_groups for p in group["params"])
            severity = Severity.SEVERE if mine else Severity.WARNING
            why = f"{type_name(item)} {'of weights that are saved ' if mine else ''}is not saved: it would begin anew"
            yield Gap(severity, Part.OPTIMIZER, f"optimizer {name}", why, "pass it in optimizer=")

    def _schedulers(self, found: Reached) -> Iterator[Gap]:
        every = [item for _, item in found.of(LRScheduler)]
        inner = {
            id(item) for one in every for value in vars(one).values() if type(value) in (list, tuple) for item in value
        }
        for name, item in found.of(LRScheduler):
            if id(item) in self.given or id(item) in inner:
                continue
            mine = id(getattr(item, "optimizer", None)) in self.optimizers
            severity = Severity.SEVERE if mine else Severity.WARNING
            why = f"{type(item).__name__} {'of an optimizer that is saved ' if mine else ''}is not: it would begin anew"
            yield Gap(severity, Part.SCHEDULER, f"scheduler {name}", why, "pass it as scheduler=")

    def _scalers(self, found: Reached) -> Iterator[Gap]:
        for name, item in found.of(torch.amp.GradScaler):
            if id(item) not in self.given and item.is_enabled():
                why = "it is not saved: its scale would begin anew, and updates be skipped that were not"
                yield Gap(Severity.SEVERE, Part.SCALER, f"gradient scaler {name}", why, "pass it as scaler=")

    def _averages(self, found: Reached) -> Iterator[Gap]:
        for name, item in found.items.items():
            kind = type(item)
            if id(item) in self.modules or id(item) in self.given or not is_average(item):
                continue
            severity = Severity.SEVERE if issubclass(kind, AveragedModel) else Severity.WARNING
            hint = "pass it in values="
            if issubclass(kind, nn.Module):
                hint = "pass it in model={'model': ..., 'average': ...}"
            why = f"{type_name(item)} is not saved: the average would begin anew"
            yield Gap(severity, Part.AVERAGE, f"average {found.names[name]}", why, hint)

    def _generators(self, found: Reached, within: Reached) -> Iterator[Gap]:
        known = [*self.state.generators.values(), *defaults()]
        same = {id(item) for item in known} | {id(getattr(item, "bit_generator", item)) for item in known}
        same |= {id(getattr(item, "_bit_generator", item)) for item in known}
        for name, generator in self.state.generators.items():
            seeds = getattr(getattr(generator, "bit_generator", None), "seed_seq", None)
            if getattr(seeds, "n_children_spawned", 0):
                why = "it spawned others, which its state does not count: after a resume it spawns the same ones again"
                hint = "spawn all of them when the program begins, and pass each in generators="
                yield Gap(Severity.WARNING, Part.GENERATOR, f"generator {name}", why, hint)
        for name, item in found.of(*GENERATORS):
            bits = getattr(item, "bit_generator", None) or getattr(item, "_bit_generator", item)
            if id(item) in same or id(bits) in same:
                continue
            same |= {id(item), id(bits)}
            what = f"generator {name}"
            if isinstance(item, random.SystemRandom):
                why = "it takes its numbers from the system, and no checkpoint can bring them back"
                yield Gap(Severity.WARNING, Part.GENERATOR, what, why, "draw from a seeded generator")
            elif id(item) in within.items:
                why = f"it belongs to {within.names[id(item)]}, whose own state has to hold it"
                yield Gap(Severity.NOTE, Part.GENERATOR, what, why, "or pass it in generators=")
            else:
                why = f"{type_name(item)} is not saved: what is drawn from it after a resume was drawn before"
                yield Gap(Severity.SEVERE, Part.GENERATOR, what, why, "pass it in generators=, or let it go after use")

    def _data(self, found: Reached, within: Reached) -> Iterator[Gap]:
        if self._has("data"):
            return
        loaders = [(n, item) for n, item in found.of(DataLoader) if id(item) not in {*self.given, *within.items}]
        drawn = [(n, item) for n, item in loaders if not isinstance(_order(item), SequentialSampler)]
        for name, loader in drawn or loaders:
            sampler = _order(loader)
            random_order = isinstance(sampler, RandomSampler) and sampler.generator is None
            if self.cursors and not random_order:
                continue
            parts = ["it has no state" if not self.cursors else "a cursor says how far it is, and not in which order"]
            if isinstance(loader.dataset, IterableDataset):
                parts.append("its data set is a stream")
            elif not isinstance(sampler, SequentialSampler):
                parts.append("it draws its order anew with each epoch")
            if random_order:
                parts.append("its sampler has no generator of its own")
            if loader.num_workers:
                parts.append(f"{loader.num_workers} workers read ahead")
            severe = bool(drawn or loader.num_workers) and not self.cursors
            hint = "pass a loader with state_dict and load_state_dict as data=, or save cursors"
            severity = Severity.SEVERE if severe else Severity.WARNING
            yield Gap(severity, Part.DATA, f"data loader {name}", "; ".join(parts), hint)

    def _others(self, found: Reached, within: Reached) -> Iterator[Gap]:
        """Objects with a state that nobody passed on."""
        handled = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, nn.Module, *GENERATORS)
        known = {*self.given, *within.items, *self.modules, *(id(g) for g in self.state.generators.values())}
        for key, item in found.items.items():
            if id(item) in known or issubclass(type(item), handled) or not is_stateful(item) or is_average(item):
                continue
            why = f"{type_name(item)} has a state_dict that is not saved"
            yield Gap(Severity.WARNING, Part.STATE, found.names[key], why, "pass it as data= or in values=")
        inside = {id(m) for _, item in found.of(nn.Module) if id(item) not in self.modules for m in item.children()}
        for name, item in found.of(nn.Module):
            if id(item) in self.modules or id(item) in inside or id(item) in self.given or is_average(item):
                continue
            trained = [p for p in item.parameters() if p.requires_grad and id(p) not in self.parameters]
            if trained:
                why = f"{type_name(item)} has {len(trained)} parameters that can be trained, and is not saved"
                yield Gap(Severity.WARNING, Part.WEIGHTS, f"module {name}", why, "pass it in model={...}")

    def _file_gaps(self, found: Reached) -> Iterator[Gap]:
        tokenizers = [(found.names[k], item) for k, item in found.items.items() if is_tokenizer(item)]
        if not tokenizers:
            return
        if self.files is None:
            name, item = tokenizers[0]
            why = f"{type_name(item)} is in use, and no files belong to the checkpoints: whoever serves them lacks it"
            hint = "save its files, the chat template too: files=store.put_tree(folder)"
            yield Gap(Severity.WARNING, Part.FILES, f"tokenizer {name}", why, hint)
        elif isinstance(self.files, Tree):
            template = any(has_template(item) for _, item in tokenizers)
            yield from tree_gaps([self.files], tokenizer=True, template=template)

    def _binding_gaps(self) -> Iterator[Gap]:
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self.binding is not None:
            text = " ".join(_keys(self.binding)).lower()
            looked_for = _DECISIVE if on_gpu else _DECISIVE[:3]
            missing = [name for name, words in looked_for if not any(word in text for word in words)]
            if missing:
                why = f"it says nothing of {', '.join(missing)}: nobody will notice other ones"
                hint = f"add them, or leave binding= out: a run takes {', '.join(sorted(default_binding()))}"
                yield Gap(Severity.WARNING, Part.BINDING, "binding", why, hint)
        if on_gpu and torch.backends.cudnn.benchmark:
            why = "cudnn.benchmark lets the clock choose the kernels: a resumed run may compute other bits"
            yield Gap(Severity.WARNING, Part.BINDING, "cudnn.benchmark", why, "torch.backends.cudnn.benchmark = False")


_DECISIVE = (
    ("the version of torch", ("torch", "version")),
    ("threads", ("thread",)),
    ("determinism", ("determinis",)),
    ("cuDNN", ("cudnn",)),
    ("TF32", ("tf32", "matmul_precision")),
)
"""What decides bits, and how a binding may call it; the last of them on accelerators."""


def _order(loader: DataLoader[Any]) -> object:
    """What says in which order a loader takes its samples. With a sampler of batches its ``sampler`` means nothing."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _keys(value: object) -> Iterator[str]:
    """Every key of a nested mapping."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _keys(item)


def _objects(state: TrainingState) -> dict[str, object]:
    """The given objects by name."""
    found: dict[str, object] = {f"model {name}".rstrip(): item for name, item in state.modules.items()}
    found |= {f"optimizer {name}": item for name, item in state.optimizers.items()}
    return found | {f"{kind} {name}": item for (kind, name), item in state.stateful.items()}
