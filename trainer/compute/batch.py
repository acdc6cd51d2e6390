"""One update's examples as plain values without torch, for a plan to hold and a controller to count."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, isfinite

from ckptstore.errors import UsageError


@dataclass(frozen=True, slots=True)
class Microbatch:
    """``ids[b][t]`` and the weight of each as a *target*: token ``t`` is predicted from those before it.

    All rows are padded to one length of at least 2; padding stands at the end and has weight 0, and so has a prompt.
    The first token of a row is never predicted, so its weight is 0.

    Raises:
        UsageError: not rectangular, or a weight that cannot be one.
    """

    ids: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.ids} | {len(row) for row in self.weights}
        if len(self.ids) != len(self.weights) or len(widths) != 1 or min(widths) < 2:
            raise UsageError("microbatch", f"{len(self.ids)} rows of ids and weights with lengths {sorted(widths)}")
        if not all(isfinite(w) and w >= 0 for row in self.weights for w in row):
            raise UsageError("microbatch", "a token weight is negative or not finite")
        if any(row[0] != 0 for row in self.weights):
            raise UsageError("microbatch", "the first token of a row has a weight, but nothing predicts it")

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, positions), padding included."""
        return len(self.ids), len(self.ids[0])


@dataclass(frozen=True, slots=True)
class Batch:
    """The microbatches of one update, in the order in which their gradients are added.

    Raises:
        UsageError: there is none, or no token has a weight.
    """

    microbatches: tuple[Microbatch, ...]

    def __post_init__(self) -> None:
        if not self.microbatches or self.denominator == 0:
            raise UsageError("batch", "no token in it has a weight, so there is nothing to learn")

    @property
    def denominator(self) -> float:
        """Sum of all token weights of the update, correctly rounded, so no order and no partition changes it."""
        return fsum(w for micro in self.microbatches for row in micro.weights for w in row)

    @property
    def positions(self) -> int:
        """Padded positions of the update: what is computed and what travels."""
        return sum(rows * length for rows, length in (micro.shape for micro in self.microbatches))
