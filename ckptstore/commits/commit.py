"""Commit: shards of one attempt become one checkpoint, and the ref is the verdict.

Needs no torch: whoever coordinates the workers commits from their receipts and the documents in the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from ckptstore.backends.deadline import check
from ckptstore.closure import Closure, ShardView, read_parts, shape_problems
from ckptstore.commits.attempts import SAVE_AGAIN, Attempt
from ckptstore.commits.presence import check_presence
from ckptstore.commits.proving import Proof, prove_parts, prove_root
from ckptstore.errors import CkptStoreError, CommitAbortedError, MalformedError, NotFoundError, RefusedError
from ckptstore.findings import Place
from ckptstore.format.checkpoint import Checkpoint, Deviation, Replica
from ckptstore.format.digest import Digest
from ckptstore.format.page import sort_key
from ckptstore.format.progress import Counter, Progress, count_updates, problems
from ckptstore.format.records import RefRecord, ShardReceipt
from ckptstore.format.shard import Alias
from ckptstore.format.state import join_leaves, rng_root, state_root
from ckptstore.leases import held_since, lease
from ckptstore.objects import Objects
from ckptstore.refs import Refs


@dataclass(frozen=True, slots=True)
class Declared:
    """What those who commit say and no shard does.

    Args:
        ties: tensors that are one tensor across shards (path, owner).
        replicas: entries that several shards hold with equal values.
        deviations: why this is not an exact continuation of the parent.
        tracks_step: by counter name, whether it must equal the step; what is not named is inferred (see the format).
    """

    ties: Sequence[Alias] = ()
    replicas: Sequence[Replica] = ()
    deviations: Sequence[Deviation] = ()
    tracks_step: Mapping[str, bool] | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit made: the root, its checkpoint, and the record of the ref that names it."""

    root: Digest
    checkpoint: Checkpoint
    record: RefRecord


def commit(
    objects: Objects,
    refs: Refs,
    attempt: Attempt,
    receipts: Sequence[ShardReceipt],
    declared: Declared,
    *,
    before_ref: Callable[[Digest, Proof | None], object] | None = None,
    after: RefRecord | None = None,
    prove: bool = False,
    began: float | None = None,
    kept: MutableMapping[str, bytes] | None = None,
) -> Committed:
    """Join the shards of one attempt into a checkpoint and move the ref.

    Args:
        objects: the store, with all shards durable in it.
        refs: its refs.
        attempt: the attempt that all receipts must be of.
        receipts: one of each shard.
        declared: what is said besides.
        before_ref: called with the root, and what was read back of it, when the checkpoint is durable and before the
            ref moves.
        after: the record that the attempt began from, if the caller has it; else it is read.
        prove: read everything that the checkpoint refers to back, as far as this process has not done so before.
        began: when the save did (of :func:`time.monotonic`): what was read back since then was read for it.
        kept: documents of trees from one commit to the next, see :func:`~ckptstore.closure.read_parts`.

    Raises:
        CommitAbortedError: receipts do not fit together, shards do not join, or counters disagree.
        ConflictError: somebody else moved the ref.
        CkptStoreError: the storage failed.

    After any error before the ref is moved it is fenced, so every participant that asks learns the same.
    """
    began = time.monotonic() if began is None else began
    with ExitStack() as held:  # until the ref has moved; what the workers stored may have been collected before
        with _fenced_unless_ready(refs, attempt, len(receipts)):
            held.enter_context(lease(objects.backend))
            seen = max(began, held_since(objects.backend) or began)
            try:
                checkpoint, closure = join(objects, attempt, receipts, declared, kept)
                data = checkpoint.encode()
                Checkpoint.parse(data)  # no writer makes what no reader takes
                if prove:
                    prove_parts(objects, closure, seen)
                else:
                    check_presence(objects, closure, seen)
            except (RefusedError, MalformedError) as error:
                raise CommitAbortedError(error.what, error.why, error.hint) from None
            except NotFoundError as error:
                raise NotFoundError(error.what, error.why, _STORE_AGAIN) from None
            root = objects.put_document(data)
            proof = prove_root(objects, root, closure, began) if prove else None
            if before_ref is not None:
                before_ref(root, proof)
            if after is None and attempt.generation:
                after = refs.record(attempt.ref, attempt.generation)
            check(f"moving ref {attempt.ref}")
        return Committed(root, checkpoint, refs.move(attempt.ref, root, after))


_STORE_AGAIN = "nothing was committed; store it again: what no checkpoint names yet may be collected"


@contextmanager
def _fenced_unless_ready(refs: Refs, attempt: Attempt, participants: int) -> Iterator[None]:
    """Whatever goes wrong in the block, an interrupt too, aborts the attempt for those who wait for its verdict: at
    once, and not when their deadlines are over. Nobody waits for the verdict on a single shard."""
    try:
        yield
    except BaseException:
        if participants > 1:
            with suppress(CkptStoreError):
                refs.fence(attempt.ref, attempt.generation)
        raise


