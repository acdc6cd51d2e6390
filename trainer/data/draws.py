"""A named, counter-based source of random integers, the same on every machine, Python version and hash seed.

Draw ``i`` of the stream ``name`` is 64 bits of BLAKE3 of both, so a stream has no state but its counter, touches no
global generator, and two streams of different names never disturb each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ckptstore.format.digest import derive

T = TypeVar("T")

_CONTEXT = "ckptstore trainer 1 draws"


class Draws:
    """The stream called ``name``; ``Draws(name)`` twice gives the same integers twice."""

    __slots__ = ("_counter", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._counter = 0

    def below(self, bound: int) -> int:
        """An integer of ``[0, bound)``, each equally likely; ``bound`` is at least 1 and at most 2**32."""
        limit = 2**64 - 2**64 % bound  # beyond it the last, partial round would favour small results
        while True:
            block = derive(_CONTEXT, self.name.encode(), b"\0", self._counter.to_bytes(8, "little"))
            self._counter += 1
            value = int.from_bytes(block[:8], "little")
            if value < limit:
                return value % bound

    def between(self, low: int, high: int) -> int:
        """An integer of ``[low, high]``, both ends included."""
        return low + self.below(high - low + 1)

    def choose(self, items: Sequence[T]) -> T:
        """One of ``items``."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` of ``items``, by position without repetition, in the order drawn."""
        pool = list(items)
        for i in range(count):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All of ``items`` in a drawn order."""
        return self.sample(items, len(items))
