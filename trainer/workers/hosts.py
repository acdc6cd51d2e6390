"""Hosts: folders with a local store and staged files, and the processes that run on them.

All hosts of this kind share one machine: a host is a folder and a process group, and losing it means SIGKILL of that
group. Nothing is claimed about separate kernels, disks, networks or power.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptstore.errors import BackendError, RefusedError

STORE = "store"
_TAIL = 300  # characters


@dataclass(frozen=True, slots=True)
class Cleared:
    """Receipt for a folder that was removed: files and bytes that were in it, and whether it is really gone."""

    name: str
    path: str
    files: int
    bytes: int
    gone: bool


class Host:
    """A folder below ``area`` that stands for a machine.

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
        if existing:
            return
        try:
            self.directory.mkdir(parents=True)
        except FileExistsError:
            raise RefusedError(f"host {name}", f"{self.directory} exists already", "use a new folder") from None

    @property
    def store(self) -> Path:
        """Path of the host's local store."""
        return self.directory / STORE

    def listing(self) -> list[str]:
        """Everything in the host's folder now, sorted; nothing for a host that was just made."""
        return sorted(path.relative_to(self.directory).as_posix() for path in self.directory.rglob("*"))

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
