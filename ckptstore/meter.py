"""A meter: how many of the bytes that are to pass have passed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

OnProgress = Callable[[int, int], object]
"""Called with (bytes done, bytes in all)."""

B = TypeVar("B", bytes, memoryview)


class Meter:
    """Counts bytes as they pass and reports (bytes done, bytes in all); for use from one thread."""

    def __init__(self, total: int, report: OnProgress | None) -> None:
        self._total = total
        self._report = report
        self._done = 0

    def passing(self, chunks: Iterable[B]) -> Iterator[B]:
        """The same chunks."""
        for chunk in chunks:
            yield chunk
            self._done += len(chunk)
            if self._report is not None:
                self._report(self._done, self._total)
