"""Comparing two evaluations of the same documents, and saying honestly what that supports.

The bound is descriptive: it treats the documents as a sample with normal mean differences, and says nothing about other
documents, other seeds or other runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from statistics import NormalDist

from ckptstore.errors import UsageError
from trainer.preparation.plan import Criteria
from trainer.scoring.evaluation import Answer, Loss, Result


@dataclass(frozen=True, slots=True)
class Paired:
    """Loss after minus loss before, document by document, in nats.

    ``deviation`` is that of the sample (n − 1), ``error`` of the mean; ``upper`` is the one-sided normal bound
    ``mean + z · error`` at ``confidence``.
    """

    documents: int
    before: float
    after: float
    mean: float
    deviation: float
    error: float
    upper: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Answers before and after, case by case: ``wins`` became right, ``losses`` became wrong, ``ties`` stayed."""

    cases: int
    before: int
    after: int
    wins: int
    losses: int
    ties: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One set in two evaluations; ``outcomes`` is None where no answers were generated."""

    name: str
    loss: Paired
    outcomes: Outcomes | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the criteria of the plan are met, with every reason why not, or with what was met."""

    promote: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'promote' if self.promote else 'do not promote'}: {'; '.join(self.reasons)}"


def paired(before: Sequence[Loss], after: Sequence[Loss], confidence: float) -> Paired:
    """Statistics of the differences.

    Raises:
        UsageError: other documents or another order before than after, or fewer than two.
    """
    _require_same(before, after)
    if len(before) < 2:
        raise UsageError("comparison of losses", f"{len(before)} documents have no standard deviation")
    count = len(before)
    differences = [new.nats - old.nats for old, new in zip(before, after, strict=True)]
    mean = fsum(differences) / count
    deviation = sqrt(fsum((difference - mean) ** 2 for difference in differences) / (count - 1))
    error = deviation / sqrt(count)
    return Paired(
        documents=count,
        before=fsum(loss.nats for loss in before) / count,
        after=fsum(loss.nats for loss in after) / count,
        mean=mean,
        deviation=deviation,
        error=error,
        upper=mean + NormalDist().inv_cdf(confidence) * error,
        confidence=confidence,
    )


def outcomes(before: Sequence[Answer], after: Sequence[Answer]) -> Outcomes:
    """Wins, losses and ties. UsageError for other documents, or another order, before than after."""
    _require_same(before, after)
    pairs = [(old.correct, new.correct) for old, new in zip(before, after, strict=True)]
    return Outcomes(
        cases=len(pairs),
        before=sum(old for old, _ in pairs),
        after=sum(new for _, new in pairs),
        wins=pairs.count((False, True)),
        losses=pairs.count((True, False)),
        ties=sum(old == new for old, new in pairs),
    )


def compare(before: Result, after: Result, confidence: float) -> tuple[Comparison, ...]:
    """Every set of two evaluations of the same plan. Errors as in :func:`paired` and :func:`outcomes`."""
    if [one.name for one in before.sets] != [one.name for one in after.sets]:
        raise UsageError("comparison of evaluations", "they do not have the same sets")
    return tuple(
        Comparison(
            old.name,
            paired(old.losses, new.losses, confidence),
            outcomes(old.answers, new.answers) if old.answers or new.answers else None,
        )
        for old, new in zip(before.sets, after.sets, strict=True)
    )


def verdict(criteria: Criteria, comparisons: Sequence[Comparison]) -> Verdict:
    """What the comparisons of start and end support under criteria that were frozen before training.

    Raises:
        UsageError: a set that the criteria name was not compared.
    """
    by_name = {comparison.name: comparison for comparison in comparisons}
    absent = [name for name in (*criteria.better, *criteria.kept) if name not in by_name]
    if absent:
        raise UsageError("verdict", f"no comparison of {', '.join(absent)}")
    against, met = [], []
    for name in criteria.better:
        loss = by_name[name].loss
        if loss.upper < 0:
            met.append(f"loss on {name} fell by {-loss.mean:.5f} (upper bound {loss.upper:+.5f})")
        elif loss.mean < 0:
            against.append(f"loss on {name} fell by {-loss.mean:.5f}, but upper bound {loss.upper:+.5f} is not below 0")
        else:
            against.append(f"loss on {name} did not fall: {loss.mean:+.5f} (upper bound {loss.upper:+.5f})")
    for name in criteria.kept:
        loss = by_name[name].loss
        within = loss.upper <= criteria.margin
        text = f"loss on {name} {loss.mean:+.5f} (upper bound {loss.upper:+.5f}, margin {criteria.margin:+.5f})"
        (met if within else against).append(text)
    for comparison in comparisons:
        cases = comparison.outcomes
        if cases is not None:
            text = f"{comparison.name} correct {cases.before}/{cases.cases} before, {cases.after}/{cases.cases} after"
            (met if cases.after >= cases.before else against).append(text)
    return Verdict(not against, tuple(against or met))


def _require_same(before: Sequence[Loss] | Sequence[Answer], after: Sequence[Loss] | Sequence[Answer]) -> None:
    if [one.document for one in before] != [one.document for one in after]:
        raise UsageError("comparison", "not the same documents in the same order", "compare evaluations of one plan")
