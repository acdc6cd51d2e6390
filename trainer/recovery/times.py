"""Time to recover: from a loss until all that had been done before it is done again, split by what took it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.recovery.entries import Recovered

PARTS = ("detect", "abort", "stage", "restore", "replay")


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery that is under way: what was lost, the update to be reached again, milliseconds and bytes so far."""

    what: str
    update: int
    detect_ms: int
    abort_ms: int
    stage_ms: int = 0
    restore_ms: int = 0
    replay_ms: int = 0
    replayed: int = 0
    file_bytes: int = 0
    peer_bytes: int = 0
    operator_bytes: int = 0
    verified_bytes: int = 0

    def ended(self) -> Recovered:
        """The entry for the journal."""
        return Recovered(
            what=self.what,
            update=self.update,
            replayed=self.replayed,
            detect_ms=self.detect_ms,
            abort_ms=self.abort_ms,
            stage_ms=self.stage_ms,
            restore_ms=self.restore_ms,
            replay_ms=self.replay_ms,
            file_bytes=self.file_bytes,
            peer_bytes=self.peer_bytes,
            operator_bytes=self.operator_bytes,
            verified_bytes=self.verified_bytes,
        )


def plus(recoveries: Sequence[Recovery], **parts: int) -> tuple[Recovery, ...]:
    """Each of the recoveries with more milliseconds or bytes: a loss amid a recovery lengthens the earlier one too."""
    return tuple(
        replace(one, **{name: getattr(one, name) + more for name, more in parts.items()}) for one in recoveries
    )


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
