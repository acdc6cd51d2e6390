"""Figures about two tensors' bytes, held to torch's decoding of every dtype and to exact arithmetic."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.diff.numeric import _FLOATS, PIECE, Comparison, compare, fold
from ckptstore.errors import MalformedError, UsageError
from ckptstore.format.dtypes import ITEM_SIZES

TORCH = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "u16": torch.uint16,
    "i16": torch.int16,
    "u32": torch.uint32,
    "i32": torch.int32,
    "u64": torch.uint64,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "f8e4m3fnuz": torch.float8_e4m3fnuz,
    "f8e5m2fnuz": torch.float8_e5m2fnuz,
    "f8e8m0fnu": torch.float8_e8m0fnu,
    "c32": torch.complex32,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
SIGNED_FP8 = ("f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz")
FP8 = (*SIGNED_FP8, "f8e8m0fnu")
NAN_32 = struct.pack("<I", 0x7FC00000)
OTHER_NAN_32 = struct.pack("<I", 0x7FC00001)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def doubles(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def decoded(data: bytes, dtype: str) -> list[float]:
    """By torch, and exact: every type here is narrower than 64 bits."""
    return torch.frombuffer(bytearray(data), dtype=TORCH[dtype]).double().tolist()


def test_every_dtype_of_the_format_can_be_compared() -> None:
    assert set(TORCH) == set(ITEM_SIZES)
    for dtype, size in ITEM_SIZES.items():
        assert torch.empty(0, dtype=TORCH[dtype]).element_size() == size
        found = compare(bytes(3 * size), bytes(2 * size) + bytes([1]) + bytes(size - 1), dtype)
        assert (found.elements, found.differing, found.first) == (3, 1, 2)


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZES))
@given(data=st.binary(max_size=160))
@settings(max_examples=20, deadline=None)
def test_equal_bytes_are_no_difference_whatever_they_mean(dtype: str, data: bytes) -> None:
    data = data[: len(data) // ITEM_SIZES[dtype] * ITEM_SIZES[dtype]]
    found = compare(data, data, dtype)
    assert found.same
    assert found == replace(Comparison(found.elements), nan_left=found.nan_left, nan_right=found.nan_left)


class TestBitsComeFirst:
    """B041 (pytorch/pytorch#137337, sgl-project/sglang PR#30655): value equality is no bit equality, and 0/0 is 0."""

    def test_identical_nans_are_no_difference(self) -> None:
        found = compare(NAN_32 + floats(1), NAN_32 + floats(1), "f32")
        assert found == Comparison(2, nan_left=1, nan_right=1)

    def test_another_payload_of_a_nan_is_unordered_and_spoils_no_figure(self) -> None:
        found = compare(NAN_32 + floats(1.0), OTHER_NAN_32 + floats(1.5), "f32")
        assert (found.differing, found.first, found.unordered, found.equal_values) == (2, 0, 1, 0)
        assert (found.max_abs, found.max_rel, found.max_ulp) == (0.5, 0.5 / 1.5, 2**22)
        assert (found.nan_left, found.nan_right) == (1, 1)

    def test_a_nan_against_a_number_is_unordered(self) -> None:
        found = compare(NAN_32, floats(3.0), "f32")
        assert found == Comparison(1, differing=1, first=0, unordered=1, nan_left=1)

    def test_zeros_of_either_sign_have_equal_values_and_other_bits(self) -> None:
        found = compare(floats(-0.0, 1.0), floats(0.0, 1.0), "f32")
        assert found == Comparison(2, differing=1, first=0, equal_values=1)

    def test_zeros_have_no_relative_difference(self) -> None:
        assert compare(bytes(64), bytes(64), "f32") == Comparison(16)

    def test_equal_infinities_are_no_difference(self) -> None:
        assert compare(floats(math.inf, -math.inf), floats(math.inf, -math.inf), "f32") == Comparison(2)

    @pytest.mark.parametrize(("left", "right"), [(math.inf, -math.inf), (math.inf, 1.0), (0.0, -math.inf)])
    def test_an_infinity_against_anything_else_is_infinitely_far(self, left: float, right: float) -> None:
        found = compare(floats(left), floats(right), "f32")
        assert (found.max_abs, found.max_rel) == (math.inf, math.inf)
        assert found.to_json()["max_abs"] == found.to_json()["max_rel"] == "inf"

    def test_an_infinity_is_one_step_after_the_largest_number(self) -> None:
        assert compare(floats(math.inf), struct.pack("<I", 0x7F7FFFFF), "f32").max_ulp == 1

    @given(st.binary(max_size=64), st.binary(max_size=64), st.sampled_from(sorted(ITEM_SIZES)))
    @settings(max_examples=300, deadline=None)
    def test_no_bytes_whatever_put_a_nan_into_the_figures(self, left: bytes, right: bytes, dtype: str) -> None:
        size = min(len(left), len(right)) // ITEM_SIZES[dtype] * ITEM_SIZES[dtype]
        found = compare(left[:size], right[:size], dtype)
        json.dumps(found.to_json(), allow_nan=False)
        assert found.differing >= found.equal_values + found.unordered
        assert found.same == (left[:size] == right[:size])
        assert (found.max_ulp == 0) == (found.differing == found.equal_values + found.unordered)


class TestDecoding:
    @pytest.mark.parametrize("dtype", [*FP8, "f16", "bf16"])
    def test_every_pattern_is_decoded_to_the_number_that_torch_gives_it(self, dtype: str) -> None:
        size = ITEM_SIZES[dtype]
        data = b"".join(pattern.to_bytes(size, "little") for pattern in range(2 ** (8 * size)))
        layout = _FLOATS[dtype]
        bits = layout.bits(memoryview(data))
        ours = layout.values(bits).ravel().tolist()
        theirs = decoded(data, dtype)
        for mine, its, nan in zip(ours, theirs, layout.nan(bits).ravel().tolist(), strict=True):
            assert math.isnan(its) == math.isnan(mine) == nan
            assert nan or (mine == its and math.copysign(1, mine) == math.copysign(1, its))

    @pytest.mark.parametrize("dtype", [*FP8, "f16", "bf16"])
    def test_a_pattern_is_compared_as_the_number_that_it_is(self, dtype: str) -> None:
        size = ITEM_SIZES[dtype]
        count = 2 ** (8 * size)
        step = 1 if size == 1 else 37
        one = decoded_one(dtype)
        for pattern in range(0, count, step):
            data = pattern.to_bytes(size, "little")
            (value,) = decoded(data, dtype)
            found = compare(data, one, dtype)
            assert found.nan_left == math.isnan(value), pattern
            if not math.isnan(value):
                assert found.max_abs == abs(value - 1), pattern

    @pytest.mark.parametrize("dtype", [*FP8, "f16", "bf16"])
    def test_neighbours_in_value_are_one_step_apart_over_all_patterns(self, dtype: str) -> None:
        size = ITEM_SIZES[dtype]
        patterns = [pattern.to_bytes(size, "little") for pattern in range(2 ** (8 * size))]
        values = decoded(b"".join(patterns), dtype)
        # One pattern a value; for zero either will do.
        order = sorted(
            {value: data for value, data in zip(values, patterns, strict=True) if not math.isnan(value)}.items()
        )
        lower = b"".join(data for _, data in order[:-1])
        upper = b"".join(data for _, data in order[1:])
        found = compare(lower, upper, dtype)
        assert found.differing == len(order) - 1
        assert found.equal_values == 0
        assert found.max_ulp == 1
        assert compare(order[0][1], order[-1][1], dtype).max_ulp == len(order) - 1

    @pytest.mark.parametrize("dtype", FP8)
    def test_every_pair_of_fp8_patterns_has_the_figures_that_its_values_have(self, dtype: str) -> None:
        values = decoded(bytes(range(256)), dtype)
        for left in range(0, 256, 5):
            for right in range(256):
                x, y = values[left], values[right]
                found = compare(bytes([left]), bytes([right]), dtype)
                assert found.differing == (left != right)
                if math.isnan(x) or math.isnan(y):
                    assert found.unordered == (left != right)
                elif x == y:
                    assert found.equal_values == (left != right)
                    assert found.max_abs == found.max_rel == 0
                else:
                    assert found.max_abs == abs(x - y)
                    assert found.max_rel == (math.inf if math.isinf(x - y) else abs(x - y) / max(abs(x), abs(y)))


def decoded_one(dtype: str) -> bytes:
    """The bytes of 1.0 by torch."""
    return bytes(torch.ones(1).to(TORCH[dtype]).view(torch.uint8).tolist())


class TestFloats:
    def test_the_steps_between_doubles_are_counted_in_64_bits(self) -> None:
        largest = struct.pack("<Q", 0x7FEFFFFFFFFFFFFF)
        smallest = struct.pack("<Q", 0xFFEFFFFFFFFFFFFF)
        found = compare(largest, smallest, "f64")
        assert found.max_ulp == 2 * 0x7FEFFFFFFFFFFFFF
        assert found.max_rel == 2.0
        assert found.max_abs == math.inf  # beyond what a 64-bit float holds

    def test_the_smallest_numbers_differ_by_what_they_differ(self) -> None:
        found = compare(doubles(5e-324), doubles(-5e-324), "f64")
        assert (found.max_abs, found.max_rel, found.max_ulp) == (1e-323, 2.0, 2)

    @given(
        st.floats(allow_nan=False, allow_infinity=False, width=32),
        st.floats(allow_nan=False, allow_infinity=False, width=32),
    )
    @settings(max_examples=300, deadline=None)
    def test_singles_differ_by_their_exact_difference_correctly_rounded(self, x: float, y: float) -> None:
        found = compare(floats(x), floats(y), "f32")
        exact = abs(Fraction(x) - Fraction(y))
        assert found.max_abs == float(exact)
        assert found.max_rel == pytest.approx(float(exact / max(abs(Fraction(x)), abs(Fraction(y)), Fraction(5e-324))))

    @given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
    @settings(max_examples=300, deadline=None)
    def test_doubles_have_a_relative_difference_over_their_whole_range(self, x: float, y: float) -> None:
        found = compare(doubles(x), doubles(y), "f64")
        magnitude = max(abs(Fraction(x)), abs(Fraction(y)))
        if magnitude:
            assert found.max_rel == pytest.approx(
                float(abs(Fraction(x) - Fraction(y)) / magnitude), rel=1e-12, abs=1e-300
            )
        assert (found.max_rel > 0) == (x != y)

    def test_a_complex_number_has_a_modulus_and_the_steps_of_its_worse_part(self) -> None:
        found = compare(floats(1, 1, 0, 0), floats(4, 5, 0, -0.0), "c64")
        assert found.elements == found.differing == 2
        assert found.equal_values == 1
        assert found.max_abs == 5.0
        assert found.max_rel == 5.0 / math.hypot(4, 5)
        assert found.max_ulp == compare(floats(1), floats(5), "f32").max_ulp

    def test_a_complex_number_with_one_nan_part_is_nan_once(self) -> None:
        found = compare(NAN_32 * 2 + floats(1, 2), NAN_32 + OTHER_NAN_32 + floats(1, 2), "c64")
        assert found == Comparison(2, differing=1, first=0, unordered=1, nan_left=1, nan_right=1)

    @pytest.mark.parametrize(("dtype", "code"), [("c32", "e"), ("c64", "f"), ("c128", "d")])
    def test_complex_parts_have_the_precision_of_their_dtype(self, dtype: str, code: str) -> None:
        found = compare(struct.pack(f"<2{code}", 0.5, 2.0), struct.pack(f"<2{code}", 0.5, -1.0), dtype)
        assert (found.max_abs, found.max_rel) == (3.0, 3.0 / math.hypot(0.5, 2.0))

    def test_large_complex_numbers_have_a_relative_difference(self) -> None:
        found = compare(doubles(1.7e308, 1.7e308), doubles(1.7e308, -1.7e308), "c128")
        assert found.max_rel == pytest.approx(math.sqrt(2))


class TestIntegers:
    @given(st.data(), st.sampled_from(["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"]))
    @settings(max_examples=300, deadline=None)
    def test_differences_of_integers_are_exact(self, data: st.DataObject, dtype: str) -> None:
        bits = 8 * ITEM_SIZES[dtype]
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if dtype[0] == "i" else (0, 2**bits - 1)
        row = st.lists(st.integers(least, most), min_size=4, max_size=4)
        left, right = data.draw(row), data.draw(row)
        code = {8: "b", 16: "h", 32: "i", 64: "q"}[bits]
        code = code if dtype[0] == "i" else code.upper()
        found = compare(struct.pack(f"<4{code}", *left), struct.pack(f"<4{code}", *right), dtype)
        exact = [abs(x - y) for x, y in zip(left, right, strict=True)]
        assert found.max_abs == found.max_ulp == max(exact)
        assert type(found.max_abs) is int
        assert found.differing == sum(map(bool, exact))
        largest = [max(abs(x), abs(y), 1) for x, y in zip(left, right, strict=True)]
        assert found.max_rel == pytest.approx(max(d / m for d, m in zip(exact, largest, strict=True)))

    def test_the_ends_of_64_bits_are_as_far_apart_as_they_are(self) -> None:
        found = compare(struct.pack("<q", -(2**63)), struct.pack("<q", 2**63 - 1), "i64")
        assert found.max_abs == 2**64 - 1
        assert compare(struct.pack("<Q", 2**64 - 1), struct.pack("<Q", 2**64 - 2), "u64").max_abs == 1

    def test_a_bool_is_its_truth_and_its_byte(self) -> None:
        found = compare(bytes([0, 1, 1, 2]), bytes([0, 1, 2, 0]), "bool")
        assert found == Comparison(4, differing=2, first=2, equal_values=1, max_abs=1, max_rel=1.0, max_ulp=1)


class TestParts:
    @given(
        st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=24),
        st.data(),
        st.sampled_from(["f64", "f32", "bf16", "f8e4m3fn", "i64", "c64", "bool"]),
    )
    @settings(max_examples=150, deadline=None)
    def test_the_figures_of_parts_merge_into_those_of_the_whole(
        self, words: list[bytes], data: st.DataObject, dtype: str
    ) -> None:
        left = b"".join(words)
        right = b"".join(data.draw(st.sampled_from([word, word[::-1], bytes(8)])) for word in words)
        cut = 8 * data.draw(st.integers(0, len(words)))
        parts = [compare(left[:cut], right[:cut], dtype), compare(left[cut:], right[cut:], dtype)]
        assert fold(parts) == compare(left, right, dtype)

    def test_more_than_one_piece_is_one_comparison(self) -> None:
        left = bytearray(2 * PIECE + 12)
        right = bytearray(left)
        right[PIECE + 4 : PIECE + 8] = floats(2.0)
        right[-4:] = floats(-3.0)
        found = compare(left, right, "f32")
        assert (found.elements, found.differing, found.first) == (PIECE // 2 + 3, 2, PIECE // 4 + 1)
        assert found.max_abs == 3.0

    def test_a_part_that_was_not_read_counts_as_equal_and_moves_the_first_index(self) -> None:
        found = fold([Comparison.unread(100), compare(floats(1, 2), floats(1, 3), "f32"), Comparison.unread(5)])
        assert (found.elements, found.skipped, found.differing, found.first) == (107, 105, 1, 101)

    def test_nothing_is_equal_to_nothing(self) -> None:
        assert fold([]) == compare(b"", b"", "c128") == Comparison()

    def test_any_bytes_will_do_also_unaligned_and_read_only_ones(self) -> None:
        whole = b"x" + floats(1, 2, 3)
        assert compare(memoryview(whole)[1:], bytearray(floats(1, 2, 4)), "f32").max_abs == 1.0


def test_unequal_lengths_and_half_elements_are_refused() -> None:
    for left, right in ((bytes(4), bytes(8)), (bytes(6), bytes(6))):
        with pytest.raises(UsageError):
            compare(left, right, "f32")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(MalformedError):
        compare(b"", b"", "f8e3m4")
