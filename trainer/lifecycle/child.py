"""A server process that its owner can kill, stop and start again, and that does not outlive its owner."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptstore.errors import BackendError, NotFoundError

# Runs in the place of the server until it becomes the server. The kernel then kills it when the thread that started it
# is gone, however that came about; whoever was quicker than this program is seen by the parent's number.
_LEASHED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def program(name: str, what: str, hint: str) -> Path:
    """Path of the program ``name`` beside this Python or else on PATH.

    Raises:
        NotFoundError: it is in neither; the message says ``what`` it is, and gives ``hint``.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise NotFoundError(f"program {name}", f"{what} is neither beside {sys.executable} nor on PATH", hint)
    return Path(found)


# No more than that: keys and addresses in our environment would reach a server that they are not meant for.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")


class Child:
    """One run of a program in a session of its own: Ctrl-C in the terminal reaches its owner alone.

    On Linux the kernel kills it when this process ends in any way, elsewhere it is killed when the interpreter exits.
    A process that was forked off this one has no say over it. Safe for threads.

    Args:
        command: the program's path and its arguments.
        environment: what it is to find in its environment; of ours it gets only what programs need to be found.
        folder: its working directory.
        log: file that its output is appended to.

    Raises:
        BackendError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        self._owner = os.getpid()
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        started = threading.Event()

        def keep() -> None:
            # The kernel's promise is about the thread that started the program: it stays as long as the program runs.
            try:
                with log.open("ab") as output:
                    self._process = subprocess.Popen(
                        [sys.executable, "-I", "-S", "-c", _LEASHED, str(self._owner), *command],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env={name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(environment),
                        cwd=folder,
                        start_new_session=True,
                    )
            except OSError as error:
                self._failure = error
                return
            finally:
                started.set()
            self._process.wait()

        self._keeper = threading.Thread(target=keep, name=f"keeper of {Path(command[0]).name}", daemon=True)
        self._keeper.start()
        started.wait()
        if self._failure is not None:
            raise BackendError(f"starting {command[0]}", str(self._failure)) from self._failure
        atexit.register(self.kill)

    @property
    def running(self) -> bool:
        return self._process is not None and self._keeper.is_alive() and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """What it ended with (a signal as a negative number); None while it runs."""
        return None if self._process is None else self._process.returncode

    def log_tail(self, size: int = 2000) -> str:
        """The last ``size`` bytes of the log, as text."""
        return self._log.read_bytes()[-size:].decode(errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Without effect when it is gone already."""
        self._signal(signal.SIGKILL)
        if os.getpid() == self._owner:
            self._keeper.join()
            atexit.unregister(self.kill)

    def stop(self, grace: float) -> None:
        """SIGTERM; SIGKILL after ``grace`` seconds. Returns when it is gone."""
        self._signal(signal.SIGTERM)
        if os.getpid() == self._owner:
            self._keeper.join(grace)
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if os.getpid() == self._owner and self._process is not None and self.running:
            self._process.send_signal(number)
