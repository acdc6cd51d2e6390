"""What went wrong in the background and nobody was told yet: told once, at the end of the process at the latest.

A run that is closed tells everything. One that is not, because its loop ended without ``with`` or ``close``, must not
let a program that lost a copy of its checkpoints end with success: then the errors go to stderr, and the process ends
with the exit code of the first.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from threading import Lock

from ckptstore.errors import CkptStoreError

_INTERNAL = 7


class Untold:
    """Failures of one source, kept until they are taken. Safe for threads; a forked child has none of its parent's."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._failures: list[BaseException] = []
        self._lock = Lock()

    def add(self, failure: BaseException) -> None:
        """Keep a failure."""
        self._leave_parent()
        with self._lock:
            self._failures.append(failure)
            _holding[id(self)] = self

    def take(self) -> list[BaseException]:
        """All that are kept, oldest first; they count as told."""
        self._leave_parent()
        with self._lock:
            told, self._failures = self._failures, []
            _holding.pop(id(self), None)
        return told

    def _leave_parent(self) -> None:
        if os.getpid() != self._process:
            self._begin()


_holding: dict[int, Untold] = {}  # those with failures, also when nobody else knows them any more


def _tell() -> None:
    failures = [failure for source in list(_holding.values()) for failure in source.take()]
    if not failures:
        return
    for failure in failures:
        sys.stderr.write(f"ckptstore: a run was not closed, and something went wrong behind it: {failure}\n")
    first = failures[0]
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    # Nothing that is raised here would change the exit code any more.
    os._exit(first.exit_code if isinstance(first, CkptStoreError) else _INTERNAL)


atexit.register(_tell)
