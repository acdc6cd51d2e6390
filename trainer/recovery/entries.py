"""What a run's journal says: one frozen record for each thing that happened, as a line of JSON. No torch.

An entry is written when what it tells is done, so whatever was under way when the controller ended is simply not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckptstore import Digest
from ckptstore.errors import MalformedError, UsageError
from trainer.preparation import records

LINE_LIMIT = 2**20  # bytes


@dataclass(frozen=True, slots=True)
class Begun:
    """The run was prepared: what it trains, in which store and ref, and after which updates it commits."""

    profile: str
    compute: str
    kernels: str
    operator: str
    ref: str
    identity: Digest
    plan: Digest
    inputs: Digest
    sources: Digest
    shards: int
    commits: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.commits or list(self.commits) != sorted(set(self.commits)) or self.commits[0] < 1 > self.shards:
            raise UsageError("journal", f"commits {self.commits} do not rise from 1 on, or {self.shards} shards")

    @property
    def last(self) -> int:
        """The last update."""
        return self.commits[-1]


@dataclass(frozen=True, slots=True)
class Opened:
    """A controller took the run over, with ``spares`` spare hosts in all; no worker of an earlier one is left.

    ``detect_ms`` is how long nobody was in charge since the last line before this one, ``abort_ms`` how long it took
    until the workers of the earlier controller were gone; both are 0 for the first one.
    """

    pid: int
    spares: int
    detect_ms: int
    abort_ms: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """A host was made, empty, and a shard given to it."""

    shard: int
    host: str


@dataclass(frozen=True, slots=True)
class Staged:
    """A host has the frozen files of its shard and the objects of its shard of ``root`` (None: there is none yet).

    Bytes of files that were copied and of all that were checked; bytes of objects by where they came from, a peer or
    the operator's store, and those that were read again on the host.
    """

    shard: int
    host: str
    root: Digest | None
    copied_bytes: int
    checked_bytes: int
    peer_bytes: int
    operator_bytes: int
    verified_bytes: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """The checkpoint that is restored, verified by reading all of it; None at the very start.

    ``skipped`` are checkpoints that were passed over because they are not whole, each with its reason.
    """

    root: Digest | None
    step: int
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launched:
    """Processes of a group were started, by shard."""

    generation: int
    hosts: tuple[str, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The group has met, was admitted, and stands where it begins: after ``step`` updates."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Updated:
    """All workers made an update, with the same exact loss, norm and clipping coefficient."""

    update: int
    loss: str
    norm: str
    coef: str


@dataclass(frozen=True, slots=True)
class Snapped:
    """The workers have snapshots of the state after ``step`` updates, of so many bytes by shard, and train on.

    ``stall_ms`` is how long training stood still for that.
    """

    step: int
    bytes: tuple[int, ...]
    stall_ms: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint is in the operator's store and its ref names it.

    ``receipts`` are those of its shards, by shard. ``stall_ms`` is how long training stood still for it in all,
    ``whole_ms`` how long it took until it was verified.
    """

    step: int
    root: Digest
    state_root: Digest
    receipts: tuple[str, ...]
    sent_bytes: int
    verified_bytes: int
    stall_ms: int
    whole_ms: int


@dataclass(frozen=True, slots=True)
class Replicated:
    """Each shard of a checkpoint has a replica on another host: on which, and the bytes sent, by shard."""

    root: Digest
    holders: tuple[str, ...]
    sent_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A group was lost, and what was left of it ended.

    ``shards`` and ``hosts`` are those to be replaced; none where only a connection broke. ``detect_ms`` is from the
    last sign of life of what was lost to the first sign of its loss, ``abort_ms`` from there until nothing was left.
    """

    generation: int
    shards: tuple[int, ...]
    hosts: tuple[str, ...]
    sign: str
    why: str
    detect_ms: int
    abort_ms: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """What had been done before a loss is done again: where the time went, in milliseconds, and bytes by source."""

    what: str
    update: int
    replayed: int
    detect_ms: int
    abort_ms: int
    stage_ms: int
    restore_ms: int
    replay_ms: int
    file_bytes: int
    peer_bytes: int
    operator_bytes: int
    verified_bytes: int

    @property
    def total_ms(self) -> int:
        """Time to recover."""
        return self.detect_ms + self.abort_ms + self.stage_ms + self.restore_ms + self.replay_ms


@dataclass(frozen=True, slots=True)
class Finished:
    """The last checkpoint is committed and the group has left in an orderly way."""

    root: Digest
    state_root: Digest


@dataclass(frozen=True, slots=True)
class Cleared:
    """The hosts' folders are gone: how many, and the bytes that were in them."""

    hosts: int
    bytes: int


Entry = (
    Begun
    | Opened
    | Assigned
    | Staged
    | Chosen
    | Launched
    | Ready
    | Updated
    | Snapped
    | Committed
    | Replicated
    | Lost
    | Recovered
    | Finished
    | Cleared
)

_KINDS: Mapping[str, type[Entry]] = MappingProxyType({kind.__name__.lower(): kind for kind in Entry.__args__})


def encode(entry: Entry, time: str) -> bytes:
    """The line of an entry, with its end; ``time`` is when it was written, in UTC."""
    body = {"entry": type(entry).__name__.lower(), "time": time, "with": records.to_json(entry)}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def parse(line: bytes) -> tuple[str, Entry]:
    """Time and entry of a line. MalformedError if it is none."""
    if len(line) > LINE_LIMIT:
        raise MalformedError("journal", f"a line of {len(line)} bytes, the limit is {LINE_LIMIT}")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        raise MalformedError("journal", f"not a line of JSON: {line[:80]!r}") from None
    match body:
        case {"entry": str(name), "time": str(time), "with": dict(fields)} if name in _KINDS and len(body) == 3:
            return time, records.from_json(_KINDS[name], fields, f"journal entry {name}")
    raise MalformedError("journal", f"there is no entry like {line[:80]!r}")
