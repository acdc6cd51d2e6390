"""The agent of a host: starts its workers, carries what they say, and ends them all when its controller is gone.

It imports torch once and starts each worker as a copy of itself, so that a group is there at once. One thread, one
loop: a copy of a process with several threads has locks that nobody opens. Every agent speaks JSON lines over its
stdin and stdout (trainer/hosts/protocol.py), whatever carries them to the controller: pipes, a socket, ssh.
"""

from __future__ import annotations

import importlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ckptstore.errors import MalformedError
from trainer.hosts import protocol
from trainer.hosts.protocol import Exited, Gone, Heartbeat, Launch, Launched, Line, Ready, Refused, Send, Signal

TRAINER = ("-P", "-m", "trainer")
"""What the arguments of a process begin with that can be a copy of the agent."""

_PRELOADED = ("numpy", "torch", "torch.distributed", "trainer.compute.transport", "trainer.workers.session")

# Beginnings of variables that libraries read when they are imported: a copy is of no use where one of them differs.
READ_AT_IMPORT = ("ATEN_", "CUBLAS_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONPATH")

_PIECE = 2**16  # bytes
_TAIL = 300  # characters
_SOON = 0.01  # seconds between two looks for what is left of a process group


@dataclass(slots=True)
class _Process:
    name: str
    pid: int
    events: int
    orders: int
    stderr: Path
    popen: subprocess.Popen[bytes] | None
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    status: int | None = None
    open: bool = True


