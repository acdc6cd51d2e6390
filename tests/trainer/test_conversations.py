"""Real conversations, each once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptError, MalformedError
from ckptstore.format.digest import Digest
from trainer.data import conversations
from trainer.data.conversations import Conversation, by_opening, distinct


def test_the_package_has_2026_conversations_and_899_are_distinct() -> None:
    corpus = conversations.load()
    assert (corpus.total, len(corpus.conversations)) == (2026, 899)
    assert len(set(corpus.conversations)) == 899


def test_an_answer_of_no_stays_a_text() -> None:
    answers = {turn for one in conversations.load().conversations for turn in one.turns}
    assert "No" in answers or "No." in answers
    assert all(type(turn) is str for turn in answers)


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LISTING", Digest.of(b"another release"))
    with pytest.raises(CorruptError, match=r"1\.3\.3"):
        conversations.load()


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=2, max_size=3)))
def test_each_content_is_kept_where_it_first_appears(turns: list[list[str]]) -> None:
    corpus = distinct(turns)
    kept = [one.turns for one in corpus.conversations]
    assert len(set(kept)) == len(kept)
    assert set(kept) == {tuple(one) for one in turns}
    assert kept == sorted(kept, key=[tuple(one) for one in turns].index)
    assert corpus.total == len(turns)


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=2, max_size=3)))
def test_groups_share_their_opening_and_no_two_groups_do(turns: list[list[str]]) -> None:
    groups = list(by_opening(distinct(turns).conversations))
    openings = [{one.turns[0] for one in group} for group in groups]
    assert all(len(opening) == 1 for opening in openings)
    assert len(set().union(*openings)) == len(groups)


@pytest.mark.parametrize("turns", [(), ("alone",), ("question", "")])
def test_half_a_conversation_is_none(turns: tuple[str, ...]) -> None:
    with pytest.raises(MalformedError):
        Conversation(turns)
