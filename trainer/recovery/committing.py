"""The one commit that may be under way while its group trains on: snapshots at a boundary, then everything else behind.

Nothing of it is seen before its ref has moved, and there is one at a time: a group that is lost in between leaves the
checkpoint before it, or this one, and nothing else. After each commit the hosts keep replicas for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from ckptstore import Digest, Store
from ckptstore.errors import CkptStoreError
from trainer.lifecycle.commits import OPERATOR, Begun, begin_commit, conclude
from trainer.lifecycle.commits import Committed as Concluded
from trainer.recovery.entries import Committed, Replicated, Snapped
from trainer.recovery.replicas import holder, replicate
from trainer.workers.events import Event
from trainer.workers.group import GroupLostError, LaunchedGroup, Said
from trainer.workers.hosts import STORE, Host
from trainer.workers.orders import Save, SaveBehind

_POLL = 0.02  # seconds


@dataclass(slots=True)
class _Underway:
    """A commit: of which group, and how long training has stood still for it, in milliseconds."""

    group: LaunchedGroup
    begun: Begun
    step: int
    stall_ms: float = 0.0
    saved: dict[int, Event] = field(default_factory=dict)
    job: Future[Concluded] | None = None

    @property
    def receipts(self) -> tuple[str, ...]:
        """Receipts of the saved shards, in order."""
        return tuple(event["receipt"] for _, event in sorted(self.saved.items()))


@dataclass(frozen=True, slots=True)
class _Copying:
    """Replicas on their way."""

    root: Digest
    hosts: Sequence[Host]
    job: Future[tuple[int, ...]]


class Commits:
    """Commits to a ref of the operator's store, each in threads of ``pool`` from when all shards of it are saved.

    Args:
        pool: its threads have to outlive every commit.
        operator, ref: where checkpoints go.
        last: the last update; there are no replicas of what comes after it, since nothing does.
        say: is told of replicas that could not be made.
    """

    def __init__(self, pool: Executor, operator: Store, ref: str, last: int, say: Callable[[str], object]) -> None:
        self._pool, self._operator, self._ref, self._last, self._say = pool, operator, ref, last, say
        self._now: _Underway | None = None
        self._copying: _Copying | None = None

    def begin(
        self, group: LaunchedGroup, step: int, parent: Digest | None, *, behind: bool
    ) -> tuple[Snapped | Committed | Replicated, ...]:
        """Begin the commit of the state after ``step`` updates; returns what is to be written down.

        Args:
            group: stands at that boundary.
            step: updates made.
            parent: what the ref has to name.
            behind: return when the workers have their snapshots, and not when all is done.

        Raises:
            GroupLostError: a worker was lost, or took too long.
            NotAsPlannedError: the ref does not name ``parent``.
            CkptStoreError: there is no checkpoint.
        """
        assert self._now is None
        began = time.monotonic()
        before = self._replicated(wait=True)
        begun = begin_commit(group, self._operator, OPERATOR, self._ref, step, parent)
        now = self._now = _Underway(group, begun, step)
        order = (SaveBehind if behind else Save)(str(begun.attempt), step, STORE, begun.files)
        told = group.tell(order, group.launch.plan.timeouts.commit)
        now.stall_ms = _milliseconds(began)
        if behind:
            return (*before, Snapped(step, tuple(event["bytes"] for event in told), round(now.stall_ms)))
        return (*before, *self.wait())

    def heard(self, group: LaunchedGroup, said: Said) -> None:
        """Take notice of an event; with the last ``saved`` one the shards are moved and committed."""
        now = self._now
        if now is None or said.event.name != "saved" or group is not now.group or said.event["step"] != now.step:
            return
        now.saved[said.shard] = said.event
        if len(now.saved) == len(group.hosts):
            saved = [event for _, event in sorted(now.saved.items())]
            now.job = self._pool.submit(conclude, group, self._operator, OPERATOR, now.begun, saved)

    def copy(self, root: Digest, hosts: Sequence[Host], receipts: tuple[str, ...]) -> None:
        """Begin to make replicas of a checkpoint, whose shards are on ``hosts``; what a peer has is only read again."""
        if len(hosts) > 1 and receipts:
            self._copying = _Copying(root, hosts, self._pool.submit(replicate, hosts, receipts))

    def news(self) -> tuple[Committed | Replicated, ...]:
        """What is done and was not told yet. Raises what went wrong with a commit. Does not wait."""
        return (*self._committed(), *self._replicated(wait=False))

    def wait(self) -> tuple[Committed | Replicated, ...]:
        """Wait until the commit that is under way is done, while training stands still.

        Raises:
            GroupLostError: a worker was lost meanwhile, or its shard is not saved in the time that the plan gives.
            CkptStoreError: there is no checkpoint.
        """
        now, began = self._now, time.monotonic()
        assert now is not None
        group, signs = now.group, len(now.group.signs)
        while now.job is None or not now.job.done():
            group.poll(_POLL)
            if len(group.signs) > signs:
                raise GroupLostError(f"generation {group.generation}", "a worker was lost while its shard was saved")
            limit = group.launch.plan.timeouts.commit
            if now.job is None and time.monotonic() > now.begun.at + limit:
                raise GroupLostError(f"generation {group.generation}", f"not all shards were saved within {limit} s")
        now.stall_ms += _milliseconds(began)
        return self.news()

    def settle(self) -> tuple[Committed | Replicated, ...]:
        """The group is lost: what comes about all the same, because every shard was saved before; waits."""
        now = self._now
        done: tuple[Committed, ...] = ()
        if now is not None and now.job is not None:
            try:
                now.job.result()
                done = self._committed()
            except (CkptStoreError, OSError) as error:
                self._say(f"the commit of step {now.step} was lost as well: {error}")
        self._now = None
        return (*done, *self._replicated(wait=True))

    def _committed(self) -> tuple[Committed, ...]:
        now = self._now
        if now is None or now.job is None or not now.job.done():
            return ()
        self._now = None
        done = now.job.result()
        if now.step < self._last:
            self.copy(done.root, now.group.hosts, now.receipts)
        sent = sum(one.sent_bytes for one in done.moved)
        stall, whole = round(now.stall_ms), round(1000 * done.seconds)
        return (
            Committed(done.step, done.root, done.state_root, now.receipts, sent, done.verified_bytes, stall, whole),
        )

    def _replicated(self, *, wait: bool) -> tuple[Replicated, ...]:
        """Replicas that are there. Where they fail the operator's store is enough."""
        copying = self._copying
        if copying is None or not (wait or copying.job.done()):
            return ()
        self._copying = None
        try:
            sent = copying.job.result()
        except (CkptStoreError, OSError) as error:
            self._say(f"no replicas of {copying.root.short}: {error}")
            return ()
        hosts = copying.hosts
        names = tuple(hosts[holder(shard, len(hosts))].name for shard in range(len(hosts)))
        return (Replicated(copying.root, names, sent),)


def _milliseconds(since: float) -> float:
    return 1000 * (time.monotonic() - since)
