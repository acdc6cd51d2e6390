"""The end of a save in a store: receipts of the shards are awaited, joined and committed, with what is noted beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptstore.commits.attempts import Attempt, collect
from ckptstore.commits.commit import Committed, Declared, commit
from ckptstore.commits.proving import Proof
from ckptstore.errors import CommitAbortedError, RefusedError, UsageError
from ckptstore.findings import raise_finding
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.records import Receipt, RefRecord, ShardReceipt
from ckptstore.leases import now
from ckptstore.verify import verify

if TYPE_CHECKING:
    from ckptstore.store import Store


def conclude(
    store: Store,
    attempt: Attempt,
    receipts: Sequence[ShardReceipt] | None,
    declared: Declared,
    *,
    count: int | None = None,
    deadline: float = 60.0,
    metrics: Mapping[str, object] | None = None,
    readback: bool | None = None,
    after: RefRecord | None = None,
    began: float | None = None,
    before_ref: Callable[[Digest], object] = lambda _: None,
) -> Committed:
    """Commit the shards of an attempt; see :meth:`Store.commit`.

    Args:
        after: the record that the attempt began from, if the caller has it; else it is read.
        began: when the save did (of :func:`time.monotonic`): what was read back since then was read for it.
        before_ref: called with the root just before the ref moves.
    """
    network = store.backend.traits.network
    if readback is False and network:
        why = "behind a network a ref moves only after all that it will refer to was read back"
        raise UsageError(f"commit in {store.url}", why, "leave readback out")
    details = None if metrics is None else values.to_json(dict(metrics), "metrics")

    if receipts is None:
        receipts = _awaited(store, attempt, count, deadline)

    def note(root: Digest, proof: Proof | None) -> None:
        if proof is not None:
            store.put_receipt(proof.receipt(store.url, store.id))
        elif readback:
            _read_back(store, root)
        if details is not None:
            store.put_receipt(Receipt("metrics", root, None, 0, 0, 0, "none", now(), store.url, (), details))
        before_ref(root)

    committed = commit(
        store.objects,
        store.refs,
        attempt,
        receipts,
        declared,
        before_ref=note,
        after=after,
        prove=network,
        began=began,
        kept=store.trees_read if network else None,
    )
    store.note_in_catalogue(committed.root)
    return committed


def _awaited(store: Store, attempt: Attempt, count: int | None, deadline: float) -> list[ShardReceipt]:
    """The published receipts of an attempt; without all of them by the deadline, the ref is fenced."""
    if count is None:
        raise UsageError("commit", "neither receipts nor the number of shards to wait for was given")
    try:
        return collect(store.objects, attempt, count, deadline)
    except CommitAbortedError:
        store.refs.fence(attempt.ref, attempt.generation)
        raise


def _read_back(store: Store, root: Digest) -> None:
    report = verify(store.backend, root)
    if report.findings:
        store.objects.forget(report.findings[0].key)
        raise_finding(report.findings[0])
    if not report.method.reaches_medium:
        why = f"bytes could only be read from a cache ({report.method.value})"
        raise RefusedError(f"readback before commit in {store.url}", why, "use readback='behind' on this file system")
    store.put_receipt(report.receipt(store.url))
