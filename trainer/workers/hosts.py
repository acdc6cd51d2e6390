"""Hosts: folders with a local store and staged files, and the processes that run on them.

A plain host shares its machine with the others: it is a folder and some process groups, and losing it means SIGKILL of
those. What other hosts there are, and what isolates them, is in trainer/hosts.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptstore.errors import BackendError, RefusedError

STORE = "store"
LOOPBACK = "127.0.0.1"
_TAIL = 300  # characters


@dataclass(frozen=True, slots=True)
class Cleared:
    """Receipt for a folder that was removed: files and bytes that were in it, and whether it is really gone."""

    name: str
    path: str
    files: int
    bytes: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Shut:
    """Receipt for the end of a host: whether its agent and all its processes, its namespaces and its link are gone.

    ``agent_pid`` is 0 where there was no agent, ``namespaces`` are the kernel's names of those that it had, ``link`` is
    empty where it had none of its own.
    """

    host: str
    agent_pid: int
    namespaces: tuple[str, ...]
    link: str
    processes_gone: bool
    namespaces_gone: bool
    link_gone: bool

    @property
    def gone(self) -> bool:
        """Whether nothing of it is left."""
        return self.processes_gone and self.namespaces_gone and self.link_gone


@dataclass(frozen=True, slots=True)
class View:
    """What a host saw when it was made, from inside: its address, its namespaces by kind as the kernel names them, what
    its folder held, and what it could see of the run's folder beside that."""

    address: str
    namespaces: Mapping[str, str]
    listing: tuple[str, ...]
    visible: tuple[str, ...]


class Named(Protocol):
    """Where a process runs, by its name."""

    name: str


class Running(Protocol):
    """A process of a host, however it was started; :class:`Process` says what the methods do."""

    name: str
    pid: int
    events: int
    stderr_path: Path

    @property
    def forked(self) -> bool: ...

    @property
    def host(self) -> Named: ...

    def send(self, line: bytes) -> None: ...

    def signal(self, number: signal.Signals) -> None: ...

    def poll(self) -> int | None: ...

    def end(self, patience: float = 10.0) -> int: ...

    def present(self) -> bool: ...

    def last_words(self) -> str: ...


class Host:
    """A folder below ``area`` that stands for a machine.

    ``directory`` is where the controller finds its files and ``home`` where its own processes do; ``address`` is how
    other hosts reach it, through its network interface ``interface`` (None: not known).

    Args:
        area: folder of the whole run.
        name: of the host; a new folder of that name is made.
        existing: the folder was made by an earlier controller.
        inherited: descriptors that all processes of the host hold open as long as they live.

    Raises:
        RefusedError: the folder exists already.
    """

    def __init__(self, area: Path, name: str, *, existing: bool = False, inherited: tuple[int, ...] = ()) -> None:
        self.area, self.name, self.inherited = area, name, inherited
        self.directory = area / "hosts" / name
        self.address = LOOPBACK
        self.interface = next((one for _, one in socket.if_nameindex() if one in ("lo", "lo0")), None)
        self.view: View | None = None
        self._processes: list[Process] = []
        if existing:
            return
        try:
            self.directory.mkdir(parents=True)
        except FileExistsError:
            raise RefusedError(f"host {name}", f"{self.directory} exists already", "use a new folder") from None

    @property
    def home(self) -> Path:
        """The path of the host's folder as its own processes see it."""
        return self.directory

    @property
    def run_folder(self) -> Path:
        """The path of the run's folder as the host's processes see it."""
        return self.area

    @property
    def store(self) -> Path:
        """Path of the host's local store."""
        return self.directory / STORE

    def listing(self) -> list[str]:
        """Everything in the host's folder now, sorted; nothing for a host that was just made."""
        return sorted(path.relative_to(self.directory).as_posix() for path in self.directory.rglob("*"))

    def begin(self, environment: Mapping[str, str]) -> None:
        """Let the host be ready to start processes, once its files are staged. Nothing to do for a plain one.

        Args:
            environment: variables of its agent, which the processes have to agree with that are copies of it.
        """

    def launch(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        *,
        fork: bool = False,
    ) -> Running:
        """Start a process.

        Args:
            name: of the process, new on this host; its error output goes to ``logs/<name>.stderr`` there.
            argv: arguments after the interpreter; ``{pipe}`` in one stands for the descriptor of its pipe for events.
            environment: all of its variables.
            folder: its working directory (default: the host's).
            fork: it may be a copy of the host's agent, if there is one.

        Raises:
            BackendError: it cannot be started.
        """
        process = Process(self, name, list(argv), environment, folder)
        self._processes.append(process)
        return process

    def publish(self) -> None:
        """Bring what was put into ``directory`` to the host, where that is somewhere else."""

    def collect(self) -> None:
        """Bring what processes have written on the host to ``directory``, where that is somewhere else."""

    def remove(self, folder: str) -> None:
        """Remove a folder of the host and all in it."""
        shutil.rmtree(self.directory / folder)

    def lose(self) -> None:
        """Lose the host: SIGKILL of all that runs there."""
        for process in self._processes:
            process.signal(signal.SIGKILL)

    def cut(self) -> None:
        """Take the host off the network. RefusedError where it has none of its own."""
        raise RefusedError(f"host {self.name}", "it has no link that could be cut", "use hosts in namespaces")

    def shut(self) -> Shut:
        """End all that runs there and everything that the host is but for its folder; returns the receipt."""
        for process in self._processes:
            process.end()
        gone = not any(process.present() for process in self._processes)
        return Shut(self.name, 0, (), "", gone, True, True)

    def take_away(self) -> Path:
        """Rename the folder of a lost host, so that no path leads to it any more; returns where it is kept."""
        lost = self.area / "lost" / self.name
        lost.parent.mkdir(exist_ok=True)
        self.directory.rename(lost)
        self.directory = lost
        return lost

    def clear(self) -> Cleared:
        """Remove the folder and all in it."""
        return clear(self.name, self.directory)


