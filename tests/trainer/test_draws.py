"""Random integers that are the same everywhere and belong to a name."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.draws import Draws

A, B = 415, 434
FIRST = [5, 8, 2, 3, 9, 4, 8, 1]


def test_a_stream_is_known_by_its_name_forever() -> None:
    """These numbers decide who is trained: another implementation of the stream would be another experiment."""
    assert [Draws("a").below(1000), Draws("b").below(1000)] == [A, B]
    draws = Draws("a")
    assert [draws.below(10) for _ in range(8)] == FIRST


def test_the_global_generator_is_left_alone() -> None:
    before = random.getstate()
    Draws("x").shuffled(range(100))
    assert random.getstate() == before


def test_draws_are_uniform_enough() -> None:
    draws = Draws("dice")
    counts = [0] * 6
    for _ in range(6000):
        counts[draws.below(6)] += 1
    assert all(850 < count < 1150 for count in counts)


@settings(deadline=None)
@given(st.text(max_size=20), st.integers(1, 2**32))
def test_a_draw_is_below_its_bound(name: str, bound: int) -> None:
    draws = Draws(name)
    assert all(0 <= draws.below(bound) < bound for _ in range(5))


@settings(deadline=None)
@given(st.text(max_size=20), st.lists(st.integers(), max_size=40))
def test_a_shuffle_keeps_every_item(name: str, items: list[int]) -> None:
    assert sorted(Draws(name).shuffled(items)) == sorted(items)
    assert Draws(name).shuffled(items) == Draws(name).shuffled(items)
