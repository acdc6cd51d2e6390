"""Completeness: what of a training process its checkpoints do not cover, as far as objects or documents show it.

Here is what the documents of a checkpoint show; :mod:`ckptstore.live.completeness` looks at a process before its first
save.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptstore.closure import Closure, ShardView
from ckptstore.errors import CkptStoreError, NotFoundError
from ckptstore.format import values
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.page import OPTIM, WEIGHT, HyperEntry, TensorEntry
from ckptstore.gaps import GENERATORS, Completeness, Gap, Part, Severity, listed, tree_gaps
from ckptstore.store import Store


def inspect_checkpoint(store: Store, root: Digest, shards: Collection[int] | None = None) -> Completeness:
    """What a run that resumes from a checkpoint would not get back, as its documents show it. Needs no torch.

    Only documents are read: whether stored bytes are good is what ``verify`` says.

    Args:
        store: the store.
        root: digest of the checkpoint.
        shards: only these shards (a partial store); what no single shard shows is then looked for in these.

    Raises:
        CorruptError, NotFoundError, MalformedError: a document of the checkpoint cannot be read.
    """
    closure = store.closure(root, shards, files=False)
    assert closure.checkpoint is not None
    return Completeness.of(_checkpoint_gaps(store, root, closure, closure.checkpoint))


def _checkpoint_gaps(store: Store, root: Digest, closure: Closure, checkpoint: Checkpoint) -> Iterator[Gap]:
    kinds = {state.kind for state in checkpoint.progress.states}
    for index, view in sorted(closure.shards.items()):
        where = f"shard {index}" if len(checkpoint.shards) > 1 else "checkpoint"
        yield from _generator_gaps(where, view)
        yield from _optimizer_gaps(where, view, checkpoint.step, "scheduler" in kinds)
    views = closure.shards.values()
    entries = [entry for view in views for entry in view.entries]
    weights = {entry.path for entry in entries if entry.role == WEIGHT}
    if weights and not any(view.shard.optimizers for view in views):
        why = "it holds weights and no optimizer: moments and step counters would begin anew"
        yield Gap(Severity.WARNING, Part.OPTIMIZER, "optimizer", why, "save with optimizer=, if it is to be resumed")
    if "data" not in kinds and not checkpoint.progress.cursors and checkpoint.step:
        why = "no data source and no cursor: where the next sample is to be taken from is not known"
        hint = "save with data=, or with cursors={'data': Cursor(...)}"
        yield Gap(Severity.WARNING, Part.DATA, "data position", why, hint)
    low = [e for e in entries if isinstance(e, TensorEntry) and e.role == WEIGHT and e.dtype == "f16"]
    if low and "scaler" not in kinds and any(view.shard.optimizers for view in views):
        why = f"{len(low)} weights are f16, and there is no state of a gradient scaler"
        yield Gap(Severity.NOTE, Part.SCALER, "gradient scaler", why, "save with scaler=, if there is one")
    if not values.from_json(checkpoint.binding, "binding"):
        why = "versions, thread counts and determinism switches are not recorded: nobody will notice other ones"
        yield Gap(Severity.WARNING, Part.BINDING, "binding", why, "save with binding=, or by store.run")
    for deviation in checkpoint.deviations:
        why = f"it is {deviation.actual}, and was {deviation.expected}"
        hint = "the run up to here can be repeated only with the same change at this step"
        yield Gap(Severity.NOTE, Part.HISTORY, f"deviation {deviation.code}", why, hint)
    yield from _history_gaps(store, root, checkpoint)
    yield from _file_gaps(store, checkpoint)


def _generator_gaps(where: str, view: ShardView) -> Iterator[Gap]:
    held = {entry.name for entry in view.shard.rng}
    for name in GENERATORS:
        if name not in held:
            why = "its state is not there: what is drawn from it after a resume is not what would have been"
            yield Gap(Severity.SEVERE, Part.GENERATOR, f"{where} generator {name}", why, "save it with all of them")


def _optimizer_gaps(where: str, view: ShardView, step: int, scheduled: bool) -> Iterator[Gap]:
    members = {(entry.role[1], entry.path) for entry in view.entries if isinstance(entry, HyperEntry)}
    stepped = {(entry.role[1], entry.path) for entry in view.entries if entry.role[0] == OPTIM}
    for optimizer in view.shard.optimizers:
        name = f"{where} optimizer {optimizer.name}"
        settings = [values.from_json(group.hyper) for group in optimizer.groups]
        if not scheduled and any(isinstance(group, dict) and "initial_lr" in group for group in settings):
            why = "a scheduler was made for it (its groups have initial_lr), and none is saved: rates would begin anew"
            yield Gap(Severity.SEVERE, Part.SCHEDULER, f"{name}: scheduler", why, "save with scheduler=")
        mine = {path for owner, path in members if owner == optimizer.name}
        without = sorted(path for path in mine if (optimizer.name, path) not in stepped)
        some = any(owner == optimizer.name for owner, _ in stepped)
        if step and some and without and (optimizer.name, "") not in stepped:
            why = f"no state of {listed(without)}, which others have at step {step}"
            hint = "nothing to do if these got no gradient yet"
            yield Gap(Severity.NOTE, Part.OPTIMIZER, name, why, hint)
    if view.shard.optimizers:
        optimized = {path for _, path in members}
        free = sorted(e.path for e in view.entries if e.role[0] == WEIGHT[0] and e.path not in optimized)
        if free:
            why = f"{listed(free)} belong to no optimizer that is saved"
            hint = "nothing to do if they are frozen; else save their optimizer as well"
            yield Gap(Severity.NOTE, Part.WEIGHTS, f"{where} weights", why, hint)


def _history_gaps(store: Store, root: Digest, checkpoint: Checkpoint) -> Iterator[Gap]:
    if checkpoint.parent is None:
        return
    try:
        store.checkpoint(checkpoint.parent)
    except CkptStoreError as error:
        why = f"the checkpoint that it continues cannot be read: {error.code}"
        hint = f"pull {root.short} again from where its history is"
        yield Gap(Severity.SEVERE, Part.HISTORY, f"parent {checkpoint.parent.short}", why, hint)


def _file_gaps(store: Store, checkpoint: Checkpoint) -> Iterator[Gap]:
    try:
        digests = [] if checkpoint.files is None else [checkpoint.files]
        if checkpoint.run is not None:
            digests.append(store.preparation(checkpoint.run).inputs)
        trees = [store.tree(digest) for digest in digests]
    except NotFoundError:
        why = "files belong to it, and this store does not hold them"
        yield Gap(Severity.NOTE, Part.FILES, "files", why, "pull it with its files, to have them here")
        return
    if not trees:
        why = "no files belong to it: whoever serves it needs tokenizer, chat template and configuration from elsewhere"
        yield Gap(Severity.NOTE, Part.FILES, "files", why, "save with files=store.put_tree(folder)")
        return
    yield from tree_gaps(trees)
