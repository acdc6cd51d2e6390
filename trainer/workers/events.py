"""What a process says while it runs: JSON lines on a pipe of its own, and the same lines in a file of its own."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from ckptstore.errors import MalformedError

LINE_LIMIT = 16 * 2**20  # bytes
HEARTBEAT = "heartbeat"

_AGES = 1e15  # seconds, and a float as well as an integer

_RESERVED = ("event", "at", "time")


@dataclass(frozen=True, slots=True)
class Event:
    """One line.

    ``at`` is in seconds on the machine's monotonic clock, ``time`` in UTC; ``fields`` are plain JSON values.
    """

    name: str
    at: float
    time: str
    fields: Mapping[str, Any]

    def __getitem__(self, field: str) -> Any:
        """A field. MalformedError if the event does not have it."""
        if field not in self.fields:
            raise MalformedError(f"event {self.name}", f"it has no field {field}")
        return self.fields[field]

    def encode(self) -> bytes:
        """The line, with its end."""
        body = {"event": self.name, "at": round(self.at, 6), "time": self.time, **self.fields}
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    @staticmethod
    def parse(line: bytes) -> Event:
        """The event of a line, with or without its end. MalformedError for anything else."""
        if len(line) > LINE_LIMIT:
            raise MalformedError("event", f"a line of {len(line)} bytes, the limit is {LINE_LIMIT}")
        try:
            body = json.loads(line.decode(), parse_constant=_refuse, parse_float=_finite)
            if b"\\u" in line:  # an escape can stand for half a character, which no line could be made of again
                json.dumps(body, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise MalformedError("event", f"not a line of JSON ({type(error).__name__}): {line[:80]!r}") from None
        match body:
            case {"event": str(name), "at": int() | float() as at, "time": str(when)} if -_AGES < at < _AGES:
                fields = {key: value for key, value in body.items() if key not in _RESERVED}
                return Event(name, float(at), when, MappingProxyType(fields))
        raise MalformedError("event", f"no object with event, at and time: {line[:80]!r}")


def make(name: str, fields: Mapping[str, Any]) -> Event:
    """An event of now. MalformedError if a field has a reserved name."""
    taken = sorted(set(_RESERVED) & fields.keys())
    if taken:
        raise MalformedError(f"event {name}", f"fields cannot be called {', '.join(taken)}")
    return Event(name, time.monotonic(), utc_now(), MappingProxyType(dict(fields)))


def utc_now() -> str:
    """The time in UTC as RFC 3339 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read(path: Path) -> Iterator[Event]:
    """The events of a file, in order; a last line that was cut off by the writer's end is left out.

    Raises:
        MalformedError: another line is not an event.
    """
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield Event.parse(line)


class Emitter:
    """Writes events, each line whole, from any thread.

    Args:
        path: a file that lines are appended to.
        pipe: descriptor of a pipe that gets every line too, if there is one.
    """

    def __init__(self, path: Path, pipe: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._pipe = pipe
        self._lock = threading.Lock()

    def emit(self, name: str, /, **fields: Any) -> Event:
        """Write one event and return it.

        Raises:
            BrokenPipeError: nobody reads the pipe any more.
            OSError: the file cannot be written; the pipe has the event.
        """
        with self._lock:  # taken before the clock is read, so that lines are in the order of their times
            event = make(name, fields)
            line = event.encode()
            try:
                _write(self._file, line)
            finally:  # who listens has to learn of it, above all when the disk is full
                if self._pipe is not None:
                    _write(self._pipe, line)
        return event

    def close(self) -> None:
        """Close the file; the pipe belongs to who opened it."""
        os.close(self._file)


class Heartbeat:
    """A thread that says every ``period`` seconds that its process is alive.

    ``orphaned`` is called, in the thread, when nobody reads any more.
    """

    def __init__(self, emitter: Emitter, period: float, orphaned: Callable[[], object]) -> None:
        self._emitter, self._period, self._orphaned = emitter, period, orphaned
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin at once."""
        self._thread.start()

    def stop(self) -> None:
        """End, after a beat that is on its way."""
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                self._emitter.emit(HEARTBEAT, number=number)
            except BrokenPipeError:
                self._orphaned()
                return
            except OSError:
                pass  # the file; whatever needs it will say so
            self._stop.wait(self._period)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is beyond every float")
    return number


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
