"""Copies of a checkpoint: who holds them, and what is known of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from ckptstore.format.digest import Digest
from ckptstore.readbacks.coverage import Evidence


@dataclass(frozen=True, slots=True)
class Holder:
    """A store that holds copies, or may hold some.

    Args:
        id: what its header says, None where no receipt tells: it may then be one of the others, and does not count.
        url: where it was last.
        names: names of the remotes that lead there.
        here: it is the store that was asked.
        replaced: another store has been seen at its place since, so its copies do not count.
    """

    id: str | None
    url: str
    names: tuple[str, ...] = ()
    here: bool = False
    replaced: bool = False

    @property
    def name(self) -> str:
        """How people call it."""
        return "/".join((*(["this store"] if self.here else []), *self.names)) or self.url


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of one key: what is known of it at one holder.

    Args:
        holder: where it is.
        evidence: its best readback, None if no receipt tells of one.
        present: whether the holder has the key, as it said just now; None if it was not asked.
    """

    holder: Holder
    evidence: Evidence | None
    present: bool | None = None

    def is_verified(self, at: datetime, max_age: timedelta | None = None) -> bool:
        """Whether it was read back in full from a lasting medium, at most ``max_age`` before ``at``.

        A time in the future says that a clock is wrong, and nothing of an age.
        """
        if self.evidence is None or self.present is False or self.holder.id is None or self.holder.replaced:
            return False
        young = max_age is None or (not self.evidence.future and at - self.evidence.read_at <= max_age)
        return self.evidence.readback.lasting and young


@dataclass(frozen=True, slots=True)
class KeyCopies:
    """A key of a closure, its size in bytes, and its copies, the best evidence first."""

    key: str
    size: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class RootCopies:
    """A checkpoint with all keys of its closure, documents before objects."""

    root: Digest
    step: int
    keys: tuple[KeyCopies, ...]

    def verified(self, at: datetime, max_age: timedelta | None = None) -> int:
        """Verified copies of the key that has the fewest."""
        return min(sum(copy.is_verified(at, max_age) for copy in copies) for copies in self._distinct())

    def oldest(self, at: datetime, max_age: timedelta | None = None) -> datetime | None:
        """The oldest readback of all copies that count, None if there are none."""
        times = [
            copy.evidence.read_at
            for copies in self._distinct()
            for copy in copies
            if copy.evidence is not None and copy.is_verified(at, max_age)
        ]
        return min(times, default=None)

    def verified_at(self, holder: Holder, at: datetime, max_age: timedelta | None = None) -> int:
        """How many keys have a verified copy at one holder."""
        good = {
            id(copies)
            for copies in self._distinct()
            if any(copy.holder == holder and copy.is_verified(at, max_age) for copy in copies)
        }
        return sum(id(item.copies) in good for item in self.keys)

    def lacking(self, number: int, at: datetime, max_age: timedelta | None = None) -> int:
        """How many keys have fewer than ``number`` verified copies."""
        bad = {
            id(copies) for copies in self._distinct() if sum(copy.is_verified(at, max_age) for copy in copies) < number
        }
        return sum(id(item.copies) in bad for item in self.keys)

    def _distinct(self) -> Collection[tuple[Copy, ...]]:
        """The copies of keys, once for all keys that have the same."""
        return {id(item.copies): item.copies for item in self.keys}.values()
