"""One launched group of workers: started together, told what to do together, and of no use once one is lost."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import TracebackType

from ckptstore.errors import CkptStoreError, MalformedError
from trainer.workers import orders
from trainer.workers.events import HEARTBEAT, Event, make
from trainer.workers.events import LINE_LIMIT as EVENT_LIMIT
from trainer.workers.hosts import Host, Running
from trainer.workers.launch import Ending, Launch, agent_environment, worker_arguments, worker_environment
from trainer.workers.reports import check

_LAST_WORDS = 5.0  # seconds for what other workers have to say when one has lost its peer
_SETTLING = 0.3  # seconds that a silence has to last once it was seen: a controller that was stopped itself reads first


class GroupLostError(CkptStoreError):
    """A worker of a group ended, fell silent or reported an error when none of it was planned."""

    code = "group-lost"


@dataclass(frozen=True, slots=True)
class Said:
    """A worker's event, ``at`` seconds on the controller's monotonic clock."""

    shard: int
    at: float
    event: Event


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's process is gone; ``status`` is its exit status, negative for a signal."""

    shard: int
    at: float
    status: int


@dataclass(frozen=True, slots=True)
class Silent:
    """A worker missed as many heartbeats in a row as the plan allows; its process exists."""

    shard: int
    at: float
    missed: int


Seen = Said | Ended | Silent


