"""Questions with one right answer, and a checker that accepts nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import MalformedError
from trainer.data.draws import Draws
from trainer.data.families import EASY, FAMILIES, HARD, Difficulty, check, make, solve

EXAMPLES = {
    '{"task":"lookup","data":{"red":41,"teal":77,"lime":12},"key":"teal"}': 77,
    '{"task":"largest","items":[31,93,47]}': 93,
    '{"task":"last","items":["owl","cat","yak"]}': "yak",
    '{"task":"count_on","items":{"ant":"on","fox":"off","pig":"on"}}': 2,
}


@pytest.mark.parametrize(("question", "value"), EXAMPLES.items())
def test_each_family_has_its_answer(question: str, value: int | str) -> None:
    assert solve(question) == value
    assert check(question, json.dumps({"value": value}))


@settings(deadline=None)
@given(st.sampled_from(FAMILIES), st.sampled_from([EASY, HARD]), st.integers(0, 10**6))
def test_a_made_task_is_answered_right(family: str, difficulty: Difficulty, seed: int) -> None:
    task = make(family, Draws(f"test {seed}"), difficulty)
    assert json.loads(task.question)["task"] == family
    assert check(task.question, task.answer)
    body = json.loads(task.question)
    assert len(body.get("items", body.get("data"))) == difficulty.items


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "[2]",
        '{"value":3}',
        '{"value":"2"}',
        '{"value":2.0}',
        '{"value":true}',
        '{"value":null}',
        '{"value":2,"value":2}',
        '{"value":3,"value":2}',
        '{"value":2,"more":1}',
        '{"valu":2}',
        '{"value":{"value":2}}',
        '{"value":2}}',
        '{"value":2} ok',
        'x{"value":2}',
        '{"value":2',
        '{"value":NaN}',
        "[" * 100_000,
        '{"value":' + "1" * 10_000 + "}",
    ],
)
def test_nothing_but_the_right_object_is_right(text: str) -> None:
    assert not check('{"task":"count_on","items":{"ant":"on","fox":"off","pig":"on"}}', text)


def test_true_is_not_one() -> None:
    question = '{"task":"count_on","items":{"ant":"on","fox":"off","pig":"off"}}'
    assert check(question, '{"value":1}')
    assert not check(question, '{"value":true}')


@pytest.mark.parametrize(
    "question",
    ["", "[]", '{"task":"sum","items":[1]}', '{"task":"largest","items":[]}', '{"task":"last","items":[[1]]}'],
)
def test_a_question_of_no_family_is_an_error(question: str) -> None:
    with pytest.raises(MalformedError, match="question"):
        check(question, '{"value":1}')
