"""The static order of work: a pipeline bent to a U, because shard 0 owns both the embedding and the output head.

Microbatch ``m`` goes forward through ranks 0, 1, … N-1, returns to rank 0 for the head, and its gradient runs back from
N-1 to 0. Every rank works through its microbatches in ascending order, so gradients are added in one order whatever
overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ckptstore.errors import UsageError


class Kind(Enum):
    """What a rank does with one microbatch."""

    FORWARD = "forward"
    HEAD = "head"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of work on one microbatch."""

    kind: Kind
    micro: int


Schedule = tuple[tuple[Op, ...], ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule comes to: its length in slots of equal work and each rank's most open microbatches."""

    slots: int
    in_flight: tuple[int, ...]


def schedule(n: int, m: int) -> Schedule:
    """Operations of each of ``n`` ranks for ``m`` microbatches, in order.

    A rank starts ``min(m, n - rank)`` microbatches, then alternates: head (rank 0 only), the next forward, backward.
    Forward goes before backward, because the next rank waits for it.

    Raises:
        UsageError: ``n`` or ``m`` is less than 1.
    """
    if n < 1 or m < 1:
        raise UsageError("schedule", f"{n} ranks and {m} microbatches", "both have to be at least 1")
    return tuple(_rank(n, m, rank) for rank in range(n))


def _rank(n: int, m: int, rank: int) -> tuple[Op, ...]:
    warm = min(m, n - rank)
    ops = [Op(Kind.FORWARD, i) for i in range(warm)]
    for i in range(m):
        if rank == 0:
            ops.append(Op(Kind.HEAD, i))
        if warm + i < m:
            ops.append(Op(Kind.FORWARD, warm + i))
        ops.append(Op(Kind.BACKWARD, i))
    return tuple(ops)


def simulate(s: Schedule) -> Simulation:
    """Play a schedule with one slot an operation, where sending never waits and receiving does.

    Raises:
        UsageError: the schedule cannot end, because ranks wait for each other; the message names what each waits for.
    """
    n = len(s)
    ready: dict[tuple[int, Op], int] = {}  # operation -> slot in which its result can be used
    at, clock = [0] * n, [0] * n
    open_now, in_flight = [0] * n, [0] * n
    while any(at[r] < len(s[r]) for r in range(n)):
        moved = False
        for r in range(n):
            if at[r] == len(s[r]):
                continue
            op = s[r][at[r]]
            source = _source(n, r, op)
            if source is not None and source not in ready:
                continue
            clock[r] = max(clock[r], ready[source] if source else 0) + 1
            ready[r, op] = clock[r]
            at[r] += 1
            open_now[r] += {Kind.FORWARD: 1, Kind.HEAD: 0, Kind.BACKWARD: -1}[op.kind]
            in_flight[r] = max(in_flight[r], open_now[r])
            moved = True
        if not moved:
            waits = [f"rank {r} at {s[r][at[r]].kind.value} {s[r][at[r]].micro}" for r in range(n) if at[r] < len(s[r])]
            raise UsageError("schedule", f"it never ends: {', '.join(waits)}")
    return Simulation(max(clock), tuple(in_flight))


def _source(n: int, rank: int, op: Op) -> tuple[int, Op] | None:
    """The operation whose result this one needs, or None if it needs none."""
    last = n - 1
    if op.kind is Kind.HEAD:
        return last, Op(Kind.FORWARD, op.micro)
    if op.kind is Kind.BACKWARD:
        return (0, Op(Kind.HEAD, op.micro)) if rank == last else (rank + 1, op)
    return None if rank == 0 else (rank - 1, op)
