"""What a scrub tells: how far it came, what is wrong, and what remains."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ckptstore.backends.protocol import ReadbackMethod
from ckptstore.findings import Finding, exit_code
from ckptstore.format.digest import Digest


@dataclass(frozen=True, slots=True)
class Damage:
    """One key that is damaged or missing, and the kept checkpoints that it hurts; None: not known, since the budget
    ended before all documents were read."""

    finding: Finding
    hurts: tuple[Digest, ...] | None


@dataclass(frozen=True, slots=True)
class Scrub:
    """What a scrub did.

    Args:
        url: of the store.
        keys, size: keys of the store and their bytes, as listed, but for the notes of scrubs.
        read_keys: read back now, good or not; each at most once.
        read_bytes: their bytes, and those of the documents that were looked at besides, for what they lead to.
        recent_keys, recent_bytes: left out because they were read back recently.
        left_keys, left_bytes: not come to, because the budget ended before.
        damaged: what is wrong, by key.
        unreferenced_keys, unreferenced_bytes: objects and documents that no ref or pin leads to; None if the budget
            ended before that was known, or a document that leads on cannot be read.
        unknown_keys: keys of which this release does not know what they should hold; they were not read.
        never_keys: keys that no reading from where they are kept is known of, also now.
        oldest: when the other keys were read back, the oldest of them; None if there is none.
        method: the weakest way in which a key was read.
        ended_by: "bytes" or "duration" if the budget ended it, else empty.
        failures: stores that could not keep the notes, with the reason; empty if all could.
        at: when it began, in UTC.
    """

    url: str
    keys: int
    size: int
    read_keys: int
    read_bytes: int
    recent_keys: int
    recent_bytes: int
    left_keys: int
    left_bytes: int
    damaged: tuple[Damage, ...]
    unreferenced_keys: int | None
    unreferenced_bytes: int | None
    unknown_keys: int
    never_keys: int
    oldest: datetime | None
    method: ReadbackMethod
    ended_by: str
    failures: tuple[tuple[str, str], ...]
    at: datetime

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong."""
        return tuple(damage.finding for damage in self.damaged)

    @property
    def exit_code(self) -> int:
        """0, or the exit code of the worst finding."""
        return exit_code(self.findings)
