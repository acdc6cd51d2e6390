"""Attempts in threads of their own: whoever waits for one can leave it alone, and nothing that hangs hangs the caller.

Threads are used again. One that hangs is not waited for, and takes no more work until what it hangs in has ended.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

_idle: deque[_Hand] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # threads stay with the parent


class _Hand:
    """A thread that does one piece of work after another."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        Thread(target=self._serve, daemon=True, name="ckptstore-request").start()

    def take(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def _serve(self) -> None:
        while True:
            self._work.get()()  # kept by no name: it holds a whole object
            _idle.append(self)


def start(work: Callable[[], object]) -> None:
    """Let a thread do ``work``, which must not raise, and return at once."""
    try:
        hand = _idle.pop()  # the one that was idle last
    except IndexError:
        hand = _Hand()
    hand.take(work)
