"""Packs: where short chunks lie follows from the content alone, and an insertion moves little."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.format.digest import Digest
from ckptstore.format.packs import PackLayout, ends_pack
from ckptstore.format.tensors import CHUNK, SHORT
from tests.format.strategies import patient

Item = tuple[str, bytes, int]
"""Path, what stands for the content, length in bytes."""


def layout(items: list[Item]) -> PackLayout:
    placed = PackLayout()
    for path, content, length in items:
        placed.place(path, Digest.of(content), length)
    return placed


def by_the_rule(items: list[Item]) -> list[list[tuple[bytes, int]]]:
    """Packs as the rule spells them out: lists of (content, length)."""
    packs: list[list[tuple[bytes, int]]] = [[]]
    seen: set[bytes] = set()
    for path, content, length in items:
        if content not in seen:
            seen.add(content)
            if packs[-1] and sum(size for _, size in packs[-1]) + length > 16_777_216:
                packs.append([])
            packs[-1].append((content, length))
        if packs[-1] and Digest.of(path.encode()).raw[0] & 63 == 0:
            packs.append([])
    return [pack for pack in packs if pack]


contents = st.integers(0, 60)
items_ = st.lists(
    st.tuples(st.integers(0, 300).map(lambda n: f"layers.{n}"), contents),
    max_size=120,
    unique_by=lambda item: item[0],
).map(lambda found: [(path, bytes([c]), 262_143 - 1000 * (c % 7)) for path, c in sorted(found)])


@given(items_)
@settings(patient, max_examples=100)
def test_the_layout_is_the_one_that_the_rule_spells_out(items: list[Item]) -> None:
    """F-38."""
    placed, packs = layout(items), by_the_rule(items)
    assert placed.lengths() == [sum(size for _, size in pack) for pack in packs]
    for number, pack in enumerate(packs):
        offset = 0
        for content, length in pack:
            slot = placed.slots[Digest.of(content)]
            assert (slot.pack, slot.offset, slot.length) == (number, offset, length)
            offset += length
    assert len(placed.slots) == sum(map(len, packs))


@given(items_)
@settings(patient, max_examples=50)
def test_the_layout_is_deterministic_and_no_pack_is_empty_or_too_large(items: list[Item]) -> None:
    """F-38."""
    first, again = layout(items), layout(items)
    assert first.slots == again.slots
    assert all(0 < length <= CHUNK for length in first.lengths())


def test_only_the_first_occurrence_takes_a_place() -> None:
    """F-37, F-38."""
    placed = PackLayout()
    digest = Digest.of(b"same")
    assert placed.place("a", digest, 100)
    assert not placed.place("b", digest, 100)
    assert placed.lengths() == [100]


def test_a_pack_takes_what_fits_exactly_and_no_byte_more() -> None:
    """F-38."""
    quiet = [path for n in range(200) if not ends_pack(path := f"p{n:03d}")]
    full = [(path, path.encode(), SHORT - 1) for path in quiet[:64]]  # 64 bytes are left
    assert layout([*full, ("q-fits", b"fits", 64)]).lengths() == [CHUNK]
    assert layout([*full, ("q-over", b"over", 65)]).lengths() == [CHUNK - 64, 65]
    assert layout([*full, ("q-over", b"over", 65), ("r", b"r", 64)]).lengths() == [
        CHUNK - 64,
        129,
    ]  # next fit, not first fit


def test_a_path_that_ends_a_pack_ends_it_even_if_its_chunk_is_a_repetition() -> None:
    """F-38."""
    ender = next(path for n in range(1000) if ends_pack(path := f"t{n}"))
    assert layout([("a", b"a", 100), (ender, b"a", 100), ("u", b"u", 70)]).lengths() == [100, 70]
    assert layout([("a", b"a", 100), (ender, b"b", 80), ("u", b"u", 70)]).lengths() == [180, 70]
    assert layout([(ender, b"b", 80), (f"{ender}0", b"b", 80)]).lengths() == [80]


def test_an_inserted_tensor_moves_few_packs() -> None:
    """F-38: all of 3,000 tensors lie behind the inserted one, and yet almost all packs stay."""
    items = [(f"layers.{n:04d}.weight", b"%d" % n, 200_000) for n in range(3000)]
    before = by_the_rule(items)
    for place in (0, 1, 1500, 2999):
        inserted = [*items[:place], (f"layers.{place:04d}.bias", b"new", 100_000), *items[place:]]
        after = by_the_rule(sorted(inserted))
        assert [sum(size for _, size in pack) for pack in after] == layout(sorted(inserted)).lengths()
        moved = [pack for pack in after if pack not in before]
        assert len(moved) <= 3
        assert len(before) > 50


def test_about_one_path_in_64_ends_a_pack() -> None:
    """F-38."""
    enders = sum(ends_pack(f"model.layers.{n}.weight") for n in range(6400))
    assert 50 < enders < 150
