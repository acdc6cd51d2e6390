"""Patience: a request is tried again with growing random pauses, each attempt and all of them within a deadline."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import getLogger
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception

from ckptstore.backends import deadline
from ckptstore.backends.s3.attempts import start
from ckptstore.backends.s3.failures import TryAgainError, is_transient

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 20.0
_LOOK = 0.2  # seconds between looks at whether the work was given up
_SILENT = 5.0  # seconds after which the user hears why it takes so long

_chance = secrets.SystemRandom()
"""Not :mod:`random`: its state is part of what is saved, and a slow network must not change a root."""


class _Over(Exception):
    """The work that this belongs to is out of time, or nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait.

    Args:
        attempt_seconds: for one attempt, whatever it hangs in: a name server, a connection, a body that drips.
        operation_seconds: for all attempts and the pauses between them.
        clock, sleep: for tests.
    """

    attempt_seconds: float
    operation_seconds: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = field(default=time.sleep)

    def call(self, what: str, work: Callable[[], T]) -> T:
        """What ``work`` returns, tried again while its failures are transient and there is time.

        Pauses are drawn evenly from 0 to a limit that doubles from 0.1 s to 20 s, so that many clients that failed
        together do not come back together (full jitter).

        Args:
            what: names the work in errors.
            work: one attempt; may be called several times, and go on in a thread of its own after its time.

        Raises:
            BackendError: the deadline of the work that this is part of has come.
            Exception: the last failure, as it was raised.
        """
        began = self.clock()

        def own() -> float:
            return self.operation_seconds - (self.clock() - began)

        def left() -> float:
            outer = deadline.remaining()
            return own() if outer is None else min(own(), outer)

        def stop(state: RetryCallState) -> bool:
            return left() <= state.upcoming_sleep

        def before_next(state: RetryCallState) -> None:
            error = _failure(state)
            if self.clock() - began > _SILENT:
                told = "%s: %s in attempt %d; trying again for %.0f s at most"
                getLogger("ckptstore").warning(told, what, type(error).__name__, state.attempt_number, left())

        first: list[Exception] = []

        def attempt() -> T:
            if first:
                raise first.pop()
            return self._attempt(work, left())

        try:
            return attempt()  # most need nothing of what follows, which takes as long as a tenth of a request
        except _Over:
            raise deadline.out_of_time(what) from None
        except Exception as error:
            first.append(error)

        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, Exception) and is_transient(error)),
            wait=pause,
            stop=stop,
            sleep=self._pause,
            before_sleep=before_next,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except _Over:
            raise deadline.out_of_time(what) from None
        except Exception as error:
            outer = deadline.remaining()
            if outer is not None and outer <= min(own(), _LONGEST_PAUSE) and is_transient(error):
                raise deadline.out_of_time(f"{what} ({type(error).__name__})") from error
            raise

    def _attempt(self, work: Callable[[], T], left: float) -> T:
        """``work`` in a thread of its own, which is left alone when its time is over: nothing that hangs hangs us."""
        box: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

        def attempt() -> None:
            try:
                box.put((work(), None))
            except BaseException as error:
                box.put((None, error))

        context = deadline.scope().context()
        start(lambda: context.run(attempt))
        end = time.monotonic() + min(self.attempt_seconds, left)
        while True:
            try:
                result, error = box.get(timeout=max(0.001, min(_LOOK, end - time.monotonic())))
            except queue.Empty:
                if deadline.remaining() == 0.0:
                    raise _Over from None
                if time.monotonic() < end:
                    continue
                raise TryAgainError(f"no whole answer within {self.attempt_seconds:g} s") from None
            if error is not None:
                raise error
            return result  # type: ignore[return-value]

    def _pause(self, seconds: float) -> None:
        """Sleep, unless the work is given up meanwhile."""
        while seconds > 0:
            if deadline.remaining() == 0.0:
                raise _Over
            self.sleep(min(_LOOK, seconds))
            seconds -= _LOOK


def pause(state: RetryCallState) -> float:
    """Seconds to wait after an attempt: drawn evenly from 0 to a limit that doubles."""
    limit: float = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(state.attempt_number - 1, 30))
    return _chance.uniform(0, limit)


def _failure(state: RetryCallState) -> Exception:
    error = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(error, Exception)
    return error
