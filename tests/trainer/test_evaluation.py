"""Results that two workers can compare by one digest, and answers that are checked."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from ckptstore.errors import CorruptError, MalformedError, NotFoundError
from tests.support.demo import demo_inputs, demo_plan
from trainer.data.bytetokenizer import EOS
from trainer.scoring import evaluation
from trainer.scoring.evaluation import Result

SCORED = evaluation.scored_documents(demo_plan())
ASKED = evaluation.asked_documents(demo_plan())


def _right(name: str) -> list[int]:
    return list(demo_inputs().documents[name].turns[1].encode())


def _result(update: int = 32) -> Result:
    losses = [1 / (3 + i) for i in range(len(SCORED))]
    return evaluation.make_result(demo_inputs(), update, losses, [(_right(name), True) for name in ASKED])


def test_64_documents_of_each_set_are_scored_and_16_of_each_task_set_answered() -> None:
    result = _result()
    assert [(one.name, len(one.losses), len(one.answers)) for one in result.sets] == [
        ("test-a", 64, 16),
        ("test-b", 64, 16),
        ("retention", 64, 0),
    ]


def test_one_answer_of_each_task_set_is_computed_a_second_time() -> None:
    assert evaluation.recomputed_answers(demo_plan()) == (0, 16)
    assert [ASKED[number] for number in (0, 16)] == ["test-a-00", "test-b-00"]


def test_there_are_positions_for_every_prompt_and_its_answer() -> None:
    asked, inputs = demo_plan().evaluation, demo_inputs()
    longest = max(len(inputs.prompt(name)) for name in ASKED)
    assert 0 <= asked.decoding.positions - longest - asked.token_cap < asked.decoding.block


def test_a_result_comes_back_with_every_bit_of_its_losses() -> None:
    result = _result()
    again = Result.parse(result.encode())
    assert again == result
    assert again.digest == result.digest
    for one, other in zip(again.of("test-b").losses, result.of("test-b").losses, strict=True):
        assert struct.pack("<d", one.nats) == struct.pack("<d", other.nats)


def test_an_answer_counts_only_if_it_is_right_and_ended() -> None:
    name = ASKED[0]
    right = _right(name)
    inputs = demo_inputs()
    assert evaluation.answer(inputs, name, right, True).correct
    assert evaluation.answer(inputs, name, right, True).text == inputs.documents[name].turns[1]
    assert not evaluation.answer(inputs, name, right, False).correct
    assert not evaluation.answer(inputs, name, right[:-1], True).correct
    assert not evaluation.answer(inputs, name, [0xFF, *right], True).correct
    assert evaluation.answer(inputs, name, [*right, EOS], True).correct


def test_workers_that_agree_have_one_digest() -> None:
    assert evaluation.require_equal({"worker 0": _result(), "worker 1": _result()}) == _result().digest


def test_workers_that_differ_in_one_bit_are_told_where() -> None:
    result = _result()
    first = result.sets[0]
    loss = first.losses[5]
    changed = replace(loss, nats=loss.nats + 2**-53)
    other = replace(
        result, sets=(replace(first, losses=(*first.losses[:5], changed, *first.losses[6:])), *result.sets[1:])
    )
    with pytest.raises(CorruptError, match="worker 0 and worker 1 differ in document test-a-05 of test-a"):
        evaluation.require_equal({"worker 0": result, "worker 1": other})


def test_another_number_of_losses_or_answers_is_refused() -> None:
    with pytest.raises(MalformedError, match="1 losses and 0 answers, expected 192 and 32"):
        evaluation.make_result(demo_inputs(), 0, [1.0], [])


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_refused(loss: float) -> None:
    with pytest.raises(MalformedError, match="test-a-00"):
        evaluation.make_result(
            demo_inputs(), 0, [loss] + [1.0] * (len(SCORED) - 1), [(_right(name), True) for name in ASKED]
        )


def test_a_set_that_was_not_evaluated_is_named() -> None:
    with pytest.raises(NotFoundError, match="test-c"):
        _result().of("test-c")
