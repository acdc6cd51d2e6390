"""A watch over one input: it may take a second or two of the processor, and is stopped when it takes very much more.

Time of the process counts and not that of the wall, so a busy machine changes nothing. It is no measurement: what is
bounded takes a hundredth of it, and what is not bounded takes for ever.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tests.fuzz.target import TookTooLong

SECONDS = 20.0


@contextmanager
def watched() -> Iterator[None]:
    """Raise TookTooLong in the block when it has used :data:`SECONDS` of the processor. Main thread only."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TookTooLong(f"more than {SECONDS:g} s of the processor")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
