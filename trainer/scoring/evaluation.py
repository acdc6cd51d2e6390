"""What an evaluation found, as a frozen value with one digest: exact losses, and answers with verdicts. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite

from ckptstore.errors import CorruptError, MalformedError, NotFoundError
from ckptstore.format.digest import Digest
from trainer.data import families
from trainer.preparation import records
from trainer.preparation.inputs import Inputs
from trainer.preparation.plan import Plan

RESULT_LIMIT = 4 * 2**20  # bytes


@dataclass(frozen=True, slots=True)
class Loss:
    """Mean cross-entropy of a document's answer, in nats a token."""

    document: str
    nats: float

    def __post_init__(self) -> None:
        if not isfinite(self.nats):
            raise MalformedError(f"loss of {self.document}", f"{self.nats} is not a number to compare")


@dataclass(frozen=True, slots=True)
class Answer:
    """A generated answer: its tokens without the end token, and their text.

    ``ended`` tells whether the end token came before the cap; an answer that was cut off is not ``correct``.
    """

    document: str
    tokens: tuple[int, ...]
    text: str
    ended: bool
    correct: bool


@dataclass(frozen=True, slots=True)
class SetResult:
    """Results of one evaluation set, in the order of the plan."""

    name: str
    losses: tuple[Loss, ...]
    answers: tuple[Answer, ...]

    @property
    def mean(self) -> float:
        """Mean loss in nats a document; the sum is correctly rounded."""
        return fsum(loss.nats for loss in self.losses) / len(self.losses)

    @property
    def correct(self) -> int:
        """How many generated answers are right."""
        return sum(answer.correct for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Result:
    """The whole evaluation of the weights after ``update`` updates; equal on all workers, bit for bit."""

    update: int
    sets: tuple[SetResult, ...]

    @property
    def digest(self) -> Digest:
        """BLAKE3 of :meth:`encode`; two workers that computed alike have the same."""
        return Digest.of(self.encode())

    def of(self, name: str) -> SetResult:
        """The results of a set. NotFoundError if it was not evaluated."""
        for one in self.sets:
            if one.name == name:
                return one
        raise NotFoundError(f"evaluation set {name!r:.40}", f"not in the result after update {self.update}")

    def encode(self) -> bytes:
        """Canonical bytes, floats in hexadecimal."""
        return records.encode(self)

    @staticmethod
    def parse(data: bytes) -> Result:
        """The result of canonical bytes. MalformedError if they are not one."""
        return records.parse(Result, data, RESULT_LIMIT, "evaluation")


def scored_documents(plan: Plan) -> tuple[str, ...]:
    """Names of all documents that are scored, set after set: the order in which :func:`make_result` takes losses."""
    return tuple(name for one in plan.evaluation.sets for name in one.documents)


def asked_documents(plan: Plan) -> tuple[str, ...]:
    """Names of the documents whose answers are generated, in the order in which :func:`make_result` takes them."""
    return tuple(name for one in plan.evaluation.sets for name in one.documents[: one.generate])


def recomputed_answers(plan: Plan) -> tuple[int, ...]:
    """Which of :func:`asked_documents`, counted from 0, are answered a second time without a cache."""
    found: list[int] = []
    first = 0
    for one in plan.evaluation.sets:
        asked = min(one.generate, len(one.documents))
        found += range(first, first + min(plan.evaluation.recomputed, asked))
        first += asked
    return tuple(found)


def make_result(
    inputs: Inputs, update: int, losses: Sequence[float], generated: Sequence[tuple[Sequence[int], bool]]
) -> Result:
    """Check the answers and put the numbers in their places.

    Args:
        inputs: the plan and its documents.
        update: how many updates the weights have seen.
        losses: one for each of :func:`scored_documents`, in nats a token.
        generated: for each of :func:`asked_documents` its tokens, and whether the end token came before the cap.

    Raises:
        MalformedError: another number of losses or answers than the plan asks for, or a loss that is not finite.
    """
    names, asked = scored_documents(inputs.plan), asked_documents(inputs.plan)
    if len(losses) != len(names) or len(generated) != len(asked):
        why = f"{len(losses)} losses and {len(generated)} answers, expected {len(names)} and {len(asked)}"
        raise MalformedError(f"evaluation after update {update}", why)
    loss_of = dict(zip(names, losses, strict=True))
    answers = {name: answer(inputs, name, *one) for name, one in zip(asked, generated, strict=True)}
    return Result(
        update,
        tuple(
            SetResult(
                one.name,
                tuple(Loss(name, loss_of[name]) for name in one.documents),
                tuple(answers[name] for name in one.documents[: one.generate]),
            )
            for one in inputs.plan.evaluation.sets
        ),
    )


def answer(inputs: Inputs, name: str, tokens: Sequence[int], ended: bool) -> Answer:
    """The answer to the task ``name``, checked by its family's checker."""
    tokenizer = inputs.tokenizer
    text = tokenizer.decode([token for token in tokens if token not in (tokenizer.end, tokenizer.pad)])
    correct = ended and families.check(inputs.documents[name].turns[0], text)
    return Answer(name, tuple(tokens), text, ended, correct)


def require_equal(results: Mapping[str, Result]) -> Digest:
    """The one digest of results by worker.

    Raises:
        CorruptError: the workers disagree; says in which set and document first.
    """
    (first, expected), *others = results.items()
    for worker, result in others:
        if result.encode() != expected.encode():
            where = _first_difference(expected, result)
            raise CorruptError(f"evaluation after update {expected.update}", f"{first} and {worker} differ in {where}")
    return expected.digest


def _first_difference(a: Result, b: Result) -> str:
    for left, right in zip(a.sets, b.sets, strict=False):
        found: tuple[Loss | Answer, ...] = (*left.losses, *left.answers)
        for one, other in zip(found, (*right.losses, *right.answers), strict=False):
            if records.encode(one) != records.encode(other):
                return f"document {one.document} of {left.name}: {one} and {other}"
    return "what was evaluated"