def clear(name: str, directory: Path) -> Cleared:
    """Remove a folder and all in it; returns the receipt."""
    files = [path for path in directory.rglob("*") if path.is_file() or path.is_symlink()]
    size = sum(path.lstat().st_size for path in files)
    shutil.rmtree(directory)
    return Cleared(name, str(directory), len(files), size, not os.path.lexists(directory))


class Process:
    """A process in a group of its own, with a pipe for orders (its stdin) and one for its events.

    Args:
        host: where it runs.
        name: of the process; its error output goes to ``logs/<name>.stderr`` on the host.
        argv: arguments after the interpreter; ``{pipe}`` in one stands for the descriptor of the pipe for events.
        environment: all of its variables.
        folder: its working directory (default: the host's).

    Raises:
        BackendError: it cannot be started.
    """

    def __init__(
        self, host: Host, name: str, argv: list[str], environment: Mapping[str, str], folder: Path | None = None
    ) -> None:
        self.host, self.name = host, name
        self.stderr_path = host.directory / "logs" / f"{name}.stderr"
        self.stderr_path.parent.mkdir(exist_ok=True)
        self.events, theirs = os.pipe()
        try:
            with self.stderr_path.open("wb") as stderr:
                self._popen = subprocess.Popen(
                    [sys.executable, *(argument.replace("{pipe}", str(theirs)) for argument in argv)],
                    cwd=folder or host.directory,
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=(theirs, *host.inherited),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self.events)
            raise BackendError(f"worker {name} on {host.name}", f"{error.strerror}: {sys.executable}") from None
        finally:
            os.close(theirs)
        self.pid = self._popen.pid
        self.forked = False

    def send(self, line: bytes) -> None:
        """Give it one line on its stdin; a process that has ended gets nothing."""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.write(line)
            self._popen.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its whole process group; none is left, nothing happens."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def poll(self) -> int | None:
        """Its exit status (negative: the signal that ended it), or None while it runs."""
        return self._popen.poll()

    def end(self, patience: float = 10.0) -> int:
        """Make sure that the whole process group is gone; returns the exit status.

        Raises:
            BackendError: something of it is still there after ``patience`` seconds.
        """
        deadline = time.monotonic() + patience
        self.signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=patience)
        # Descendants that were killed stay in the group until init has waited for them.
        while self.present() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.present() or self._popen.returncode is None:
            raise BackendError(f"process group {self.pid} of {self.name}", f"not gone {patience:g} s after SIGKILL")
        if self._popen.stdin is not None:
            with suppress(BrokenPipeError):
                self._popen.stdin.close()
        return self._popen.returncode

    def present(self) -> bool:
        """Whether any process of its group exists."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # macOS: only what is left of dead ones
            return False
        return True

    def last_words(self) -> str:
        """The last line of its error output that says something."""
        with suppress(OSError):
            lines = self.stderr_path.read_text(errors="replace").splitlines()
            return next((line.strip()[:_TAIL] for line in reversed(lines) if line.strip()), "")
        return ""
