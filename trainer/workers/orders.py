"""What a controller tells the workers of a group: JSON lines, the same to all, one after the other is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckptstore.errors import MalformedError
from ckptstore.format.digest import Digest
from trainer.preparation import records

LINE_LIMIT = 2**16  # bytes


@dataclass(frozen=True, slots=True)
class Join:
    """Where the group's first worker listens; only for launchers that did not know it beforehand."""

    port: int


@dataclass(frozen=True, slots=True)
class Start:
    """Load the starting weights, make a fresh optimizer and seed the generators."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Load the worker's shard of the checkpoint ``root`` from the store at the path ``store``, verified.

    A checkpoint that was made with another numerical binding is refused, unless ``drift`` allows for it.
    """

    root: Digest
    store: str
    drift: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """Recompute the live state and compare it with what was restored."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Where a drill stops a worker: after the forward of ``microbatch`` of ``update`` on ``shard``, for ``seconds``."""

    update: int
    microbatch: int
    shard: int
    seconds: int


@dataclass(frozen=True, slots=True)
class Train:
    """Make the updates ``first`` to ``last``, both included."""

    first: int
    last: int
    hold: Hold | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Save the worker's shard after ``step`` updates, within an attempt, to the store at the path ``store``.

    ``files`` is the tree that belongs to the checkpoint: the fingerprints of its updates.
    """

    attempt: str
    step: int
    store: str
    files: Digest | None = None


@dataclass(frozen=True, slots=True)
class SaveBehind:
    """As :class:`Save`, of a snapshot that is taken now: carried out when that is whole, while the shard is saved
    behind what comes next. A ``saved`` event says when that is done; the next one of these waits for it."""

    attempt: str
    step: int
    store: str
    files: Digest | None = None


@dataclass(frozen=True, slots=True)
class Flip:
    """Sabotage: flip one bit of a first moment in the memory of the worker of ``shard``."""

    shard: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Score the present weights, which have seen ``update`` updates."""

    update: int


@dataclass(frozen=True, slots=True)
class Close:
    """Leave the group and end."""


Order = Join | Start | Restore | Arm | Train | Save | SaveBehind | Flip | Evaluate | Close

_KINDS: Mapping[str, type[Order]] = MappingProxyType(
    {
        kind.__name__.lower(): kind
        for kind in (Join, Start, Restore, Arm, Train, Save, SaveBehind, Flip, Evaluate, Close)
    }
)

DONE: Mapping[type[Order], str] = MappingProxyType(
    {
        Join: "joined",
        Start: "started",
        Restore: "restored",
        Arm: "armed",
        Train: "trained",
        Save: "saved",
        SaveBehind: "snapshot",
        Flip: "flipped",
        Evaluate: "evaluated",
        Close: "closed",
    }
)
"""Name of the event by which a worker says that it has carried an order out."""


def encode(order: Order) -> bytes:
    """The order as a line, with its end."""
    body = {"order": type(order).__name__.lower(), "with": records.to_json(order)}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def parse(line: bytes) -> Order:
    """The order of a line. MalformedError if it is none."""
    if len(line) > LINE_LIMIT:
        raise MalformedError("order", f"a line of {len(line)} bytes, the limit is {LINE_LIMIT}")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        raise MalformedError("order", f"not a line of JSON: {line[:80]!r}") from None
    match body:
        case {"order": str(name), "with": dict(fields)} if name in _KINDS and len(body) == 2:
            return records.from_json(_KINDS[name], fields, f"order {name}")
    raise MalformedError("order", f"there is none like {line[:80]!r}")
