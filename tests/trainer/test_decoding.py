"""Which blocks a pass computes: whatever texts come and end, each finds what is before it, and no room is shared."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from trainer.compute.config import Decoding
from trainer.compute.decoding import Stream


def walk(
    lengths: list[int], grows: list[int], shape: Decoding, *, cache: bool
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Continue texts until each has grown by its number of tokens; (case, block) of all slots, in order.

    On the way, everything that attention relies on is checked.
    """
    texts = [[7] * length for length in lengths]
    stream = Stream(texts, range(len(texts)), range(shape.slots), shape, cache=cache)
    rooms: dict[int, tuple[int, list[int]]] = {}  # by room: whose it is, and how many tokens each block was made of
    computed: list[tuple[int, int]] = []
    while slots := stream.slots():
        assert len(slots) <= shape.slots
        for slot in slots:
            if slot.block == 0:
                rooms[slot.room] = slot.case, []
            owner, kept = rooms[slot.room]
            assert owner == slot.case
            del kept[slot.block :]
            assert len(kept) == slot.block
            assert all(tokens == shape.block for tokens in kept)
            kept.append(min(shape.block, len(texts[slot.case]) - slot.block * shape.block))
            assert kept[-1] > 0
            computed.append((slot.case, slot.block))
        for slot in slots:
            if slot.last is None:
                assert rooms[slot.room][1][slot.block] == shape.block
                continue
            assert slot.block * shape.block + slot.last == len(texts[slot.case]) - 1
            grown = len(texts[slot.case]) + 1 - lengths[slot.case]
            stream.take(slot.case, 9, ended=grown == grows[slot.case])
    return texts, computed


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), max_size=9),
    st.integers(1, 6),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_text_is_continued_and_each_block_finds_what_is_before_it(
    cases: list[tuple[int, int]], block: int, slots: int, cache: bool
) -> None:
    lengths, grows = [length for length, _ in cases], [grow for _, grow in cases]
    texts, _ = walk(lengths, grows, Decoding(block, slots, 30 * block), cache=cache)
    assert [len(text) for text in texts] == [length + grow for length, grow in cases]


def test_with_a_cache_a_full_block_is_computed_once_and_without_one_for_every_token() -> None:
    shape = Decoding(block=4, slots=3, positions=20)
    _, cached = walk([10], [5], shape, cache=True)
    assert [block for _, block in cached] == [0, 1, 2, 2, 2, 3, 3]
    _, again = walk([10], [5], shape, cache=False)
    assert [block for _, block in again] == [0, 1, 2] * 3 + [0, 1, 2, 3] * 2


def test_all_workers_find_the_same_slots() -> None:
    draw = random.Random(3)
    lengths, grows = [draw.randint(1, 30) for _ in range(20)], [draw.randint(1, 12) for _ in range(20)]
    shape = Decoding(4, 6, 44)
    assert walk(lengths, grows, shape, cache=True) == walk(lengths, grows, shape, cache=True)


@pytest.mark.parametrize("shape", [(0, 1, 4), (4, 0, 4), (4, 1, 0), (4, 1, 6), (8, 1, 8_200), (64, 129, 64)])
def test_shapes_that_no_pass_can_have_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError):
        Decoding(*shape)


def test_there_are_positions_for_the_longest_prompt_and_answer() -> None:
    assert Decoding.fitting(50, 6, block=8, slots=4).positions == 56
    assert Decoding.fitting(51, 6, block=8, slots=4).positions == 64
