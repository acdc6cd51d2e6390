"""Work in the background: jobs one after the other, in a thread that begins with the first and ends with the last."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextvars import Context
from threading import Condition, Thread

from ckptstore.backends import deadline

Job = Callable[[], None]
"""Raises nothing: what goes wrong is kept by whoever asked for it."""

_LOOK = 0.2  # seconds between looks at whether who waits is out of time


class Background:
    """Does jobs in their order. Nothing is started before there is one. Where no thread can be had, who asks for a job
    does it.

    A deadline of the work that asks for a job is not the job's. A child made by fork has no part in its parent's jobs.
    """

    def __init__(self, name: str) -> None:
        """``name`` is that of the thread."""
        self._name = name
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._changed = Condition()
        self._jobs: deque[tuple[Job, deadline.Scope]] = deque()
        self._thread: Thread | None = None
        self._scope = Context().run(deadline.scope)  # an empty context: a part of nobody's work

    def do(self, job: Job) -> None:
        """Do ``job`` after those that wait already. It is told to give up by way of the deadlines of its calls."""
        self._leave_parent()
        with self._changed:
            self._jobs.append((job, self._scope))
            if self._thread is not None:
                return
            self._thread = Thread(target=Context().run, args=(self._work,), name=self._name)
            try:
                self._thread.start()
                return
            except RuntimeError:  # no thread can be had: a limit, or the interpreter is ending
                pass
        Context().run(self._work)

    @property
    def unfinished(self) -> int:
        """Jobs that wait or are under way."""
        self._leave_parent()
        with self._changed:
            return len(self._jobs)

    def wait(self, most: int = 0) -> bool:
        """Wait until no more than ``most`` jobs are unfinished; False if the caller's own time is over before."""
        self._leave_parent()
        with self._changed:
            while len(self._jobs) > most:
                if deadline.remaining() == 0.0:
                    return False
                self._changed.wait(_LOOK)
        return True

    def give_up(self) -> None:
        """Tell the job under way, and those that wait, to end as soon as they can. Jobs that come later are done."""
        self._leave_parent()
        with self._changed:
            self._scope.give_up()
            self._scope = Context().run(deadline.scope)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                job, scope = self._jobs[0]
            scope.context().run(job)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _leave_parent(self) -> None:
        if os.getpid() != self._process:
            self._begin()
