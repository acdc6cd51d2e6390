"""The plan of a collection: what stays and why, what is retired, and which keys go, in which order.

Making one writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadBackend, Stat
from ckptstore.collection.keeping import Keeping, decide
from ckptstore.collection.leftovers import Held, Leftovers
from ckptstore.collection.policy import Policy
from ckptstore.errors import RefusedError
from ckptstore.format.digest import Digest
from ckptstore.format.records import Retired as Retirement
from ckptstore.pins import holding

_NAMED = 40
"""Problems that one message lists."""

Copies = Callable[[Collection[Digest]], Mapping[Digest, int]]
"""By checkpoint, how many other stores are known to hold a verified copy of all of it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A closure that stays, and why. ``step`` is None if it is no checkpoint, ``shards`` None if all of them stay."""

    root: Digest
    step: int | None
    shards: tuple[int, ...] | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Retired:
    """A checkpoint whose closure goes and whose document stays as history, and why. ``step`` is None if it cannot be
    read."""

    root: Digest
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Unnamed:
    """A checkpoint that no ref, pin or descendant leads to. Its document goes with all that only it needs."""

    root: Digest
    step: int


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of keys, and their bytes."""

    keys: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a collection would do.

    Args:
        kept: closures that stay, by step and root.
        retired: checkpoints whose closures go.
        unnamed: checkpoints that nothing leads to.
        wanting: those of ``kept`` that stay only because too few other stores hold verified copies of them.
        stages: the keys that go, with sizes in bytes. Whatever names something is in a stage before what it names.
        held: keys that would go and are held by the endpoint.
        remains: what the store holds afterwards, without leases and markers.
        leases: keys of writers that were there when the plan was made.
    """

    kept: tuple[Kept, ...]
    retired: tuple[Retired, ...]
    unnamed: tuple[Unnamed, ...]
    wanting: tuple[Kept, ...]
    stages: tuple[tuple[Stat, ...], ...]
    held: tuple[Held, ...]
    remains: Amount
    leases: tuple[str, ...]

    @property
    def deletions(self) -> tuple[Stat, ...]:
        """All keys that go, in the order in which they go."""
        return tuple(stat for stage in self.stages for stat in stage)

    @property
    def freed_bytes(self) -> int:
        """Bytes of all keys that go."""
        return sum(stat.size for stage in self.stages for stat in stage)


def plan(
    backend: ReadBackend,
    policy: Policy,
    *,
    ledger: Copies | None = None,
    retire: Collection[Digest] = (),
    min_verified_copies: int = 0,
) -> Plan:
    """Decide what stays and what goes.

    Args:
        backend: the store.
        policy: which checkpoints of a lineage are kept; without a rule all are.
        ledger: who knows of copies in other stores; needed for ``min_verified_copies``.
        retire: these go: checkpoints that cannot be read, or that only history keeps. What is at the head of a ref,
            pinned, or the newest verified one of a lineage does not go as long as it can be read.
        min_verified_copies: a closure is only retired if at least so many other stores hold verified copies of it.

    Raises:
        RefusedError: something that is to be kept cannot be read, or something is not understood; lists all of it.
    """
    problems: list[str] = []
    keeping = decide(backend, policy, frozenset(retire), problems.append)
    keeping.keep_held(holding(backend))
    wanting = keeping.keep_wanting(ledger, min_verified_copies)
    keeping.reach_all()
    leftovers = Leftovers(keeping)
    if problems:
        raise refused(backend, problems)
    gone = [stat for stage in leftovers.stages for stat in stage]
    kept = _kept(keeping)
    retired = tuple(Retired(root, step, reason) for root, step, reason in keeping.retired())
    records = [len(record(item)) for item in retired if item.root not in keeping.inventory.retired]
    size = keeping.inventory.size + sum(records) - sum(stat.size for stat in gone)
    return Plan(
        kept=kept,
        retired=retired,
        unnamed=tuple(Unnamed(root, step) for root, step in leftovers.checkpoints),
        wanting=tuple(item for item in kept if item.root in wanting),
        stages=leftovers.stages,
        held=tuple(leftovers.held),
        remains=Amount(keeping.inventory.keys + len(records) - len(gone), size),
        leases=tuple(keeping.inventory.leases),
    )


def record(item: Retired) -> bytes:
    """The bytes of the retirement that goes before the closure."""
    return Retirement(item.reason).encode()


def refused(backend: ReadBackend, problems: Sequence[str]) -> RefusedError:
    """The error that says for which reasons nothing may be deleted."""
    distinct = list(dict.fromkeys(problems))
    listed = "; ".join(distinct[:_NAMED])
    more = f"; and {len(distinct) - _NAMED} more" if len(distinct) > _NAMED else ""
    number = f"{len(distinct)} reason{'' if len(distinct) == 1 else 's'}"
    hint = (
        "repair or pull again what is damaged, move out of the store what is none of its own, or let a checkpoint that "
        "cannot be read go with ckpt gc --retire ROOT"
    )
    return RefusedError(f"collection in {backend.url}", f"nothing was deleted, for {number}: {listed}{more}", hint)


def _kept(keeping: Keeping) -> tuple[Kept, ...]:
    found = [
        Kept(root, keeping.step(root), keeping.shards(root), tuple(reasons)) for root, reasons in keeping.kept.items()
    ]
    return tuple(sorted(found, key=lambda item: (item.step is None, -(item.step or 0), item.root)))
