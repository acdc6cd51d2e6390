"""The end of a save in a store: receipts of the shards are awaited, joined and committed, with what is noted beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ckptstore.commits.attempts import Attempt, collect
from ckptstore.commits.commit import Committed, Declared, commit
from ckptstore.commits.proving import Proof
from ckptstore.errors import CkptStoreError, RefusedError, UsageError
from ckptstore.findings import raise_finding
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.records import Receipt, RefRecord, ShardReceipt
from ckptstore.leases import now
from ckptstore.objects import Objects
from ckptstore.receipts import Receipts
from ckptstore.refs import Refs
from ckptstore.verify import verify


class Commits:
    """What commits to a store need, and the documents that one commit after another would read back."""

    def __init__(self, objects: Objects, refs: Refs, receipts: Receipts) -> None:
        self._objects = objects
        self._refs = refs
        self._receipts = receipts
        self._trees_read: dict[str, bytes] = {}

    def conclude(
        self,
        attempt: Attempt,
        shards: Sequence[ShardReceipt] | None,
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
        """Commit the shards of an attempt; see :meth:`ckptstore.store.Store.commit`.

        Args:
            after: the record that the attempt began from, if the caller has it; else it is read.
            began: when the save did (of :func:`time.monotonic`): what was read back since then was read for it.
            before_ref: called with the root just before the ref moves.
        """
        url, network = self._objects.backend.url, self._objects.backend.traits.network
        if readback is False and network:
            why = "behind a network a ref moves only after all that it will refer to was read back"
            raise UsageError(f"commit in {url}", why, "leave readback out")
        details = None if metrics is None else values.to_json(dict(metrics), "metrics")

        if shards is None:
            shards = self._awaited(attempt, count, deadline)

        def note(root: Digest, proof: Proof | None) -> None:
            if proof is not None:
                self._receipts.put(proof.receipt(url, self._receipts.store_id))
            elif readback:
                self._read_back(root)
            if details is not None:
                self._receipts.put(Receipt("metrics", root, None, 0, 0, 0, "none", now(), url, (), details))
            before_ref(root)

        return commit(
            self._objects,
            self._refs,
            attempt,
            shards,
            declared,
            before_ref=note,
            after=after,
            prove=network,
            began=began,
            kept=self._trees_read if network else None,
        )

    def _awaited(self, attempt: Attempt, count: int | None, deadline: float) -> list[ShardReceipt]:
        """The published receipts of an attempt; if they do not come, for whatever reason, the ref is fenced, so that
        nobody waits for a verdict until a deadline."""
        if count is None:
            raise UsageError("commit", "neither receipts nor the number of shards to wait for was given")
        try:
            return collect(self._objects, attempt, count, deadline)
        except BaseException:
            with suppress(CkptStoreError):
                self._refs.fence(attempt.ref, attempt.generation)
            raise

    def _read_back(self, root: Digest) -> None:
        backend = self._objects.backend
        report = verify(backend, root)
        if report.findings:
            self._objects.forget(report.findings[0].key)
            raise_finding(report.findings[0])
        if not report.method.reaches_medium:
            why = f"bytes could only be read from a cache ({report.method.value})"
            raise RefusedError(
                f"readback before commit in {backend.url}", why, "use readback='behind' on this file system"
            )
        self._receipts.put(report.receipt(backend.url))
