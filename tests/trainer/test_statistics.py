"""Paired differences as the books have them, and a verdict that says no when it has to."""

from __future__ import annotations

import statistics as reference
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import MalformedError, UsageError
from trainer.preparation.plan import Criteria
from trainer.scoring.evaluation import Answer, Loss, Result, SetResult
from trainer.scoring.statistics import Verdict, compare, outcomes, paired, verdict

CRITERIA = Criteria(better=("a", "b"), kept=("r",), margin=0.02, confidence=0.99)
FINITE = st.floats(0, 20, allow_nan=False)


def _losses(values: Sequence[float]) -> tuple[Loss, ...]:
    return tuple(Loss(f"d-{i}", value) for i, value in enumerate(values))


def _answers(correct: Sequence[bool]) -> tuple[Answer, ...]:
    return tuple(Answer(f"d-{i}", (), "", True, one) for i, one in enumerate(correct))


@settings(deadline=None)
@given(st.lists(st.tuples(FINITE, FINITE), min_size=2, max_size=70))
def test_the_figures_are_those_of_the_standard_library(pairs: list[tuple[float, float]]) -> None:
    before, after = zip(*pairs, strict=True)
    found = paired(_losses(before), _losses(after), 0.99)
    differences = [b - a for a, b in pairs]
    assert found.mean == pytest.approx(reference.fmean(differences), abs=1e-12)
    assert found.deviation == pytest.approx(reference.stdev(differences), abs=1e-9)
    assert found.error == found.deviation / sqrt(len(pairs))
    assert found.upper == pytest.approx(found.mean + 2.3263478740408408 * found.error, abs=1e-12)


def test_the_published_bound_comes_out() -> None:
    """A mean of 0.05305 and a bound of 0.06398 over 64 documents imply a deviation of 0.0376."""
    swing = 0.0376 * sqrt(63 / 64)
    before = [1.0] * 64
    after = [1.05305 + (swing if i % 2 else -swing) for i in range(64)]
    assert round(paired(_losses(before), _losses(after), 0.99).upper, 5) == 0.06398


# Mean loss over 64 documents, and right answers of 16: starting weights, step 32 and step 64 of the published run.
PUBLISHED = {
    "test-a": ((0.14408, 0.19811, 0.18319), 12),
    "test-b": ((0.14574, 0.20660, 0.18456), 11),
    "retention": ((0.54436, 0.55522, 0.59741), None),
}
DEVIATION = 0.0376  # of the differences of retention from start to end, which the published bound implies


def _published(stage: int) -> Result:
    """A result with the published means, whose retention differs from the start by +-DEVIATION in turn."""
    swing = DEVIATION * sqrt(63 / 64) * (stage > 0)
    sets = []
    for name, (means, correct) in PUBLISHED.items():
        losses = [means[stage] + (swing if i % 2 else -swing) * (name == "retention") for i in range(64)]
        answers = () if correct is None else _answers([i < correct for i in range(16)])
        sets.append(SetResult(name, _losses(losses), answers))
    return Result(32 * stage, tuple(sets))


def test_the_published_run_is_not_promoted() -> None:
    criteria = Criteria(("test-a", "test-b"), ("retention",), 0.02, 0.99)
    compared = compare(_published(0), _published(2), criteria.confidence)
    a, b, retention = (one.loss for one in compared)
    assert [round(one.mean, 5) for one in (a, b, retention)] == [0.03911, 0.03882, 0.05305]
    assert round(retention.upper, 5) == 0.06398
    assert [(one.outcomes.before, one.outcomes.wins, one.outcomes.losses) for one in compared if one.outcomes] == [
        (12, 0, 0),
        (11, 0, 0),
    ]
    found = verdict(criteria, compared)
    assert not found.promote
    assert found.reasons == (
        "loss on test-a did not fall: +0.03911 (upper bound +0.03911)",
        "loss on test-b did not fall: +0.03882 (upper bound +0.03882)",
        "loss on retention +0.05305 (upper bound +0.06398, margin +0.02000)",
    )


def test_the_published_second_cohort_lowered_the_losses_of_tasks_and_raised_retention() -> None:
    signs = [one.loss.mean > 0 for one in compare(_published(1), _published(2), 0.99)]
    assert signs == [False, False, True]


@pytest.mark.parametrize("changes", [{"confidence": 1.0}, {"confidence": 0.4}, {"margin": -0.1}])
def test_criteria_that_bound_nothing_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(MalformedError):
        replace(CRITERIA, **changes)
    with pytest.raises(MalformedError, match="anything would be promoted"):
        replace(CRITERIA, better=(), kept=())


def test_wins_losses_and_ties_are_counted_case_by_case() -> None:
    found = outcomes(_answers([True, True, False, False]), _answers([True, False, True, False]))
    assert (found.cases, found.before, found.after) == (4, 2, 2)
    assert (found.wins, found.losses, found.ties) == (1, 1, 2)


def test_other_documents_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match="same documents"):
        paired(_losses([1, 2]), _losses([1, 2])[::-1], 0.99)
    with pytest.raises(UsageError, match="same documents"):
        outcomes(_answers([True]), _answers([True, True]))
    with pytest.raises(UsageError, match="standard deviation"):
        paired(_losses([1]), _losses([1]), 0.99)


def _result(update: int, shift: dict[str, float], correct: dict[str, int]) -> Result:
    return Result(
        update,
        tuple(
            SetResult(
                name,
                _losses([1 + shift.get(name, 0) + 0.001 * (i % 3) * (update > 0) for i in range(64)]),
                _answers([i < correct.get(name, 8) for i in range(16)]) if name != "r" else (),
            )
            for name in ("a", "b", "r")
        ),
    )


def _verdict(shift: dict[str, float], correct: dict[str, int] | None = None) -> Verdict:
    start = _result(0, {}, {})
    return verdict(CRITERIA, compare(start, _result(64, shift, correct or {}), CRITERIA.confidence))


def test_better_on_the_tasks_and_kept_elsewhere_is_promoted() -> None:
    found = _verdict({"a": -0.1, "b": -0.2, "r": 0.01})
    assert found.promote
    assert str(found).startswith("promote: ")


@pytest.mark.parametrize(
    ("shift", "correct", "reason"),
    [
        ({"a": 0.0, "b": -0.2}, {}, "loss on a did not fall"),
        ({"a": -0.00101, "b": -0.2}, {}, "loss on a fell by 0.00003, but upper bound"),
        ({"a": -0.1, "b": -0.2, "r": 0.02}, {}, "loss on r"),
        ({"a": -0.1, "b": -0.2}, {"b": 7}, "b correct 8/16 before, 7/16 after"),
    ],
)
def test_anything_less_is_not_promoted_and_says_why(
    shift: dict[str, float], correct: dict[str, int], reason: str
) -> None:
    found = _verdict(shift, correct)
    assert not found.promote
    assert len(found.reasons) == 1
    assert reason in found.reasons[0]
    assert str(found).startswith("do not promote: ")


def test_a_set_that_was_not_compared_cannot_be_judged() -> None:
    comparisons = compare(_result(0, {}, {}), _result(64, {}, {}), 0.99)
    with pytest.raises(UsageError, match="no comparison of c"):
        verdict(replace(CRITERIA, kept=("c",)), comparisons)
