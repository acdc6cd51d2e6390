"""A deadline for a server's answers: libpq waits for as long as the server's machine acknowledges bytes, which a server
that hangs, or a pooler that has no connection to give, leaves to its system."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

ANSWER_SECONDS = 30.0
"""How long to wait for the end of one statement."""


class Deadline:
    """Cuts a connection, so that who waits for an answer gets an error, unless it is put off or lifted in time.

    It is in force from the beginning, and ends with the connection that it cut.
    """

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: of the connection's socket."""
        self.passed = False
        self._socket = socket.socket(fileno=os.dup(descriptor))  # of its own: numbers are used again
        self._end: float | None = time.monotonic() + ANSWER_SECONDS
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="ckptstore catalogue deadline", daemon=True)
        self._thread.start()

    def put_off(self) -> None:
        """Count from now."""
        self._set(time.monotonic() + ANSWER_SECONDS)

    def lift(self) -> None:
        """Nobody waits."""
        self._set(None)

    def close(self) -> None:
        """End it; the connection is left as it is."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _set(self, end: float | None) -> None:
        with self._changed:
            self._end = end
            self._changed.notify()

    def _watch(self) -> None:
        with self._socket, self._changed:
            while not self._closed:
                left = None if self._end is None else self._end - time.monotonic()
                if left is not None and left <= 0:
                    self.passed = True
                    with suppress(OSError):  # it was closed at the other end
                        self._socket.shutdown(socket.SHUT_RDWR)
                    return
                self._changed.wait(left)