class LaunchedGroup:
    """Workers on ``hosts``, one for each shard in order; ends them all when its ``with`` block is left by an error.

    To be made in a thread that outlives the workers: they end with it, so that none outlives its controller. ``signs``
    are the errors, ends and silences seen so far, in order, ``heard`` when each worker last gave a sign of life.

    Args:
        launch: what all groups are started with.
        generation: number of this group, counted from 1.
        purpose: in a few words, for people.
        hosts: one for each shard.
        allow: folders of the run that the workers may touch beside their hosts'.
        listen: called in the controller's own thread with each event as it is taken notice of.

    Raises:
        BackendError: a process cannot be started.
    """

    def __init__(
        self,
        launch: Launch,
        generation: int,
        purpose: str,
        hosts: Sequence[Host],
        *,
        allow: Sequence[Path] = (),
        listen: Callable[[LaunchedGroup, Said], object],
    ) -> None:
        self.launch, self.generation, self.purpose, self.hosts = launch, generation, purpose, tuple(hosts)
        self.began = time.monotonic()
        self.joined: float | None = None
        self.ended: float | None = None
        self.said: list[Said] = []
        self.signs: list[Seen] = []
        self.endings: tuple[Ending, ...] = ()
        self._listen = listen
        self._seen: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        self.heard = dict.fromkeys(range(len(self.hosts)), self.began)
        self._suspected: dict[tuple[int, float], float] = {}  # (shard, last heard): first found silent
        self._silent: set[int] = set()
        self._over: set[int] = set()
        self._gone: set[int] = set()
        self._watched = True
        self.processes: list[Running] = []
        try:
            for shard, host in enumerate(self.hosts):
                name = f"generation-{generation}-shard-{shard}"
                argv = worker_arguments(launch, generation, host, allow)
                host.begin(agent_environment(launch.plan, host))
                master = self.hosts[0].address
                environment = worker_environment(launch.plan, shard, host, world=len(hosts), master=master)
                process = host.launch(name, argv, environment, fork=True)
                self.processes.append(process)
                threading.Thread(target=self._read, args=(shard, process), name=name, daemon=True).start()
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> LaunchedGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.endings:
            self.abort()

    # -- what is seen -------------------------------------------------------------------------------------------------

    def poll(self, seconds: float) -> Seen | None:
        """The next thing seen of any worker, or None if there was nothing for ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            silent = self._newly_silent()
            if silent is not None:
                self.signs.append(silent)
                return silent
            try:
                seen = self._seen.get(timeout=max(0.0, min(deadline - time.monotonic(), 0.05)))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return None
                continue
            if isinstance(seen, Ended):
                self._over.add(seen.shard)
                self.signs.append(seen)
            elif isinstance(seen, Said):
                if seen.event.name == HEARTBEAT:
                    continue
                self.said.append(seen)
                if seen.event.name == "error":
                    self.signs.append(seen)
                self._listen(self, seen)
            return seen

    def events(self, name: str, shard: int | None = None) -> list[Event]:
        """All events of a name so far, of one worker or of all."""
        return [said.event for said in self.said if said.event.name == name and shard in (None, said.shard)]

    def updates(self, shard: int) -> dict[int, Event]:
        """The updates that a worker has made, by number."""
        return {event["update"]: event for event in self.events("update", shard)}

    # -- what is told -------------------------------------------------------------------------------------------------

    def join(self) -> list[Event]:
        """Let the workers find each other; returns their ``joined`` events by shard.

        From now on silence is noticed after a few heartbeats, and until then after the timeout of the group.
        """
        if len(self.processes) > 1:
            port = self._wait("listening", {0})[0]["port"]
            for process in self.processes[1:]:
                process.send(orders.encode(orders.Join(port)))
        joined = self._wait(orders.DONE[orders.Join], set(range(len(self.processes))))
        self.joined = time.monotonic()
        return [joined[shard] for shard in sorted(joined)]

    def tell(self, order: orders.Order, seconds: float = inf) -> list[Event]:
        """Give all workers an order and wait until it is carried out; returns the last event of each by shard.

        Args:
            order: what to do.
            seconds: how long it may take.

        Raises:
            GroupLostError: a worker ended, fell silent, reported an error, or nothing happened for too long.
        """
        self.send(order)
        done = self._wait(orders.DONE[type(order)], set(range(len(self.processes))), seconds)
        return [done[shard] for shard in sorted(done)]

    def send(self, order: orders.Order) -> None:
        """Give all workers an order and do not wait."""
        line = orders.encode(order)
        for process in self.processes:
            process.send(line)

    def close(self) -> list[Event]:
        """Let all workers leave in an orderly way; returns their ``closed`` events by shard."""
        closed = self.tell(orders.Close())
        self._watched = False
        deadline = time.monotonic() + self.launch.plan.timeouts.group
        while len(self._over) < len(self.processes) and time.monotonic() < deadline:
            match self.poll(1.0):
                case Ended(shard=shard, status=status) if status:
                    raise self._lost(shard, _how(status))
        staying = set(range(len(self.processes))) - self._over
        if staying:
            raise self._lost(min(staying), "it said that it was leaving, and stayed")
        self._end()
        return closed

    def abort(self) -> tuple[Ending, ...]:
        """SIGKILL every worker's process group, wait until all are gone, and take notice of what they had said.

        Returns:
            The receipts.
        """
        self._watched = False
        for process in self.processes:
            process.signal(signal.SIGKILL)
        endings = self._end()
        while len(self._over) < len(self.processes) and self.poll(5.0) is not None:
            pass
        return endings

    # -- inside -------------------------------------------------------------------------------------------------------

    def _wait(self, name: str, shards: set[int], seconds: float = inf) -> dict[int, Event]:
        patience = 2 * self.launch.plan.timeouts.group
        began = time.monotonic()
        found: dict[int, Event] = {}
        while shards - found.keys():
            left = max(0.0, began + seconds - time.monotonic())
            match self.poll(min(patience, left)):
                case None if left < patience:
                    raise self._lost(min(shards - found.keys()), f"not {name} within {seconds:g} s")
                case None:
                    missing = min(shards - found.keys())
                    raise self._lost(missing, f"nothing happened for {patience} s while {name} was expected")
                case Said(shard=shard, event=event) if event.name == "error":
                    raise self._lost(shard, self._first_error(shard, event), reported=True)
                case Said(shard=shard, event=event) if event.name == name and shard in shards:
                    found[shard] = event
                case Ended(shard=shard, status=0) if shard in found and name == orders.DONE[orders.Close]:
                    continue  # it left before another one did
                case Ended(shard=shard, status=status):
                    raise self._lost(shard, _how(status))
                case Silent(shard=shard, missed=missed):
                    raise self._lost(shard, f"{missed} heartbeats in a row did not come")
        return found

    def _first_error(self, shard: int, event: Event) -> str:
        """What a worker reported; where that is only that its peer is gone, what the peer has to say as well."""
        texts = [f"{event['type']}: {event['message']}"]
        deadline = time.monotonic() + _LAST_WORDS
        if event["type"] == "PeerLostError":
            while (seen := self.poll(min(1.0, deadline - time.monotonic()))) is not None:
                if seen.shard != shard and isinstance(seen, Said) and seen.event.name == "error":
                    texts.append(f"shard {seen.shard} says {seen.event['type']}: {seen.event['message']}")
                    break
                if seen.shard != shard and isinstance(seen, Ended):
                    texts.append(f"shard {seen.shard} was {_how(seen.status)}")
                    break
        return "; ".join(texts)

    def _lost(self, shard: int, why: str, *, reported: bool = False) -> GroupLostError:
        """The error about a worker; its last words are added unless it ``reported`` itself what happened."""
        process = self.processes[shard]
        words = "" if reported else process.last_words()
        what = f"generation {self.generation} ({self.purpose}), shard {shard} on {process.host.name}"
        return GroupLostError(
            what, f"{why}; its last words: {words}" if words else why, f"error output is in {process.stderr_path}"
        )

    def _newly_silent(self) -> Silent | None:
        if not self._watched:
            return None
        timeouts = self.launch.plan.timeouts
        allowed = timeouts.heartbeats_missed
        if self.joined is None:  # whoever loads torch from a cold disk gives no sign of life meanwhile
            allowed = max(allowed, timeouts.group // timeouts.heartbeat)
        now = time.monotonic()
        for shard, heard in tuple(self.heard.items()):
            missed = int((now - heard) / timeouts.heartbeat)
            if missed < allowed or shard in self._silent | self._gone:
                continue
            if now - self._suspected.setdefault((shard, heard), now) >= _SETTLING:
                self._silent.add(shard)
                return Silent(shard, now, missed)
        return None

    def _read(self, shard: int, process: Running) -> None:
        """In a thread of its own: turn a worker's lines into what is seen, until it ends."""
        with os.fdopen(process.events, "rb") as lines:
            while line := lines.readline(EVENT_LIMIT + 1):
                now = time.monotonic()
                self.heard[shard] = now
                try:
                    event = check(Event.parse(line))
                except MalformedError as error:
                    if not line.endswith(b"\n"):
                        break  # cut off by its writer's end
                    event = make("error", {"type": "MalformedError", "message": str(error)})
                self._seen.put(Said(shard, now, event))
        now = time.monotonic()  # a killed process closes its pipe before it can be waited for
        while (status := process.poll()) is None:
            time.sleep(0.001)
        self._gone.add(shard)
        self._seen.put(Ended(shard, now, status))

    def _end(self) -> tuple[Ending, ...]:
        found = []
        for shard, process in enumerate(self.processes):
            status = process.end()
            gone = not process.present()
            found.append(Ending(self.generation, shard, process.host.name, process.pid, status, gone))
        self.ended = time.monotonic()
        self.endings = tuple(found)
        return self.endings


def _how(status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"
