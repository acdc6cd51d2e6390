"""The drill: a host is lost in the middle of an update, on purpose, and what follows is measured and checked."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from ckptstore import Digest, Store
from trainer.lifecycle.expect import require, unexpected
from trainer.preparation.plan import KILL, SILENT, STOP, Drill
from trainer.workers import events
from trainer.workers.group import Ended, LaunchedGroup, Said, Silent
from trainer.workers.launch import Ending
from trainer.workers.orders import Hold, Train
from trainer.workers.worker import events_path

_PATIENCE = 15.0  # seconds beyond what the plan allows


@dataclass(frozen=True, slots=True)
class Evidence:
    """A sign by which a loss was noticed, in milliseconds after it: of which shard, and what it was."""

    shard: int
    sign: str
    ms: float


@dataclass(frozen=True, slots=True)
class Loss:
    """A host was lost; all counts are of completed updates, times in milliseconds or seconds since the run began.

    ``detection_ms`` is from the signal to the first sign of the loss, ``abort_ms`` from that sign until no process of
    the group was left, ``discarded`` the updates that were made and never committed.
    """

    mode: str
    host: str
    shard: int
    update: int
    microbatch: int
    pid: int
    at: float
    detection_ms: float
    detected_by: str
    evidence: tuple[Evidence, ...]
    abort_ms: float
    endings: tuple[Ending, ...]
    completed: tuple[int, ...]
    operations: tuple[str, ...]
    head: Digest
    discarded: tuple[int, ...]


def lose_host(
    group: LaunchedGroup, drill: Drill, first: int, last: int, operator: Store, ref: str, root: Digest, epoch: float
) -> Loss:
    """Train until the fault point, take the host away, notice it, abort the rest, and check that nothing was done.

    Args:
        group: restored and armed.
        drill: the planned loss.
        first, last: the updates that are ordered.
        operator, ref, root: the store, its ref, and what that has to name before and after.
        epoch: when the run began, on the monotonic clock.

    Raises:
        NotAsPlannedError: something else happened; says what was expected and what was seen.
    """
    timeouts = group.launch.plan.timeouts
    group.send(Train(first, last, Hold(drill.update, drill.microbatch, drill.shard, timeouts.hold)))
    _await_fault_point(group, drill, timeouts.group)
    process, host = group.processes[drill.shard], group.hosts[drill.shard]
    lost_at = time.monotonic()
    if drill.mode == STOP:
        process.signal(signal.SIGSTOP)
    else:
        if drill.mode == SILENT:
            host.cut()
            lost_at = time.monotonic()
        host.lose()
    limit = timeouts.heartbeat * timeouts.heartbeats_missed + _PATIENCE
    evidence = _await_signs(group, drill, lost_at, limit)
    noticed_at = lost_at + evidence[0].ms / 1000
    endings = group.abort()  # SIGKILL also for a process group that is only stopped
    aborted_at = time.monotonic()

    completed = _completed(group, drill.shard)
    require(f"last update that workers completed before update {drill.update}", {drill.update - 1}, set(completed))
    operations = tuple(
        f"shard {said.shard} {said.event['kind']} {said.event['microbatch']}"
        for said in group.said
        if said.event.name == "op"
    )
    require(
        f"operations of shard {drill.shard} in update {drill.update}",
        [f"shard {drill.shard} {drill.after} {drill.microbatch}"],
        [text for text in operations if text.startswith(f"shard {drill.shard} ")],
    )
    require("processes of the aborted group that are left", [], [one.pid for one in endings if not one.gone])
    head = operator.head(ref)
    require(f"head of {ref} after the loss", root, head)
    return Loss(
        mode=drill.mode,
        host=process.host.name,
        shard=drill.shard,
        update=drill.update,
        microbatch=drill.microbatch,
        pid=process.pid,
        at=lost_at - epoch,
        detection_ms=evidence[0].ms,
        detected_by=evidence[0].sign,
        evidence=evidence,
        abort_ms=1000 * (aborted_at - noticed_at),
        endings=endings,
        completed=completed,
        operations=operations,
        head=root,
        discarded=tuple(range(first, drill.update)),
    )


def _completed(group: LaunchedGroup, lost: int) -> tuple[int, ...]:
    """The last update that each worker completed, by what it said, and by what its host has kept if it is not lost."""
    found = []
    for shard, host in enumerate(group.hosts):
        numbers = set(group.updates(shard))
        if shard != lost:
            host.collect()
            kept = events.read(events_path(host.directory, group.generation, shard))
            numbers |= {event["update"] for event in kept if event.name == "update"}
        found.append(max(numbers, default=0))
    return tuple(found)


def _await_fault_point(group: LaunchedGroup, drill: Drill, patience: float) -> None:
    expected = f"shard {drill.shard} at its fault point in update {drill.update}"
    while True:
        match group.poll(patience):
            case Said(shard=drill.shard, event=event) if event.name == "fault_point":
                require("fault point", (drill.update, drill.microbatch), (event["update"], event["microbatch"]))
                return
            case Said(event=event) if event.name not in ("error", "trained"):
                continue
            case Said(shard=shard, event=event):
                raise unexpected("drill", expected, f"shard {shard}: {event.name} {dict(event.fields)}")
            case None:
                raise unexpected("drill", expected, f"nothing for {patience:g} s")
            case other:
                raise unexpected("drill", expected, other)


def _await_signs(group: LaunchedGroup, drill: Drill, lost_at: float, limit: float) -> tuple[Evidence, ...]:
    """Until the loss is beyond doubt: the process is gone and the survivors say so; or heartbeats are missed."""
    found: list[Evidence] = []
    wanted = set(range(len(group.hosts))) if drill.mode == KILL else {drill.shard}
    while wanted:
        seen = group.poll(max(0.0, lost_at + limit - time.monotonic()))
        match seen:
            case None:
                raise unexpected("detection of the lost host", f"a sign within {limit:g} s", "none")
            case Ended(shard=drill.shard, status=status) if drill.mode == KILL:
                require(f"exit status of shard {drill.shard}", -signal.SIGKILL, status)
                sign = "process gone"
            case Silent(shard=drill.shard, missed=missed):
                sign = f"{missed} heartbeats missed"
            case Said(event=event) if event.name == "error" and seen.shard != drill.shard:
                require(f"error of shard {seen.shard}", "PeerLostError", event["type"])
                sign = "connection lost"
            case Said(event=event) if event.name == "error":
                raise unexpected("drill", "the host held until it was lost", f"{event['type']}: {event['message']}")
            case _:
                continue
        found.append(Evidence(seen.shard, sign, 1000 * (seen.at - lost_at)))
        wanted.discard(seen.shard)
    return tuple(sorted(found, key=lambda one: one.ms))
