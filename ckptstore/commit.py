"""Commit: shards of one attempt become one checkpoint, and the ref is the verdict.

Needs no torch: whoever coordinates the workers commits from their receipts and the documents in the store.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ckptstore.closure import ShardView, read_parts, shape_problems
from ckptstore.errors import CkptStoreError, CommitAbortedError, MalformedError, NotFoundError, RefusedError, UsageError
from ckptstore.findings import Place
from ckptstore.format import values
from ckptstore.format.checkpoint import Checkpoint, Deviation, Replica
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import check_ref_name, receipt_key, receipt_prefix
from ckptstore.format.page import sort_key
from ckptstore.format.progress import Counter, Progress, count_updates, problems
from ckptstore.format.records import ShardReceipt, attempt_subject
from ckptstore.format.shard import Alias
from ckptstore.format.state import join_leaves, rng_root, state_root
from ckptstore.objects import Objects, writable
from ckptstore.refs import Refs

POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at moving a ref: decided once, then given to every participant.

    ``generation`` is the ref's head when the attempt began (0: none) and ``parent`` its root. The attempt can only
    append right after that record, so whoever appends anything else in between has aborted it.
    """

    ref: str
    generation: int
    parent: Digest | None
    nonce: str

    def __str__(self) -> str:
        return f"{self.ref}:{self.generation}:{self.parent.hex if self.parent else '-'}:{self.nonce}"

    @staticmethod
    def parse(text: str) -> Attempt:
        """The attempt of its text. UsageError if it is not one."""
        try:
            ref, generation, parent, nonce = text.split(":")
            return Attempt(check_ref_name(ref), int(generation), None if parent == "-" else Digest.parse(parent), nonce)
        except (ValueError, CkptStoreError):
            raise UsageError(f"attempt {text!r:.80}", "not the text of an attempt") from None


def begin(refs: Refs, ref: str) -> Attempt:
    """Begin an attempt from the present head of ``ref``."""
    head = refs.head(check_ref_name(ref))
    if head is None:
        return Attempt(ref, 0, None, secrets.token_hex(16))
    return Attempt(ref, head.generation, head.root, secrets.token_hex(16))


def publish(objects: Objects, receipt: ShardReceipt) -> Digest:
    """Put a shard receipt where the other participants look for it; returns its digest."""
    data = receipt.encode()
    digest = Digest.of(data)
    writable(objects.backend).create(receipt_key(attempt_subject(receipt.attempt), digest), data)
    return digest


def give_up(objects: Objects, attempt: Attempt, *, index: int, count: int, step: int, reason: str) -> None:
    """Publish that this worker has no shard, so that the others abort at once."""
    receipt = ShardReceipt(
        attempt=attempt.nonce,
        index=index,
        count=count,
        step=step,
        parent=attempt.parent,
        run=None,
        binding=values.to_json({}),
        progress=Progress(),
        files=None,
        shard=None,
        failure=reason[:2000] or "it gave up",
    )
    with suppress(
        CkptStoreError
    ):  # the others' deadline says the same, later; the worker's own error must not be masked
        publish(objects, receipt)


def collect(objects: Objects, attempt: Attempt, count: int, deadline: float) -> list[ShardReceipt]:
    """Wait for the published receipts of all ``count`` shards of an attempt.

    Args:
        objects: the store.
        attempt: the attempt.
        count: how many shards are expected.
        deadline: seconds to wait.

    Raises:
        CommitAbortedError: a participant gave up, or receipts are missing at the deadline; names the shards.
    """
    end = time.monotonic() + deadline
    found: dict[int, ShardReceipt] = {}
    seen: set[str] = set()
    while True:
        for stat in objects.backend.list(receipt_prefix(attempt_subject(attempt.nonce))):
            if stat.key not in seen:
                receipt = ShardReceipt.parse(objects.backend.get(stat.key, 0, DOCUMENT_LIMIT + 1))
                seen.add(stat.key)
                if receipt.failure:
                    raise CommitAbortedError(f"shard {receipt.index} of {attempt.ref}", receipt.failure, _SAVE_AGAIN)
                found[receipt.index] = receipt
        if len(found) == count:
            return [found[index] for index in sorted(found)]
        if time.monotonic() >= end:
            missing = ", ".join(str(index) for index in range(count) if index not in found)
            why = f"no receipt of shard {missing} of {count} within {deadline:g} s"
            raise CommitAbortedError(f"commit to {attempt.ref}", why, _SAVE_AGAIN)
        time.sleep(POLL_SECONDS)


