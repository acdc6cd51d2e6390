"""Whether two runs did the same: exact losses and norms by update, and where their states differ if they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore import Digest, Store
from trainer.workers.events import Event

_NAMED = 3  # tensors


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One update: its exact numbers as hexadecimal floats by name, what they are, and what it took."""

    update: int
    exact: Mapping[str, str]
    loss: float
    norm: float
    sent_bytes: int
    ms: float


def of_events(updates: Mapping[int, Event]) -> dict[int, Fingerprint]:
    """Fingerprints of a worker's ``update`` events, by update."""
    return {
        number: Fingerprint(
            update=number,
            exact=dict(event["exact"]),
            loss=event["loss"],
            norm=event["norm"],
            sent_bytes=event["sent_bytes"],
            ms=event["ms"],
        )
        for number, event in sorted(updates.items())
    }


def first_difference(expected: Mapping[int, Fingerprint], actual: Mapping[int, Fingerprint]) -> str | None:
    """The first update in which two runs differ and how, or None if they agree in all bits."""
    for update in sorted(expected.keys() | actual.keys()):
        if update not in expected or update not in actual:
            return f"first difference in update {update}: only one of the two made it"
        left, right = expected[update].exact, actual[update].exact
        wrong = [f"{name} {left.get(name)} and {right.get(name)}" for name in left if left[name] != right.get(name)]
        if wrong:
            return f"first difference in update {update}: {', '.join(wrong)}"
    return None


def differing_state(left: Store, left_root: Digest, right: Store, right_root: Digest) -> str:
    """Which tensors two checkpoints do not share, those that differ most first, in one line."""
    found = left.diff(left_root, right_root, right)
    changed = [change for change in found.tensors if change.comparison is not None]
    changed.sort(key=lambda change: change.comparison.max_abs if change.comparison else 0.0, reverse=True)
    if not changed:
        return found.headline()
    others = ", ".join(f"{'/'.join(change.role)} {change.path}" for change in changed[1:_NAMED])
    return f"{found.headline()}; most of all {changed[0]}{f'; then {others}' if others else ''}"
