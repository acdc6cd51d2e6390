"""What the workers of a group say of an evaluation, held against each other and against what the plan promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptstore import Digest
from trainer.lifecycle.expect import require
from trainer.scoring.evaluation import Result, require_equal
from trainer.workers.events import Event


def agreed(step: int, root: Digest | None, events: Sequence[Event]) -> tuple[Result, dict[str, Any]]:
    """The result on which all workers agree, and the evaluation's entry in the report.

    Args:
        step: how many updates the weights have seen.
        root: the checkpoint that they are from; None for the starting weights.
        events: by shard, what each worker said when it had evaluated.

    Raises:
        CorruptError: the results are not the same.
        NotAsPlannedError: they are of another step, or decoding without a cache gave other logits.
    """
    found = {f"shard {shard}": Result.parse(event["result"].encode()) for shard, event in enumerate(events)}
    digest = require_equal(found)
    first, again = events[0], events[0]["recomputed"]
    require("update that was evaluated", [step] * len(events), [result.update for result in found.values()])
    differing = [event["recomputed"]["differs"] for event in events]
    require(f"(answer, token) whose logits differ without a cache, update {step}", [None] * len(events), differing)
    return found["shard 0"], {
        "update": step,
        "root": None if root is None else str(root),
        "digest": str(digest),
        "workers": {name: str(one.digest) for name, one in found.items()},
        "tokens": first["tokens"],
        "tokens_per_second": _rate(first["tokens"], first["answers_ms"]),
        "recomputed": {
            "cases": again["cases"],
            "logits": again["steps"],
            "tokens": again["tokens"],
            "tokens_per_second": _rate(again["tokens"], again["ms"]),
        },
        "smallest_margin": first["margin"],
    }


def _rate(tokens: int, milliseconds: float) -> float:
    """Tokens a second; 0 where nothing was measured."""
    return 1000 * tokens / milliseconds if milliseconds else 0.0
