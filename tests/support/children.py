"""Processes of a test's own: forked, so that nothing has to be loaded again, and never waited for without an end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PATIENCE_SECONDS = 120.0
"""After so long a process that should have ended hangs. Nothing is decided by it but that the test fails."""

_LOOK_SECONDS = 0.005


class Child:
    """A process that does ``work``; what that returns, which JSON can hold, is in ``place`` afterwards."""

    def __init__(self, work: Callable[[], object], place: Path) -> None:
        self._place = place
        self.pid = os.fork()
        if self.pid == 0:
            try:
                came_to = work()
                place.with_suffix(".new").write_text(json.dumps(came_to))
                os.replace(place.with_suffix(".new"), place)
                os._exit(0)
            except BaseException as error:
                place.with_suffix(".failed").write_text(repr(error))
            finally:
                os._exit(1)

    def wait(self) -> object:
        """What the work came to, None if the process was killed."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                pytest.fail(f"{self._place.name} hangs")
            time.sleep(_LOOK_SECONDS)
        if os.WIFSIGNALED(status):
            return None
        failed = self._place.with_suffix(".failed")
        assert not failed.exists(), f"{self._place.name}: {failed.read_text()}"
        assert status == 0
        return json.loads(self._place.read_text())

    def is_stopped(self) -> bool:
        """Whether it was stopped (Linux)."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def go_on(self) -> None:
        """Let it go on if it was stopped."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a power switch would."""
        os.kill(self.pid, signal.SIGKILL)