def commit(
    objects: Objects,
    refs: Refs,
    attempt: Attempt,
    receipts: Sequence[ShardReceipt],
    *,
    ties: Sequence[Alias] = (),
    replicas: Sequence[Replica] = (),
    deviations: Sequence[Deviation] = (),
    tracks_step: Mapping[str, bool] | None = None,
    before_ref: Callable[[Digest], object] | None = None,
) -> Digest:
    """Join the shards of one attempt into a checkpoint and move the ref; returns the root.

    Args:
        objects: the store, with all shards durable in it.
        refs: its refs.
        attempt: the attempt that all receipts must be of.
        receipts: one of each shard.
        ties: tensors that are one tensor across shards (path, owner).
        replicas: entries that several shards hold with equal values.
        deviations: why this is not an exact continuation of the parent.
        tracks_step: by counter name, whether it must equal the step; what is not named is inferred (see the format).
        before_ref: called with the root when the checkpoint is durable and before the ref moves.

    Raises:
        CommitAbortedError: receipts do not fit together, shards do not join, or counters disagree. The ref is
        fenced, so every participant that asks learns the same.
        ConflictError: somebody else moved the ref.
    """
    try:
        data = join(objects, attempt, receipts, ties, replicas, deviations, tracks_step or {}).encode()
        Checkpoint.parse(data)  # no writer makes what no reader takes
    except CkptStoreError as error:
        if len(receipts) > 1:  # nobody else waits for the verdict on a single shard
            with suppress(CkptStoreError):
                refs.fence(attempt.ref, attempt.generation)
        if isinstance(error, RefusedError | MalformedError):
            raise CommitAbortedError(error.what, error.why, error.hint) from None
        raise
    root = objects.put_document(data)
    if before_ref is not None:
        before_ref(root)
    base = refs.record(attempt.ref, attempt.generation) if attempt.generation else None
    refs.move(attempt.ref, root, base)
    return root


def join(
    objects: Objects,
    attempt: Attempt,
    receipts: Sequence[ShardReceipt],
    ties: Sequence[Alias],
    replicas: Sequence[Replica],
    deviations: Sequence[Deviation],
    tracks_step: Mapping[str, bool],
) -> Checkpoint:
    """The checkpoint of one attempt's receipts. RefusedError listing everything that does not fit."""
    what = f"commit to {attempt.ref}"
    wrong = receipt_problems(attempt, receipts)
    if wrong:
        raise RefusedError(what, "; ".join(wrong), _SAVE_AGAIN)
    receipts = sorted(receipts, key=lambda receipt: receipt.index)
    digests = [receipt.shard for receipt in receipts if receipt.shard is not None]
    first = receipts[0]
    closure = read_parts(objects, digests, first.run, first.files)
    views = [closure.shards[index] for index in range(len(digests))]
    leaves, wrong = join_leaves([view.leaves() for view in views], ties, [(r.path, r.role) for r in replicas])
    wrong += shape_problems(views)
    progress = replace(
        first.progress,
        counters=_counters(objects, attempt, first.step, views, first.progress, tracks_step),
    )
    wrong += problems(first.step, progress, {counter.name: counter.values for counter in progress.counters})
    if wrong:
        astray = [c.name for c in progress.counters if c.tracks_step and c.values != ((first.step, c.values[0][1]),)]
        declare = (
            f"; that one need not track the step is declared by tracks_step={{{astray[0]!r}: False}}" if astray else ""
        )
        raise RefusedError(what, "; ".join(wrong), f"fix the state or declare what differs, then save again{declare}")
    return Checkpoint(
        step=first.step,
        parent=attempt.parent,
        run=first.run,
        state_root=state_root(leaves),
        rng_root=rng_root([view.shard.rng for view in views]),
        shards=tuple(digests),
        ties=tuple(sorted(ties, key=lambda tie: tie.path.encode())),
        replicas=tuple(sorted(replicas, key=lambda replica: sort_key(replica.role, replica.path))),
        progress=progress,
        binding=first.binding,
        files=first.files,
        deviations=tuple(deviations),
    )


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


def verdict(objects: Objects, refs: Refs, attempt: Attempt, shard: Digest, index: int, deadline: float) -> Digest:
    """Wait for the verdict on an attempt: the root that holds this shard.

    The ref is the verdict. At the deadline the ref is fenced, so that unknown becomes aborted for everybody.

    Raises:
        CommitAbortedError: the attempt did not come about.
    """
    end = time.monotonic() + deadline
    fenced = False
    while True:
        try:
            record = refs.record(attempt.ref, attempt.generation + 1)
        except NotFoundError:
            if fenced:
                raise
            if time.monotonic() >= end:
                refs.fence(attempt.ref, attempt.generation)
                fenced = True
            else:
                time.sleep(POLL_SECONDS)
            continue
        if record.root is not None and record.root != attempt.parent:
            data = objects.document(record.root, Place(checkpoint=record.root, part="checkpoint document"))
            if data is not None:
                checkpoint = Checkpoint.parse(data)
                if checkpoint.shards[index : index + 1] == (shard,) and checkpoint.parent == attempt.parent:
                    return record.root
        why = "the ref was moved or fenced by somebody else" if not fenced else f"no verdict within {deadline:g} s"
        raise CommitAbortedError(f"commit to {attempt.ref}", why, _SAVE_AGAIN)


def _counters(
    objects: Objects,
    attempt: Attempt,
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
    tracked: set[str] = set()
    if attempt.parent is not None:
        data = objects.document(attempt.parent, Place(checkpoint=attempt.parent, part="parent"))
        if data is not None:
            tracked = {c.name for c in Checkpoint.parse(data).progress.counters if c.tracks_step}
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


_SAVE_AGAIN = "nothing was committed; save again"
