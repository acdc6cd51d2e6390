"""The controller's own record: what it did and when, as events in a file and as lines for people."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trainer.workers.events import Emitter, utc_now

_BAR = 40  # columns


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time: seconds since the run began, and whether it ended as it should."""

    name: str
    began: float
    ended: float
    ok: bool = True


class Journal:
    """Events to ``path``, lines to ``stream``; a line that is overwritten in place only where that is a terminal."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.began, self.began_at = time.monotonic(), utc_now()
        self.spans: list[Span] = []
        self._emitter = Emitter(path)
        self.stream = stream
        self._live = stream.isatty()
        self._open_line = False

    def seconds(self, at: float | None = None) -> float:
        """Seconds since the run began, now or at a time of the monotonic clock."""
        return (time.monotonic() if at is None else at) - self.began

    def note(self, name: str, text: str = "", /, **fields: Any) -> None:
        """Record an event; with ``text``, say so too."""
        self._emitter.emit(name, **fields)
        if text:
            self.say(text)

    def say(self, text: str = "") -> None:
        """A line for people."""
        self._end_line()
        print(f"[{self.seconds():6.1f} s] {text}" if text else "", file=self.stream, flush=True)

    def progress(self, text: str, *, keep: bool) -> None:
        """A line that the next one replaces on a terminal; elsewhere it is only shown if ``keep``."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K[{self.seconds():6.1f} s] {text}"[: width + 4], end="", file=self.stream, flush=True)
            self._open_line = True
        elif keep:
            self.say(text)

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        """Record when the block begins and ends, and how."""
        self.note("phase", text, phase=name)
        began = self.seconds()
        try:
            yield
        except BaseException:
            with suppress(OSError):  # a full disk must not hide why the phase failed
                self._end_phase(name, began, ok=False)
            raise
        self._end_phase(name, began, ok=True)

    def timeline(self) -> list[str]:
        """The phases as bars over the whole time, for people."""
        total = max((span.ended for span in self.spans), default=0.0) or 1.0
        width = max((len(span.name) for span in self.spans), default=0)
        lines = []
        for span in self.spans:
            left, right = (round(_BAR * at / total) for at in (span.began, span.ended))
            bar = " " * left + "█" * max(1, right - left)
            mark = "" if span.ok else "  failed"
            lines.append(f"{span.name:<{width}} {bar:<{_BAR + 1}} {span.ended - span.began:6.1f} s{mark}")
        return lines

    def close(self) -> None:
        """Close the file."""
        self._end_line()
        self._emitter.close()

    def _end_phase(self, name: str, began: float, *, ok: bool) -> None:
        self.spans.append(Span(name, began, self.seconds(), ok))
        self.note("phase_ended", phase=name, seconds=self.spans[-1].ended - began, ok=ok)

    def _end_line(self) -> None:
        if self._open_line:
            print(file=self.stream, flush=True)
            self._open_line = False
