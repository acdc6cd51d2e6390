"""The controller's end of a host's agent, and of each process that the agent runs."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from ckptstore.errors import BackendError, MalformedError
from trainer.hosts import protocol
from trainer.hosts.protocol import Exited, Gone, Heartbeat, Launch, Launched, Line, Ready, Refused, Send, Signal

_STARTING = 120.0  # seconds for an agent to import torch, also from a cold disk


class Connection:
    """A conversation with an agent, until it ends or :meth:`drop` is called.

    Args:
        source, sink: what the agent says, and what it is told.
        host: its name, for messages.
        finish: lets the agent see that it will be told no more.
        cut: ends ``source`` from this side.
    """

    def __init__(
        self,
        source: IO[bytes],
        sink: IO[bytes],
        host: str,
        finish: Callable[[], object],
        cut: Callable[[], object],
    ) -> None:
        self._source, self._sink, self._host = source, sink, host
        self._finish_sink, self._cut = finish, cut
        self._lock = threading.Lock()
        self._processes: dict[str, AgentProcess] = {}
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answered = threading.Condition()
        self.ready: Ready | None = None
        self.heard = time.monotonic()
        self.failure = ""
        self.ended = threading.Event()
        # A queue and a thread: a link that is down must not hold up whoever has something to say over it.
        for name, work in (("listens to", self._read), ("speaks to", self._write)):
            threading.Thread(target=work, name=f"{name} {host}", daemon=True).start()

    def launch(self, process: AgentProcess, request: Launch) -> Launched:
        """Let the agent start a process; returns how it did.

        Raises:
            BackendError: it cannot be started, or the agent is gone or does not answer.
        """
        with self._lock:
            self._processes[process.name] = process
        if self.ended.is_set():
            process.host_is_gone()
        self._say(request)
        deadline = time.monotonic() + _STARTING
        with self._answered:
            while process.launched is None and not process.refused and not self.ended.is_set():
                if not self._answered.wait(max(0.0, deadline - time.monotonic())):
                    break
        if process.launched is None:
            why = process.refused or self.failure or f"no answer of its agent within {_STARTING:g} s"
            if not process.refused:
                self.forget()
            raise BackendError(f"process {process.name} on {self._host}", why)
        return process.launched

    def tell(self, request: Send | Signal) -> None:
        """Pass something on to a process; nothing happens if the agent is gone."""
        self._say(request)

    def drop(self) -> None:
        """End the conversation from this side: the agent ends all that it runs. Without effect if it is over."""
        self._outgoing.put(None)

    def forget(self) -> None:
        """Take the host for gone, though no end of the conversation was heard. Returns once that is known to all."""
        self.failure = self.failure or f"{self._host} was given up"
        self._outgoing.put(None)
        self._cut()
        self.ended.wait()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _say(self, message: protocol.Request) -> None:
        self._outgoing.put(protocol.encode(message))

    def _write(self) -> None:
        with suppress(OSError, ValueError):
            while (data := self._outgoing.get()) is not None:
                self._sink.write(data)
                self._sink.flush()
        with suppress(OSError, ValueError):
            self._finish_sink()

    def _read(self) -> None:
        why = f"the agent of {self._host} has ended"
        try:
            while line := self._source.readline(protocol.LINE_LIMIT + 1):
                self.heard = time.monotonic()
                if not line.endswith(b"\n"):
                    break
                self._take(protocol.report(line))
        except (OSError, ValueError) as error:
            why = f"the connection to {self._host} failed: {error}"
        except MalformedError as error:
            why = str(error)
        self._outgoing.put(None)
        self._cut()  # an agent that is not understood any more has to end, too
        self._finish(why)
        with suppress(OSError):
            self._source.close()

    def _take(self, message: protocol.Report) -> None:
        match message:
            case Ready():
                self.ready = message
                return
            case Heartbeat():
                return
        with self._lock:
            process = self._processes.get(message.worker)
        if process is None:
            raise MalformedError(f"agent of {self._host}", f"speaks of {message.worker:.80}, which nobody started")
        process.take(message)
        with self._answered:
            self._answered.notify_all()

    def _finish(self, why: str) -> None:
        self.failure = self.failure or why
        self.ended.set()
        with self._lock:
            processes = tuple(self._processes.values())
        for process in processes:
            process.host_is_gone()
        with self._answered:
            self._answered.notify_all()


class Machine(Protocol):
    """What is known of a host otherwise than from its agent."""

    name: str

    def dead(self) -> bool:
        """Whether it is known that nothing runs there any more, whatever its agent says or does not say."""

    def swept(self, pid: int) -> bool:
        """Once the agent is gone: make sure that a process group is, too; whether that is known to be so."""


class AgentProcess:
    """A process that an agent runs, with the methods of :class:`trainer.workers.hosts.Process`.

    Args:
        connection: to the agent.
        machine: the agent's host.
        name: of the process.
        stderr_path: where its error output can be read here.
    """

    def __init__(self, connection: Connection, machine: Machine, name: str, stderr_path: Path) -> None:
        self.name, self.stderr_path = name, stderr_path
        self.events, self._theirs = os.pipe()
        self.pid = 0
        self.launched: Launched | None = None
        self.refused = ""
        self._connection, self._machine = connection, machine
        self._status: int | None = None
        self._gone = False
        self._words = ""
        self._changed = threading.Condition()

    @property
    def host(self) -> Machine:
        """Where it runs."""
        return self._machine

    @property
    def forked(self) -> bool:
        """Whether it is a copy of its host's agent."""
        return self.launched is not None and self.launched.forked

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, stderr: str, *, fork: bool
    ) -> None:
        """Let the agent start it. Arguments as in :class:`trainer.hosts.protocol.Launch`; BackendError if it fails."""
        pairs = tuple(sorted(environment.items()))
        try:
            request = Launch(self.name, tuple(arguments), pairs, folder, stderr, fork)
            self.pid = self._connection.launch(self, request).pid
        except BaseException:
            os.close(self.events)
            raise

    def send(self, line: bytes) -> None:
        """Give it one line on its stdin; a process that has ended gets nothing."""
        self._connection.tell(Send(self.name, protocol.as_text(line)))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its whole process group; none is left, nothing happens."""
        self._connection.tell(Signal(self.name, int(number)))

    def poll(self) -> int | None:
        """Its exit status (negative: the signal that ended it), or None while it runs. What ends with its host is
        ended by SIGKILL."""
        return self._status

    def end(self, patience: float = 10.0) -> int:
        """Make sure that the whole process group is gone; returns the exit status.

        Raises:
            BackendError: something of it is still there after ``patience`` seconds, or nobody can tell.
        """
        deadline = time.monotonic() + patience
        self.signal(signal.SIGKILL)
        while self.present():
            if self._machine.dead() and not self._connection.ended.is_set():
                self._connection.forget()
            elif time.monotonic() >= deadline:
                what = f"process group {self.pid} of {self.name} on {self._machine.name}"
                told = f"; {self._connection.failure}" if self._connection.failure else ""
                raise BackendError(what, f"not known to be gone {patience:g} s after SIGKILL{told}")
            else:
                with self._changed:
                    self._changed.wait(0.01)
        while self._status is None:
            time.sleep(0.001)  # its last report, or that of its host's end, is on its way
        return self._status

    def present(self) -> bool:
        """Whether any process of its group may exist."""
        if self._gone:
            return False
        return not (self._connection.ended.is_set() and (self._machine.dead() or self._machine.swept(self.pid)))

    def last_words(self) -> str:
        """The last line of its error output that says something."""
        return self._words

    def take(self, message: Launched | Refused | Line | Exited | Gone) -> None:
        """What the agent says about it. For the connection."""
        match message:
            case Launched():
                self.launched = message
            case Refused(why=why):
                self.refused = why
                self._end_events()
            case Line(line=line):
                self._pass_on(protocol.as_bytes(line))
            case Exited(status=status, words=words):
                self._words = words
                self._over(status)
            case Gone():
                self._gone = True
        with self._changed:
            self._changed.notify_all()

    def host_is_gone(self) -> None:
        """Its agent is gone, and it with it. For the connection."""
        self._over(-int(signal.SIGKILL))
        with self._changed:
            self._changed.notify_all()

    def _over(self, status: int) -> None:
        with self._changed:
            if self._status is not None:
                return
            self._status = status
            self._end_events()

    def _pass_on(self, data: bytes) -> None:
        view = memoryview(data)
        with suppress(BrokenPipeError):  # nobody listens to it any more
            while view and self._theirs >= 0:
                view = view[os.write(self._theirs, view) :]

    def _end_events(self) -> None:
        theirs, self._theirs = self._theirs, -1
        if theirs >= 0:
            os.close(theirs)
