"""Typed values: exact types, exact bits, and nothing that is not in the table."""

from __future__ import annotations

import enum
import struct
import tracemalloc
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import canonical
from ckptstore.format.values import (
    VALUE_DEPTH,
    VALUE_TENSOR_LIMIT,
    EntryRef,
    TensorValue,
    checked_nbytes,
    entry_refs,
    from_json,
    plain_from_json,
    to_json,
)
from tests.format.strategies import same

Point = namedtuple("Point", "x y")


class Mode(enum.IntEnum):
    FAST = 1


class Count(int):
    pass


TOLD_APART: list[Any] = [
    None, False, True, 0, 1, 0.0, -0.0, 1.0, "", "1", b"", b"1", (), [], {}, (1,), [1], {1: 1}, {1: 1.0}, {1: True},
    Counter(), Counter({1: 1}), OrderedDict(), OrderedDict({1: 1}), OrderedDict([(1, 1), (2, 2)]),
    OrderedDict([(2, 2), (1, 1)]), {"1": 1}, {(1,): 1}, TensorValue("u8", (1,), b"1"), TensorValue("i8", (1,), b"1"),
    TensorValue("u8", (), b"1"), EntryRef(("0",)), ((1,),), [(1,)], ([1],), 2**53, -(2**63), 2**127,
]  # fmt: skip


def test_values_of_other_types_or_bits_have_other_encodings() -> None:
    """F-40: 1, 1.0, True, "1", (1,) and [1] are six values."""
    encodings = {canonical.encode(to_json(value)) for value in TOLD_APART}
    assert len(encodings) == len(TOLD_APART)
    for value in TOLD_APART:
        assert same(from_json(to_json(value)), value)


@pytest.mark.parametrize(
    "bits",
    [0, 1 << 63, 1, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001,
     0x7FF7FFFFFFFFFFFF, 0x000FFFFFFFFFFFFF, 0x3FB999999999999A],
)  # fmt: skip
def test_a_float_keeps_its_64_bits(bits: int) -> None:
    """F-40, F-41: signalling NaNs, payloads, both zeros, subnormals."""
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    node = to_json(value)
    assert node == {"t": "f64", "v": f"{bits:016x}"}
    assert struct.pack(">d", from_json(node)) == bits.to_bytes(8, "big")


def test_integers_go_beyond_53_bits_and_end_at_4000_digits() -> None:
    """F-41."""
    for value in (2**53, -(2**64), 10**4000 - 1, -(10**4000) + 1):
        assert from_json(to_json(value)) == value
    for value in (10**4000, -(10**4000), 10**9000):
        with pytest.raises(RefusedError, match="digits"):
            to_json(value)
    for text in ("1" * 4001, "-" + "1" * 4001):
        with pytest.raises(MalformedError):
            from_json({"t": "int", "v": text})


@pytest.mark.parametrize(
    "value",
    [Point(1, 2), Mode.FAST, Count(1), 1j, {1}, frozenset(), bytearray(b"x"), memoryview(b"x"), object(), len, int,
     range(3), Decimal(1), Fraction(1, 2), defaultdict(int), UserDict(), iter([])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_stored_exactly_is_refused_by_its_type(value: object) -> None:
    """F-45: subclasses of what can be stored too."""
    for holder in (value, [value], {"a": (value,)}):
        with pytest.raises(RefusedError) as refused:
            to_json(holder, "binding")
        assert type(value).__qualname__ in str(refused.value)
        assert str(refused.value).startswith("binding")


def test_a_refusal_names_the_place() -> None:
    """F-45."""
    with pytest.raises(RefusedError, match=r"^state\['a'\]\[1\] key"):
        to_json({"a": [0, {frozenset(): 1}]}, "state")


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, ["a", ("\ud800",)]])
def test_a_lone_surrogate_is_refused(value: object) -> None:
    """F-45."""
    with pytest.raises(RefusedError, match="surrogate"):
        to_json(value)


