"""Attempts at moving a ref: begun once, shared by the participants, and decided by the ref alone."""

from __future__ import annotations

import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass

from ckptstore.errors import CkptStoreError, CommitAbortedError, NotFoundError, UsageError
from ckptstore.findings import Place
from ckptstore.format import values
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import check_ref_name, is_ref_name, receipt_key, receipt_prefix
from ckptstore.format.progress import Progress
from ckptstore.format.records import RefRecord, ShardReceipt, attempt_subject
from ckptstore.objects import Objects, writable
from ckptstore.refs import Refs

POLL_SECONDS = 0.02

_TEXT = re.compile(r"([^:]{1,64}):(0|[1-9][0-9]{0,15}):(-|[0-9a-f]{64}):([0-9a-f]{32})")

SAVE_AGAIN = "nothing was committed; save again"


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
        match = _TEXT.fullmatch(text)
        if match is None or not is_ref_name(match[1]):
            raise UsageError(f"attempt {text!r:.80}", "not the text of an attempt")
        return Attempt(match[1], int(match[2]), None if match[3] == "-" else Digest.parse(match[3]), match[4])


def begin(refs: Refs, ref: str, after: RefRecord | None = None) -> Attempt:
    """Begin an attempt from the present head of ``ref``.

    Args:
        refs: the refs of the store.
        ref: the ref.
        after: a record that is the head as far as the caller knows; then only what may come after it is looked for.
    """
    head = refs.head_after(ref, after) if after is not None else refs.head(check_ref_name(ref))
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
                    raise CommitAbortedError(f"shard {receipt.index} of {attempt.ref}", receipt.failure, SAVE_AGAIN)
                found[receipt.index] = receipt
        if len(found) == count:
            return [found[index] for index in sorted(found)]
        if time.monotonic() >= end:
            missing = ", ".join(str(index) for index in range(count) if index not in found)
            why = f"no receipt of shard {missing} of {count} within {deadline:g} s"
            raise CommitAbortedError(f"commit to {attempt.ref}", why, SAVE_AGAIN)
        time.sleep(POLL_SECONDS)


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
        raise CommitAbortedError(f"commit to {attempt.ref}", why, SAVE_AGAIN)
