"""What all workers of a group say of an update: one result, the same from each, and the same whenever it is made."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.compute.result import UpdateResult
from trainer.lifecycle.expect import require, unexpected
from trainer.recovery.entries import Updated


class Agreement:
    """Collects the results of one group's updates.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._told: dict[int, dict[int, UpdateResult]] = {}

    def hear(self, shard: int, result: UpdateResult, before: Mapping[int, Updated]) -> Updated | None:
        """The update, once all workers have told of it.

        Args:
            shard: who tells.
            result: of an update.
            before: what updates gave when they were made earlier, by number.

        Raises:
            NotAsPlannedError: the workers disagree, or the update gave something else when it was made before.
        """
        told = self._told.setdefault(result.update, {})
        told[shard] = result
        if len(told) < self._workers:
            return None
        exact = result.exact
        for other, found in sorted(self._told.pop(result.update).items()):
            require(f"update {result.update} of shard {other}", exact, found.exact)
        made = Updated(result.update, exact["loss"], exact["norm"], exact["coef"])
        if before.get(made.update, made) != made:
            raise unexpected(f"update {made.update}, made again", before[made.update], made)
        return made
