"""What a controller and the agent of a host say to each other: JSON lines over the agent's stdin and stdout.

A worker's own lines are carried as they are, each in a :class:`Line`; bytes that are no UTF-8 survive the way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckptstore.errors import MalformedError
from trainer.preparation import records

LINE_LIMIT = 64 * 2**20  # bytes: a worker's longest line, escaped


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a process called ``worker``.

    Args:
        worker: its name, new for each process of the agent.
        arguments: after the interpreter; ``{pipe}`` in one stands for the descriptor of its pipe for events.
        environment: all of its variables, as pairs.
        folder: its working directory.
        stderr: file that its output goes to.
        fork: take a copy of the agent, which has imported torch; otherwise a new interpreter.
    """

    worker: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    folder: str
    stderr: str
    fork: bool


@dataclass(frozen=True, slots=True)
class Send:
    """Give a process a line on its stdin."""

    worker: str
    line: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the process group of a process."""

    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The agent can start processes. ``pid`` is its own on its host; ``threads`` are those of its interpreter."""

    pid: int
    threads: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The agent is alive."""

    number: int


@dataclass(frozen=True, slots=True)
class Launched:
    """A process runs as ``pid``, also the number of its group. ``forked`` from the agent or, with ``why``, not."""

    worker: str
    pid: int
    forked: bool
    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A process could not be started."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Line:
    """A process has said this."""

    worker: str
    line: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process has ended with ``status`` (negative: by a signal), and ``words`` are the last of its error output."""

    worker: str
    status: int
    words: str


@dataclass(frozen=True, slots=True)
class Gone:
    """No process of a group is left."""

    worker: str


Request = Launch | Send | Signal
Report = Ready | Heartbeat | Launched | Refused | Line | Exited | Gone
Message = Request | Report

_REQUESTS: tuple[type[Request], ...] = (Launch, Send, Signal)
_REPORTS: tuple[type[Report], ...] = (Ready, Heartbeat, Launched, Refused, Line, Exited, Gone)
_KINDS: Mapping[str, type[Message]] = MappingProxyType({kind.__name__.lower(): kind for kind in _REQUESTS + _REPORTS})


def encode(message: Message) -> bytes:
    """The message as a line, with its end."""
    body = {"say": type(message).__name__.lower(), "with": records.to_json(message)}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def request(line: bytes) -> Request:
    """The request of a line. MalformedError if it is none."""
    message = _parse(line)
    if not isinstance(message, Request):
        raise MalformedError("agent's order", f"{type(message).__name__.lower()} is for the other direction")
    return message


def report(line: bytes) -> Report:
    """The report of a line. MalformedError if it is none."""
    message = _parse(line)
    if not isinstance(message, Report):
        raise MalformedError("agent's report", f"{type(message).__name__.lower()} is for the other direction")
    return message


def as_text(data: bytes) -> str:
    """Bytes as a text that :func:`as_bytes` makes the same bytes of."""
    return data.decode("utf-8", "surrogateescape")


def as_bytes(text: str) -> bytes:
    """The bytes of :func:`as_text`. MalformedError for a text that is none of its."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise MalformedError("agent's line", f"half a character in {text[:40]!r}") from None


def _parse(line: bytes) -> Message:
    if len(line) > LINE_LIMIT:
        raise MalformedError("agent's line", f"{len(line)} bytes, the limit is {LINE_LIMIT}")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        raise MalformedError("agent's line", f"not a line of JSON: {line[:80]!r}") from None
    match body:
        case {"say": str(name), "with": dict(fields)} if name in _KINDS and len(body) == 2:
            return records.from_json(_KINDS[name], fields, f"agent's line {name}")
    raise MalformedError("agent's line", f"there is none like {line[:80]!r}")
