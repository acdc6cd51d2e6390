"""Whether two runs did the same: exact losses and norms by update, and where their states differ if they do not."""

from __future__ import annotations

from collections.abc import Mapping

from ckptstore import Digest, Store
from ckptstore.format.page import show_role
from trainer.compute.result import UpdateResult
from trainer.lifecycle.expect import unexpected
from trainer.workers.group import LaunchedGroup
from trainer.workers.reports import update_result

Results = Mapping[int, UpdateResult]

_NAMED = 3  # tensors


def agreed_results(group: LaunchedGroup) -> dict[int, UpdateResult]:
    """The results of a group's updates, by update; its workers must have the same, bit for bit.

    Raises:
        NotAsPlannedError: a worker has others; names the first update and number.
        MalformedError: a worker reported what is no result.
    """
    found = [_results(group, shard) for shard in range(len(group.hosts))]
    for shard, other in enumerate(found[1:], 1):
        difference = first_difference(found[0], other)
        if difference is not None:
            raise unexpected(f"losses and norms of shard {shard}", "those of shard 0", difference)
    return found[0]


def first_difference(expected: Results, actual: Results) -> str | None:
    """The first update in which two runs differ and how, or None if they agree in all bits."""
    for update in sorted(expected.keys() | actual.keys()):
        if update not in expected or update not in actual:
            return f"first difference in update {update}: only one of the two made it"
        left, right = expected[update].exact, actual[update].exact
        wrong = [f"{name} {left[name]} and {right[name]}" for name in left if left[name] != right[name]]
        if wrong:
            return f"first difference in update {update}: {', '.join(wrong)}"
    return None


def require_equal(
    step: int, reference: tuple[Store, Digest, Results], recovered: tuple[Store, Digest, Results]
) -> None:
    """That a replay ended in the root, losses and norms of the reference, bit for bit.

    Args:
        step: updates that both have made.
        reference, recovered: the store, the root in it, and the results of the updates that were replayed.

    Raises:
        NotAsPlannedError: something differs; names the first differing update, and by comparison of the two roots the
            tensors that differ most.
    """
    (kept, expected, planned), (store, root, replayed) = reference, recovered
    difference = first_difference(planned, replayed)
    if difference is None and root == expected:
        return
    seen = f"root {root}; {difference or 'losses and norms are equal'}"
    if root != expected:
        seen += f"; {differing_state(kept, expected, store, root)}"
    raise unexpected(
        f"replay to update {step}",
        f"root {expected}",
        seen,
        f"ckpt --store {kept.url} diff {expected.short} {root.short} --other {store.url} lists all",
    )


def differing_state(left: Store, left_root: Digest, right: Store, right_root: Digest) -> str:
    """Which tensors two checkpoints do not share, those that differ most first, in one line."""
    found = left.diff(left_root, right_root, right)
    changed = [change for change in found.tensors if change.comparison is not None]
    changed.sort(key=lambda change: change.comparison.max_abs if change.comparison else 0.0, reverse=True)
    if not changed:
        return found.headline()
    others = ", ".join(f"{show_role(change.role)} {change.path}" for change in changed[1:_NAMED])
    return f"{found.headline()}; most of all {changed[0]}{f'; then {others}' if others else ''}"


def _results(group: LaunchedGroup, shard: int) -> dict[int, UpdateResult]:
    return {number: update_result(event) for number, event in sorted(group.updates(shard).items())}
