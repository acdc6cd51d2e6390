"""What is kept of a text, and that nothing is seen of the one that was there before."""

from __future__ import annotations

import torch

from trainer.compute.cache import Cache
from trainer.compute.config import PRESETS, Decoding
from trainer.compute.decoding import Slot
from trainer.compute.model import Shard

SHAPE = Decoding(block=4, slots=3, positions=12)


def make_cache() -> Cache:
    with torch.device("meta"):
        shard = Shard(PRESETS["demo"], 0, 2, True)
    return Cache(shard, SHAPE, 2, torch.device("cpu"))


def blocks(*values: float) -> torch.Tensor:
    """Keys or values of a pass, [slots, kv_heads, block, head_dim], each block of one number."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None].expand(3, 2, 4, 32)


def seen(cache: Cache, layer: int, slots: list[Slot], *values: float) -> list[list[float]]:
    """By slot, which number each block of the keys has that it sees."""
    _, keeps = cache.at(slots)
    keys, seen_values = keeps[layer](blocks(*values), blocks(*(-value for value in values)))
    assert keys.shape == (3, 2, 12, 32)
    assert torch.equal(keys, -seen_values)
    return [keys[at, 0, ::4, 0].tolist() for at in range(3)]


def test_a_block_sees_what_was_kept_before_it_and_what_is_in_its_own_pass() -> None:
    cache = make_cache()
    first, second, other = Slot(0, 0, 0, None), Slot(0, 0, 1, 3), Slot(1, 1, 0, 2)
    assert seen(cache, 0, [first, second, other], 1, 2, 3)[:3] == [[1, 2, 0], [1, 2, 0], [3, 0, 0]]
    assert seen(cache, 0, [Slot(0, 0, 2, 0), other], 5, 6, 7)[:2] == [[1, 2, 5], [6, 0, 0]]


def test_nothing_is_seen_of_the_text_that_was_in_the_room_before() -> None:
    cache = make_cache()
    for layer in range(2):
        seen(cache, layer, [Slot(0, 0, n, None) for n in range(3)], 9, 9, 9)
    for layer in range(2):
        assert seen(cache, layer, [Slot(2, 0, 0, 1)], 1, 8, 8)[0] == [1, 0, 0]


def test_slots_that_nobody_needs_touch_no_text() -> None:
    cache = make_cache()
    text = Slot(0, 0, 0, None)
    seen(cache, 1, [text, Slot(1, 1, 0, None)], 1, 2, 8)
    assert seen(cache, 1, [Slot(0, 0, 1, 0)], 3, 8, 8)[0] == [1, 3, 0]
    assert seen(cache, 1, [Slot(1, 1, 1, 0)], 4, 8, 8)[0] == [2, 4, 0]


def test_a_block_stands_where_its_number_says() -> None:
    places, _ = make_cache().at([Slot(0, 0, 2, None), Slot(1, 1, 0, None)])
    assert places.cos.shape == (3, 1, 4, 32)
    assert places.future.shape == (3, 1, 4, 12)
    assert (~places.future[:, 0]).sum(-1).tolist() == [[9, 10, 11, 12], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert torch.equal(places.cos[1, 0, 0], torch.ones(32))
    assert not torch.equal(places.cos[0, 0, 0], torch.ones(32))