def test_a_dict_has_one_encoding_whatever_the_order_it_was_filled_in() -> None:
    """F-42 (B042, pytorch#42163)."""
    items = [(1, "a"), ("1", "b"), (1.5, "c"), (None, "d"), ((1, 2), "e"), (b"1", "f")]
    for kind in (dict, Counter):
        forward, backward = kind(dict(items)), kind(dict(reversed(items)))
        assert canonical.encode(to_json(forward)) == canonical.encode(to_json(backward))
    assert canonical.encode(to_json(OrderedDict(items))) != canonical.encode(to_json(OrderedDict(reversed(items))))


def test_two_keys_of_the_same_bits_are_refused_on_the_way_in() -> None:
    """F-42: Python lets a dict hold NaN twice; what was written so could never be read again."""
    one, other = float("nan"), float("nan")
    with pytest.raises(RefusedError, match="NaN"):
        to_json({one: 1, other: 2})
    assert len(to_json({one: 1})["v"]) == 1  # type: ignore[call-overload, index, arg-type]


def test_nesting_is_bounded_and_a_value_that_holds_itself_is_refused() -> None:
    """F-43."""
    for make, step in ((lambda x: [x], 2), (lambda x: (x,), 2), (lambda x: {"k": x}, 3)):
        value: Any = 1
        for _ in range((VALUE_DEPTH - 1) // step):
            value = make(value)
        assert same(from_json(canonical.decode(canonical.encode(to_json(value)), 2**20)), value)
        with pytest.raises(RefusedError, match="nested"):
            to_json(make(value))
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(RefusedError, match="nested"):
        to_json(loop)


def test_a_deep_value_is_refused_when_it_is_read() -> None:
    """F-43."""
    node: Any = {"t": "none"}
    for _ in range(27):
        node = {"t": "tuple", "v": [node]}
    from_json(node)
    with pytest.raises(MalformedError, match="nested"):
        from_json({"t": "list", "v": [node]})


def test_a_tensor_inside_a_value_is_small() -> None:
    """F-43."""
    edge = TensorValue("u8", (VALUE_TENSOR_LIMIT,), bytes(VALUE_TENSOR_LIMIT))
    assert from_json(to_json(edge)) == edge
    with pytest.raises(RefusedError, match="limit"):
        TensorValue("u8", (VALUE_TENSOR_LIMIT + 1,), bytes(VALUE_TENSOR_LIMIT + 1))
    with pytest.raises(MalformedError, match="65536"):
        from_json({"t": "tensor", "dtype": "u8", "shape": [65537], "v": "00" * 65537})
    with pytest.raises(MalformedError):
        TensorValue("f32", (2,), b"\0" * 7)


@pytest.mark.parametrize("shape", [[2**53 - 1], [2**53 - 1] * 64, [2**53 - 1] * 200_000, [2**40, 2**40, 0], [1] * 65])
def test_a_shape_bomb_is_refused_before_memory_is_taken(shape: list[int]) -> None:
    """F-32: nothing is multiplied out or allocated for what a document merely claims."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            from_json({"t": "tensor", "dtype": "c128", "shape": shape, "v": ""})  # type: ignore[dict-item]
        with pytest.raises(MalformedError):
            checked_nbytes("c128", tuple(shape))
        assert tracemalloc.get_traced_memory()[1] < 16 * len(shape) * 3 + 2**16
    finally:
        tracemalloc.stop()


def test_an_entry_stands_only_where_entries_are() -> None:
    """F-44."""
    nested = to_json({"old_dirs": [EntryRef(("old_dirs", "0")), EntryRef(("old_dirs", "1"))], "n": 2})
    found = list(entry_refs(from_json(nested)))
    assert found == [EntryRef(("old_dirs", "0")), EntryRef(("old_dirs", "1"))]
    with pytest.raises(MalformedError, match="refers to an entry"):
        plain_from_json(nested)
    for key in (to_json({EntryRef(("a",)): 1}), to_json({(1, EntryRef(("a",))): 1})):
        with pytest.raises(MalformedError, match="refers to an entry"):
            plain_from_json(key)
