"""An evaluation counts only if all workers say the same, and if no logit depends on the cache."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.errors import CorruptError
from tests.support.demo import demo_inputs, demo_plan
from trainer.lifecycle import scored
from trainer.lifecycle.expect import NotAsPlannedError
from trainer.scoring import evaluation
from trainer.workers.events import Event, make


def event(update: int = 32, shift: float = 0.0, differs: list[int] | None = None) -> Event:
    names, asked = evaluation.scored_documents(demo_plan()), evaluation.asked_documents(demo_plan())
    losses = [1.0 + shift] + [1.0] * (len(names) - 1)
    result = evaluation.make_result(demo_inputs(), update, losses, [((65,), True) for _ in asked])
    fields: dict[str, Any] = {
        "result": result.encode().decode(),
        "margin": 0.5,
        "tokens": 32,
        "answers_ms": 500.0,
        "recomputed": {"cases": 2, "tokens": 2, "steps": 4, "differs": differs, "ms": 100.0},
    }
    return make("evaluated", fields)


def test_the_entry_says_how_fast_answers_came_with_a_cache_and_without_one() -> None:
    result, entry = scored.agreed(32, None, [event(), event()])
    assert result.update == 32
    assert (entry["tokens_per_second"], entry["recomputed"]["tokens_per_second"]) == (64.0, 20.0)
    assert (entry["recomputed"]["logits"], entry["recomputed"]["cases"]) == (4, 2)
    assert entry["workers"] == {"shard 0": str(result.digest), "shard 1": str(result.digest)}


def test_workers_that_disagree_are_refused() -> None:
    with pytest.raises(CorruptError, match="shard 0 and shard 1 differ"):
        scored.agreed(32, None, [event(), event(shift=2**-52)])


def test_an_evaluation_of_another_step_is_refused() -> None:
    with pytest.raises(NotAsPlannedError, match="update that was evaluated"):
        scored.agreed(64, None, [event(), event()])


def test_a_logit_that_is_another_without_a_cache_ends_the_run() -> None:
    with pytest.raises(NotAsPlannedError, match=r"without a cache, update 32.*\[5, 3\]"):
        scored.agreed(32, None, [event(differs=[5, 3]), event(differs=[5, 3])])
