"""Time to recover: from a loss until all that had been done before it is done again, split by what took it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from trainer.recovery.entries import Recovered, Staged

PARTS = ("detect", "abort", "stage", "restore", "replay")


class Recoveries:
    """The recoveries that are under way, and the watch that times them: each lap ends where the next one begins.

    A loss amid a recovery lengthens the earlier one, too: what was to be reached again then is reached with the last.
    """

    def __init__(self) -> None:
        self._open: tuple[Recovered, ...] = ()
        self._since = time.monotonic()

    def lost(self, what: str, update: int, detect_ms: int, abort_ms: int) -> None:
        """Something was lost after ``update`` updates, noticed, and what was left of it ended; now recovery begins."""
        self._add(replay_ms=self._lap())
        self._open += (Recovered(what, update, 0, detect_ms, abort_ms, 0, 0, 0, 0, 0, 0, 0),)

    def staged(self, hosts: Sequence[Staged]) -> None:
        """All hosts have what they need."""
        self._add(
            stage_ms=self._lap(),
            file_bytes=sum(one.copied_bytes for one in hosts),
            peer_bytes=sum(one.peer_bytes for one in hosts),
            operator_bytes=sum(one.operator_bytes for one in hosts),
            verified_bytes=sum(one.verified_bytes for one in hosts),
        )

    def restored(self) -> None:
        """The group is where it begins."""
        self._add(restore_ms=self._lap())

    def reached(self, update: int, first: int) -> list[Recovered]:
        """The recoveries that are over now that a group that began after ``first`` updates has made ``update``."""
        over = [one for one in self._open if one.update <= update]
        self._open = tuple(one for one in self._open if one.update > update)
        passed = round(1000 * (time.monotonic() - self._since))
        return [replace(one, replay_ms=one.replay_ms + passed, replayed=max(0, one.update - first)) for one in over]

    def _add(self, **parts: int) -> None:
        sums = [{name: getattr(one, name) + more for name, more in parts.items()} for one in self._open]
        self._open = tuple(replace(one, **found) for one, found in zip(self._open, sums, strict=True))

    def _lap(self) -> int:
        """Milliseconds since the last lap, which ends now."""
        now = time.monotonic()
        passed, self._since = now - self._since, now
        return round(1000 * passed)


def table(recovered: Sequence[Recovered]) -> list[str]:
    """A line for each loss with the times of its recovery in milliseconds and the bytes that it took, and their means.

    Nothing without losses.
    """
    if not recovered:
        return []
    width = max(len("mean"), *(len(one.what) for one in recovered))
    head = "".join(f"{name:>9}" for name in (*PARTS, "total"))
    lines = [f"{'lost':<{width}}  in update{head}  replayed  bytes: files   from peer  from operator    verified"]
    for one in recovered:
        ms = (*(getattr(one, f"{name}_ms") for name in PARTS), one.total_ms)
        cells = "".join(f"{value:>9,}" for value in ms)
        size = f"{one.file_bytes:>12,}  {one.peer_bytes:>10,}  {one.operator_bytes:>13,}  {one.verified_bytes:>10,}"
        lines.append(f"{one.what:<{width}}  {one.update + 1:>9}{cells}  {one.replayed:>8}  {size}")
    count = len(recovered)
    totals = [sum(getattr(one, f"{name}_ms") for one in recovered) for name in PARTS]
    means = "".join(f"{round(value / count):>9,}" for value in (*totals, sum(totals)))
    lines.append(f"{'mean':<{width}}  {'':>9}{means}")
    return lines
