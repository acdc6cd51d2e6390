"""The one commit that may be under way while its group trains on: snapshots at a boundary, then everything else behind.

Nothing of it is seen before its ref has moved, and there is one at a time: a group that is lost in between leaves the
checkpoint before it, or this one, and nothing else.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from ckptstore import Attempt, Digest, Store
from ckptstore.errors import CkptStoreError
from trainer.lifecycle.commits import OPERATOR, Committed, conclude
from trainer.lifecycle.expect import require
from trainer.recovery.entries import Snapped
from trainer.workers.events import Event
from trainer.workers.group import LaunchedGroup, Said
from trainer.workers.hosts import STORE
from trainer.workers.orders import SaveBehind


@dataclass(slots=True)
class _Underway:
    group: LaunchedGroup
    attempt: Attempt
    step: int
    began: float
    saved: dict[int, Event] = field(default_factory=dict)
    job: Future[Committed] | None = None


class CommitBehind:
    """Commits to ``ref`` of ``operator``, each in a thread of ``pool`` from when all shards of it are saved."""

    def __init__(self, pool: Executor, operator: Store, ref: str) -> None:
        self._pool, self._operator, self._ref = pool, operator, ref
        self._now: _Underway | None = None

    def begin(self, group: LaunchedGroup, step: int, parent: Digest | None) -> Snapped:
        """Let the workers take their snapshots of the state after ``step`` updates; returns when all have them.

        Raises:
            GroupLostError: a worker was lost.
            NotAsPlannedError: the ref does not name ``parent``.
        """
        assert self._now is None
        began = time.monotonic()
        attempt = self._operator.begin(self._ref)
        require(f"root of ref {self._ref} before the commit of step {step}", parent, attempt.parent)
        self._now = _Underway(group, attempt, step, began)
        order = SaveBehind(str(attempt), step, STORE)
        taken = group.tell(order, group.launch.plan.timeouts.commit)
        stall = round(1000 * (time.monotonic() - began))
        return Snapped(step, tuple(event["bytes"] for event in taken), stall)

    def heard(self, group: LaunchedGroup, said: Said) -> None:
        """Take notice of an event; after the last ``saved`` one the rest begins."""
        now = self._now
        if now is None or said.event.name != "saved" or group is not now.group or said.event["step"] != now.step:
            return
        now.saved[said.shard] = said.event
        if len(now.saved) == len(group.hosts):
            saved = [event for _, event in sorted(now.saved.items())]
            now.job = self._pool.submit(conclude, group, self._operator, OPERATOR, now.attempt, saved, now.began)

    def outcome(self) -> Committed | None:
        """The checkpoint, once and as soon as there is one. Raises what went wrong with it. Does not wait."""
        if self._now is None or self._now.job is None or not self._now.job.done():
            return None
        job, self._now = self._now.job, None
        return job.result()

    @property
    def late(self) -> bool:
        """Whether shards are still not saved although the plan's time for that is over."""
        now = self._now
        if now is None or now.job is not None:
            return False
        return time.monotonic() > now.began + now.group.launch.plan.timeouts.commit

    def settle(self) -> Committed | None:
        """The group is lost: the checkpoint all the same, if all its shards were saved and it comes about; waits."""
        now, self._now = self._now, None
        if now is None or now.job is None:
            return None
        try:
            return now.job.result()
        except (CkptStoreError, OSError):  # of a host that is gone, or the next try will say it
            return None
