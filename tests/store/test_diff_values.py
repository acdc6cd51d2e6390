"""Plain values are compared by exact type and bits, and the innermost place that differs is named."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.diff.changes import Change, show, value_changes
from ckptstore.format import values
from ckptstore.format.values import TensorValue


def nan(payload: int) -> float:
    (value,) = struct.unpack(">d", struct.pack(">Q", 0x7FF8_0000_0000_0000 | payload))
    return float(value)


def changes(left: Any, right: Any) -> list[Change]:
    return list(value_changes("x", values.to_json(left), values.to_json(right)))


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_a_value_does_not_differ_from_itself(value: Any) -> None:
    assert changes(value, value) == []


@given(VALUES, VALUES)
def test_values_differ_exactly_if_their_encodings_do(left: Any, right: Any) -> None:
    assert bool(changes(left, right)) == (values.to_json(left) != values.to_json(right))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (nan(0), nan(1)),
        ((1,), [1]),
        ("1", 1),
        (b"1", "1"),
        ({"a": 1}, OrderedDict(a=1)),
        (TensorValue("u8", (1,), b"\1"), TensorValue("i8", (1,), b"\1")),
    ],
)
def test_types_and_bits_count(left: Any, right: Any) -> None:
    (change,) = changes(left, right)
    assert (change.name, change.left, change.right) == ("x", values.to_json(left), values.to_json(right))


def test_the_innermost_place_is_named() -> None:
    left = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], 3: "same", "odd key": 1}
    right = {"groups": [{"lr": 0.2, "betas": (0.9, 0.95)}], 3: "same", "odd key": 2}
    assert [str(change) for change in changes(left, right)] == [
        "x.groups[0].betas[1]: 0.99 -> 0.95",
        "x.groups[0].lr: 0.1 -> 0.2",
        "x['odd key']: 1 -> 2",
    ]


def test_what_is_on_one_side_only_is_said_and_none_is_something() -> None:
    assert [str(change) for change in changes({"a": None}, {"b": [1, 2]})] == [
        "x.a: gone, it was None",
        "x.b: new, [1, 2]",
    ]
    assert [str(change) for change in changes([1], [1, None])] == ["x[1]: new, None"]


def test_the_order_of_an_ordered_mapping_counts() -> None:
    (change,) = changes(OrderedDict(a=1, b=2), OrderedDict(b=2, a=1))
    assert change.name == "x (order of keys)"


def test_what_people_see_is_short_and_printable() -> None:
    assert show(values.to_json("x" * 1000)).endswith("…")
    assert len(show(values.to_json(list(range(1000))))) == 80
    assert show("\x1b[31m") == "'\\x1b[31m'"
    assert show(values.to_json(TensorValue("f32", (2, 1), bytes(8)))) == "tensor f32 [2, 1]"
