"""Which checkpoints lie between two roots, and what their updates are made from again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore import Checkpoint, Digest, Store
from ckptstore.errors import RefusedError, UsageError

START = "start"
"""Stands for the starting weights, where a checkpoint is expected to begin from."""


@dataclass(frozen=True, slots=True)
class Leg:
    """From one checkpoint, or the start, to the next: updates ``first`` to ``last`` lead to ``checkpoint``."""

    parent: Digest | None
    first: int
    root: Digest
    checkpoint: Checkpoint

    @property
    def last(self) -> int:
        """The last update before the commit."""
        return self.checkpoint.step


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is replayed: the run, as its prepared identity, and the legs in order."""

    run: Digest
    legs: tuple[Leg, ...]

    @property
    def begin(self) -> Digest | None:
        """The checkpoint that the first leg begins from; None: the starting weights."""
        return self.legs[0].parent

    @property
    def end(self) -> Leg:
        """The last leg."""
        return self.legs[-1]


def between(store: Store, begin: Digest | None, end: Digest) -> Lineage:
    """The line of checkpoints from ``begin`` (None: the starting weights) to its descendant ``end``.

    Raises:
        UsageError: both are the same.
        NotFoundError: the document of a checkpoint in between is not in the store.
        RefusedError: ``end`` does not descend from ``begin``, or they are not of one run that was prepared, or one of
            them has not got there by updates alone.
    """
    if begin == end:
        raise UsageError("replay", "from a checkpoint to itself there is nothing to do", "name one and a descendant")
    line: list[tuple[Digest, Checkpoint]] = []
    parent: Digest | None = end
    while parent is not None and parent != begin:
        line.append((parent, store.checkpoint(parent)))
        parent = line[-1][1].parent
    if parent != begin:
        why = f"it does not descend from {_name(begin)}: its line is {', '.join(root.short for root, _ in line)}"
        raise RefusedError(f"checkpoint {end.short}", why, f"ckpt --store {store.url} log {end.short} shows its line")
    first = None if begin is None else store.checkpoint(begin)
    return Lineage(_run(first, line), tuple(_legs(begin, first, line[::-1])))


def _run(first: Checkpoint | None, line: Sequence[tuple[Digest, Checkpoint]]) -> Digest:
    runs = {checkpoint.run for _, checkpoint in line} | ({first.run} if first else set())
    run, *others = runs
    if others or run is None:
        found = ", ".join(sorted(str(one) for one in runs))
        why = f"the checkpoints name the prepared identities {found}; one that all have in common is needed"
        raise RefusedError(f"replay to {line[0][0].short}", why, "replay from a checkpoint of the same run")
    return run


def _legs(begin: Digest | None, first: Checkpoint | None, line: Sequence[tuple[Digest, Checkpoint]]) -> list[Leg]:
    legs: list[Leg] = []
    parent, step = begin, 0 if first is None else first.step
    shards = None if first is None else len(first.shards)
    for root, checkpoint in line:
        if checkpoint.step <= step or (shards is not None and len(checkpoint.shards) != shards):
            why = f"it has {checkpoint.step} updates in {len(checkpoint.shards)} shards, {_name(parent)} has {step}"
            why += "" if shards is None else f" in {shards}"
            hint = f"only updates are replayed; replay from {root.short} on"
            raise RefusedError(f"checkpoint {root.short}", why, hint)
        legs.append(Leg(parent, step + 1, root, checkpoint))
        parent, step, shards = root, checkpoint.step, len(checkpoint.shards)
    return legs


def _name(root: Digest | None) -> str:
    return "the start" if root is None else root.short


def resolve(store: Store, name: str) -> Digest | None:
    """The root that ``name`` means: a ref, a digest or a prefix of one; None for ``start``.

    Raises:
        NotFoundError, UsageError: as :meth:`ckptstore.Store.resolve`.
    """
    return None if name == START else store.resolve(name)