def join(
    objects: Objects,
    attempt: Attempt,
    receipts: Sequence[ShardReceipt],
    declared: Declared,
    kept: MutableMapping[str, bytes] | None = None,
) -> tuple[Checkpoint, Closure]:
    """The checkpoint of one attempt's receipts, and all that it refers to. RefusedError listing everything that does
    not fit."""
    what = f"commit to {attempt.ref}"
    wrong = receipt_problems(attempt, receipts)
    if wrong:
        raise RefusedError(what, "; ".join(wrong), SAVE_AGAIN)
    receipts = sorted(receipts, key=lambda receipt: receipt.index)
    digests = [receipt.shard for receipt in receipts if receipt.shard is not None]
    first = receipts[0]
    closure = read_parts(objects, digests, first.run, first.files, kept)
    views = [closure.shards[index] for index in range(len(digests))]
    leaves, wrong = join_leaves(
        [view.leaves() for view in views], declared.ties, [(r.path, r.role) for r in declared.replicas]
    )
    wrong += shape_problems(views)
    parent = _parent(objects, attempt)
    progress = replace(
        first.progress,
        counters=_counters(parent, first.step, views, first.progress, declared.tracks_step or {}),
    )
    wrong += problems(first.step, progress, {counter.name: counter.values for counter in progress.counters})
    if wrong:
        astray = [c.name for c in progress.counters if c.tracks_step and c.values != ((first.step, c.values[0][1]),)]
        declare = (
            f"; that one need not track the step is declared by tracks_step={{{astray[0]!r}: False}}" if astray else ""
        )
        raise RefusedError(what, "; ".join(wrong), f"fix the state or declare what differs, then save again{declare}")
    checkpoint = Checkpoint(
        step=first.step,
        parent=attempt.parent,
        run=first.run,
        state_root=state_root(leaves),
        rng_root=rng_root([view.shard.rng for view in views]),
        shards=tuple(digests),
        ties=tuple(sorted(declared.ties, key=lambda tie: tie.path.encode())),
        replicas=tuple(sorted(declared.replicas, key=lambda replica: sort_key(replica.role, replica.path))),
        progress=progress,
        binding=first.binding,
        files=first.files,
        deviations=tuple(declared.deviations),
    )
    return checkpoint, closure


def receipt_problems(attempt: Attempt, receipts: Sequence[ShardReceipt]) -> list[str]:
    """Every way in which receipts do not belong together."""
    if not receipts:
        return ["no shard receipt"]
    wrong = []
    first = receipts[0]
    for receipt in receipts:
        name = f"shard {receipt.index}"
        if receipt.failure:
            wrong.append(f"{name} gave up: {receipt.failure}")
        if receipt.attempt != attempt.nonce:
            wrong.append(f"{name} is of another attempt")
        if receipt.parent != attempt.parent:
            wrong.append(f"{name} has parent {receipt.parent}, the attempt {attempt.parent}")
        for field in ("count", "step", "run", "binding", "progress", "files"):
            if getattr(receipt, field) != getattr(first, field):
                wrong.append(f"{name} differs from shard {first.index} in {field}")
    indices = sorted(receipt.index for receipt in receipts)
    if indices != list(range(first.count)):
        wrong.append(f"shards {indices} are there, 0 to {first.count - 1} are expected")
    return wrong


def _parent(objects: Objects, attempt: Attempt) -> Checkpoint | None:
    if attempt.parent is None:
        return None
    data = objects.document(attempt.parent, Place(checkpoint=attempt.parent, part="parent"))
    return None if data is None else Checkpoint.parse(data)


def _counters(
    parent: Checkpoint | None,
    step: int,
    views: Sequence[ShardView],
    progress: Progress,
    declared: Mapping[str, bool],
) -> tuple[Counter, ...]:
    """The counters of the state, and which of them track the step.

    Not declared: a counter that tracked the step in the parent still must; one that equals the step, and is not 0,
    does from now on; one that is off by exactly one is refused, because that is what a save on the wrong side of an
    update looks like.
    """
    tracked = {c.name for c in parent.progress.counters if c.tracks_step} if parent is not None else set()
    names = {f"optimizer.{optimizer.name}" for view in views for optimizer in view.shard.optimizers}
    names |= {f"scheduler.{state.name}" for state in progress.states if state.kind == "scheduler"}
    for name in sorted(declared.keys() - names):
        known = ", ".join(sorted(names)) or "none"
        raise RefusedError(f"tracks_step {name!r:.80}", f"there is no such counter; the counters are: {known}")
    scaled = any(state.kind == "scaler" for state in progress.states)
    counters = []
    for name, histogram in count_updates((e for view in views for e in view.entries), progress.states).items():
        if name in declared:
            tracks = declared[name]
        elif scaled and name.startswith("optimizer."):
            tracks = False  # a gradient scaler skips updates whose gradients overflow
        elif name in tracked:
            tracks = True
        else:
            values = [value for value, _ in histogram]
            if len(values) == 1 and abs(values[0] - step) == 1:
                why = f"it is at {values[0]}, the step is {step}: off by one"
                hint = f"save after all have advanced, or declare tracks_step={{{name!r}: False}}"
                raise RefusedError(f"counter {name}", why, hint)
            tracks = values == [step] and step > 0  # at step 0 all of them are 0, whatever they count
        counters.append(Counter(name, tracks, histogram))
    return tuple(counters)
