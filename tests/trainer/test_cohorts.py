"""Who is trained when: counts, memberships, and that nothing is on both sides."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from ckptstore.errors import MalformedError, RefusedError
from tests.support.demo import demo_cohorts
from trainer.data import cohorts, conversations
from trainer.data.cohorts import Counts, Document
from trainer.data.families import FAMILIES, check


def test_the_counts_are_those_of_the_experiment() -> None:
    drawn = demo_cohorts()
    assert {name: len(documents) for name, documents in drawn.sets().items()} == {
        "phase-one-tasks": 768,
        "phase-two-tasks": 512,
        "conversations": 256,
        "test-a": 64,
        "test-b": 64,
        "retention": 64,
    }
    assert len(drawn.replayed) == 256


def test_no_two_sets_have_words_in_common() -> None:
    digests = {name: {one.digest for one in documents} for name, documents in demo_cohorts().sets().items()}
    for (one, a), (other, b) in combinations(digests.items(), 2):
        assert not a & b, (one, other)
    assert sum(map(len, digests.values())) == len(set().union(*digests.values()))


def test_what_is_replayed_was_in_phase_one() -> None:
    drawn = demo_cohorts()
    assert set(drawn.replayed) <= set(drawn.phase_one_tasks)


def test_every_family_has_its_share() -> None:
    drawn = demo_cohorts()
    for documents in (drawn.phase_one_tasks, drawn.phase_two_tasks, drawn.replayed, drawn.test_a, drawn.test_b):
        assert Counter(one.family for one in documents) == dict.fromkeys(FAMILIES, len(documents) // 4)
    for documents in (drawn.test_a, drawn.test_b):
        assert Counter(one.family for one in documents[:16]) == dict.fromkeys(FAMILIES, 4)


def test_every_task_has_its_right_answer() -> None:
    tasks = [one for documents in demo_cohorts().sets().values() for one in documents if one.is_task]
    assert all(check(*one.turns) for one in tasks)


def test_no_held_out_conversation_opens_like_a_trained_one() -> None:
    drawn = demo_cohorts()
    trained = {one.turns[0] for one in drawn.conversations}
    assert not trained & {one.turns[0] for one in drawn.retention}


def test_another_seed_draws_others() -> None:
    corpus = [one for one in conversations.load().conversations if len(one.turns) == 2]
    drawn = [cohorts.draw(seed, Counts(), corpus) for seed in ("x", "x", "y")]
    assert drawn[0] == drawn[1]
    assert drawn[0].test_a != drawn[2].test_a
    assert drawn[0].retention != drawn[2].retention


def test_too_few_conversations_are_refused() -> None:
    with pytest.raises(RefusedError, match="320"):
        cohorts.draw("x", Counts(), conversations.load().conversations[:200])


def test_the_same_words_under_two_names_are_found_and_both_named() -> None:
    one = Document("a-1", "last", ("q", "a"))
    with pytest.raises(RefusedError, match=r"b-2 of there: has the words of a-1 of here"):
        cohorts.require_disjoint({"here": (one,), "there": (replace(one, name="b-2"),)})


def test_a_data_file_comes_back() -> None:
    documents = [Document("a", "last", ("q", "ä\n")), Document("b", "conversation", ("x", "y", "z", "w"))]
    assert list(cohorts.read(cohorts.write(documents))) == documents


@pytest.mark.parametrize(
    "data",
    [
        b"x\n",
        b'{"family":"last","name":"a","turns":["q","a"]}',
        b'{"family":"last","name":"a","turns":["q"]}\n',
        b'{"family":"last","name":"a","turns":["q",""]}\n',
        b'{"family":"sum","name":"a","turns":["q","a"]}\n',
        b'{"family":"last","more":1,"name":"a","turns":["q","a"]}\n',
        b'{"name":"a","family":"last","turns":["q","a"]}\n',
    ],
)
def test_a_damaged_data_file_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        list(cohorts.read(data))
