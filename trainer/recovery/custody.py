"""Who is in charge of a run's folder: one controller at a time, and nobody's workers but its own.

Both are locks of the kernel, which end with their holders however those end. The second one is held by every process
that is started for a host, through a descriptor that it inherits: who gets it knows that nothing of an earlier
controller is left, without a number of a process that may be somebody else's by now.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from ckptstore.errors import BackendError, ConflictError
from trainer.errors import of_system

CONTROLLER, WORKERS = "controller.lock", "workers.lock"

_PATIENCE = 30.0  # seconds
_POLL = 0.005  # seconds


class Custody:
    """Charge of the folder ``out`` from ``with`` on until its end.

    Raises:
        ConflictError: another controller has it.
        BackendError: workers of an earlier controller are there and stay, or the folder cannot be used.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.waited_ms = 0
        self._controller = self._workers = -1

    @property
    def inherited(self) -> tuple[int, ...]:
        """What every process of a host has to inherit."""
        return (self._workers,)

    def __enter__(self) -> Custody:
        try:
            self._controller = os.open(self.out / CONTROLLER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._workers = os.open(self.out / WORKERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._close()
            raise of_system(error, f"folder {self.out}") from error
        try:
            if not _taken(self._controller):
                raise ConflictError(f"run in {self.out}", "another controller is in charge of it", "let it end first")
            began = time.monotonic()
            while not _taken(self._workers):
                if time.monotonic() > began + _PATIENCE:
                    why = f"workers of an earlier controller are still there after {_PATIENCE:g} s"
                    hint = f"the last line with launched in {self.out / 'journal.jsonl'} has their numbers; end them"
                    raise BackendError(f"run in {self.out}", why, hint)
                time.sleep(_POLL)
            self.waited_ms = round(1000 * (time.monotonic() - began))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for descriptor in (self._workers, self._controller):
            if descriptor >= 0:
                os.close(descriptor)
        self._controller = self._workers = -1


def _taken(descriptor: int) -> bool:
    """Whether the lock of an open file is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
