"""How long work may take: a deadline, and giving up, that reach into the threads that do it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from threading import Event

from ckptstore.errors import BackendError, UsageError


class Scope:
    """Work that ends together: at its deadline, when it is given up, or when what it is part of ends."""

    def __init__(self, seconds: float | None, outer: Scope | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._seconds = seconds
        self._outer = outer
        self._given_up = Event()

    def give_up(self) -> None:
        """Nobody waits for this work any more."""
        self._given_up.set()

    def context(self) -> Context:
        """A context for a thread that does a part of this work."""
        context = copy_context()
        context.run(_scope.set, self)
        return context

    def remaining(self) -> float | None:
        """Seconds that are left, None for any number, 0 if it is over."""
        if self._given_up.is_set():
            return 0.0
        own = None if self._end is None else max(0.0, self._end - time.monotonic())
        outer = None if self._outer is None else self._outer.remaining()
        known = [left for left in (own, outer) if left is not None]
        return min(known, default=None)

    def seconds(self) -> float | None:
        """The deadline that counts, as it was set, None if there is none."""
        outer = None if self._outer is None else self._outer.seconds()
        known = [given for given in (self._seconds, outer) if given is not None]
        return min(known, default=None)


_scope: ContextVar[Scope | None] = ContextVar("ckptstore_scope", default=None)


def scope() -> Scope:
    """A part of the present work, which can be given up alone."""
    return Scope(None, _scope.get())


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """The block has to be done within ``seconds`` (None: whenever); what it stored until then stays and is used again.

    Raises:
        BackendError: it was not, at the next object or attempt after the deadline.
        UsageError: ``seconds`` is not above 0.
    """
    if seconds is not None and not seconds > 0:
        raise UsageError("deadline", f"{seconds!r:.40} is not a number of seconds above 0", "for instance 600")
    token = _scope.set(Scope(seconds, _scope.get()))
    try:
        yield
    finally:
        _scope.reset(token)


def remaining() -> float | None:
    """Seconds that are left for the present work, None for any number, 0 if it is over."""
    present = _scope.get()
    return None if present is None else present.remaining()


def check(what: str) -> None:
    """BackendError if the present work is out of time; ``what`` it was about to do."""
    if remaining() == 0.0:
        raise out_of_time(what)


def out_of_time(what: str) -> BackendError:
    """The error of work whose time is over."""
    present = _scope.get()
    seconds = None if present is None else present.seconds()
    why = "given up" if seconds is None else f"not done within the deadline of {seconds:g} s"
    return BackendError(what, why, "run it again: what was stored is used")