class Agent:
    """The loop. ``source`` and ``sink`` are descriptors; ``heartbeat`` is in seconds; ``preload`` imports torch."""

    def __init__(self, source: int, sink: int, *, heartbeat: float, preload: bool) -> None:
        self._source, self._sink, self._period, self._preload = source, sink, heartbeat, preload
        self._incoming = bytearray()
        self._processes: dict[str, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._beats = 0
        self._next_beat = 0.0

    def run(self) -> None:
        """Serve until the controller is gone. No process of the agent is left then."""
        began = time.monotonic()
        for name in _PRELOADED if self._preload else ():
            importlib.import_module(name)
        # Only to be woken: a child's end is found by waiting for it.
        signal.signal(signal.SIGCHLD, _ignored)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._selector.register(self._source, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            self._say(Ready(os.getpid(), _threads(), time.monotonic() - began))
            while self._turn():
                pass
        except BrokenPipeError:
            pass  # nobody is there any more
        finally:
            self._end_all()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """One round; False once the controller has closed its end."""
        going = True
        for key, _ in self._selector.select(self._patience()):
            if key.fd == self._source:
                going = self._take_in()
            elif key.fd == self._woken:
                with suppress(BlockingIOError):
                    os.read(self._woken, _PIECE)
            elif isinstance(process := key.data, _Process):
                if key.fd == process.events:
                    self._carry(process)
                else:
                    self._feed(process)
        self._reap()
        if time.monotonic() >= self._next_beat:
            self._beats += 1
            self._say(Heartbeat(self._beats))
            self._next_beat = time.monotonic() + self._period
        return going

    def _patience(self) -> float:
        left = self._next_beat - time.monotonic()
        lingering = any(process.status is not None for process in self._processes.values())
        return max(0.0, min(left, _SOON) if lingering else left)

    def _take_in(self) -> bool:
        data = os.read(self._source, _PIECE)
        if not data:
            return False
        self._incoming += data
        while (end := self._incoming.find(b"\n")) >= 0:
            line = bytes(self._incoming[: end + 1])
            del self._incoming[: end + 1]
            self._obey(protocol.request(line))
        if len(self._incoming) > protocol.LINE_LIMIT:
            raise MalformedError("agent's order", f"a line of more than {protocol.LINE_LIMIT} bytes")
        return True

    def _obey(self, request: protocol.Request) -> None:
        match request:
            case Launch(worker=name) if name in self._processes:
                self._say(Refused(name, "there is a process of that name"))
            case Launch(worker=name):
                try:
                    self._launch(request)
                except OSError as error:
                    self._say(Refused(name, f"{error.strerror}: {error.filename or sys.executable}"))
            case Send(worker=name, line=line) if process := self._processes.get(name):
                if process.orders >= 0:
                    process.unsent += protocol.as_bytes(line)
                    self._feed(process)
            case Signal(worker=name, number=number) if process := self._processes.get(name):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _launch(self, request: Launch) -> None:
        stderr = Path(request.stderr)
        stderr.parent.mkdir(parents=True, exist_ok=True)
        why = self._why_not_forked(request)
        events, theirs = os.pipe()
        orders_out, orders = os.pipe()
        output = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            popen = self._start(request, theirs, orders_out, output) if why else None
            pid = self._fork(request, theirs, orders_out, output) if popen is None else popen.pid
        except OSError:
            os.close(events)
            os.close(orders)
            raise
        finally:
            for descriptor in (theirs, orders_out, output):
                os.close(descriptor)
        os.set_blocking(events, False)
        os.set_blocking(orders, False)
        process = self._processes[request.worker] = _Process(request.worker, pid, events, orders, stderr, popen)
        self._selector.register(events, selectors.EVENT_READ, process)
        self._say(Launched(request.worker, pid, not why, why))

    def _why_not_forked(self, request: Launch) -> str:
        """Empty if a copy of this interpreter can be the process, else why it cannot."""
        if not request.fork:
            return "asked for"
        if not self._preload:
            return "the agent has not imported torch"
        if request.arguments[: len(TRAINER)] != TRAINER:
            return "it is another program"
        if (threads := _threads()) != 1:
            return f"the agent has {threads} threads"
        wanted = {name: value for name, value in request.environment if name.startswith(READ_AT_IMPORT)}
        present = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT)}
        differing = sorted(name for name in {*wanted, *present} if wanted.get(name) != present.get(name))
        return f"the agent was started with other {', '.join(differing)}" if differing else ""

    def _start(self, request: Launch, events: int, orders: int, output: int) -> subprocess.Popen[bytes]:
        """A new interpreter."""
        return subprocess.Popen(
            [sys.executable, *(argument.replace("{pipe}", str(events)) for argument in request.arguments)],
            cwd=request.folder,
            env=dict(request.environment),
            stdin=orders,
            stdout=output,
            stderr=output,
            pass_fds=(events,),
            start_new_session=True,
        )

    def _fork(self, request: Launch, events: int, orders: int, output: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(request, events, orders, output, parent)
            finally:
                os._exit(70)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # so that its group exists before anybody signals it
        return pid

    def _become(self, request: Launch, events: int, orders: int, output: int, parent: int) -> NoReturn:
        """In the copy: forget the agent, and run the trainer's command."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(PermissionError):
            os.setsid()
        for descriptor, place in ((orders, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, place)
        pipe = os.dup2(events, 3, inheritable=True) if events != 3 else events
        os.closerange(4, _highest_descriptor() + 1)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        arguments = [argument.replace("{pipe}", str(pipe)) for argument in request.arguments[len(TRAINER) :]]
        sys.argv = [sys.argv[0], *arguments]
        if os.getppid() != parent:
            os._exit(0)  # it is gone already, and nobody waits for this copy
        from trainer import commands

        code = commands.main(arguments)
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def _carry(self, process: _Process) -> bool:
        """Pass on what a process has said, line by line; False if there was nothing now."""
        try:
            data = os.read(process.events, _PIECE)
        except BlockingIOError:
            return False
        *lines, rest = (process.unread + data).split(b"\n") if b"\n" in data else [process.unread + data]
        for line in lines:
            self._say(Line(process.name, protocol.as_text(bytes(line) + b"\n")))
        process.unread = rest
        if not data:
            self._hang_up(process)
        return bool(data)

    def _hang_up(self, process: _Process) -> None:
        if process.unread:
            self._say(Line(process.name, protocol.as_text(bytes(process.unread))))
        self._selector.unregister(process.events)
        os.close(process.events)
        process.open = False

    def _feed(self, process: _Process) -> None:
        """Give a process what it was sent, as far as it takes it now."""
        watched = process.orders in self._selector.get_map()
        try:
            del process.unsent[: os.write(process.orders, process.unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            process.unsent.clear()
        if process.unsent and not watched:
            self._selector.register(process.orders, selectors.EVENT_WRITE, process)
        elif not process.unsent and watched:
            self._selector.unregister(process.orders)

    def _reap(self) -> None:
        by_pid = {process.pid: process for process in self._processes.values()}
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)  # also what init inherits where the agent is one
                if pid == 0:
                    break
                if (process := by_pid.get(pid)) is not None and process.status is None:
                    process.status = os.waitstatus_to_exitcode(status)
                    if process.popen is not None:
                        process.popen.returncode = process.status  # so that nobody else waits for it
                    self._ended(process)
        for process in [one for one in self._processes.values() if one.status is not None]:
            if not _group_exists(process.pid):
                del self._processes[process.name]
                self._say(Gone(process.name))

    def _ended(self, process: _Process) -> None:
        while process.open and self._carry(process):  # what it said before it ended
            pass
        if process.open:  # a descendant has the other end
            self._hang_up(process)
        process.unsent.clear()
        if process.orders in self._selector.get_map():
            self._selector.unregister(process.orders)
        os.close(process.orders)
        process.orders = -1
        assert process.status is not None
        self._say(Exited(process.name, process.status, last_words(process.stderr)))

    def _end_all(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(_group_exists(process.pid) for process in self._processes.values()):
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if time.monotonic() > deadline:
                break
            time.sleep(_SOON)

    def _say(self, message: protocol.Report) -> None:
        view = memoryview(protocol.encode(message))
        while view:
            view = view[os.write(self._sink, view) :]


def run(heartbeat: float, *, preload: bool) -> NoReturn:
    """Be the agent of this host over stdin and stdout, and end the process. Whatever prints goes to stderr."""
    sink = os.dup(1)
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        source = os.dup(0)
        os.dup2(nothing.fileno(), 0)
    Agent(source, sink, heartbeat=heartbeat, preload=preload).run()
    os._exit(0)  # nothing of it needs the interpreter's long farewell to torch


def last_words(path: Path) -> str:
    """The last line of a file that says something, at most 300 characters of it; empty where there is none."""
    with suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()
        return next((line.strip()[:_TAIL] for line in reversed(lines) if line.strip()), "")
    return ""


def _ignored(number: int, frame: FrameType | None) -> None:
    pass


def _threads() -> int:
    """Threads of this process, those of libraries among them where the system tells."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def _group_exists(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS: only what is left of dead ones
        return False
    return True


def _highest_descriptor() -> int:
    with suppress(OSError):
        return max(map(int, os.listdir("/proc/self/fd")))
    return os.sysconf("SC_OPEN_MAX")
