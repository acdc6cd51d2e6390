"""Canonical JSON: one value, one encoding."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import MalformedError
from ckptstore.format import canonical
from tests.format.strategies import patient

LIMIT = 2**20

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)

SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def spelled_out(value: Any) -> bytes:
    """Canonical JSON as the rules say it, one character after the other."""
    if value is None or isinstance(value, bool):
        return {None: b"null", True: b"true", False: b"false"}[value]
    if isinstance(value, int):
        return b"%d" % value
    if isinstance(value, str):
        text = "".join(SHORT.get(c) or (f"\\u00{ord(c):02x}" if c < " " else c) for c in value)
        return b'"' + text.encode() + b'"'
    if isinstance(value, list):
        return b"[" + b",".join(map(spelled_out, value)) + b"]"
    members = sorted((key.encode(), spelled_out(key) + b":" + spelled_out(item)) for key, item in value.items())
    return b"{" + b",".join(member for _, member in members) + b"}"


@given(json_values)
@settings(patient, max_examples=300)
def test_a_value_has_the_encoding_that_the_rules_spell_out(value: Any) -> None:
    """F-12, F-13, F-14, F-15."""
    data = spelled_out(value)
    assert canonical.encode(value) == data
    assert canonical.decode(data, LIMIT) == value


@pytest.mark.parametrize("code", range(0x20))
def test_a_control_character_has_one_escape(code: int) -> None:
    """F-14."""
    assert canonical.encode(chr(code)) == spelled_out(chr(code))
    for other in (f'"\\u{code:04X}"', f'"\\u{code:04x}"', f'"{chr(code)}"'):
        if other.encode() != spelled_out(chr(code)):
            with pytest.raises(MalformedError):
                canonical.decode(other.encode(), LIMIT)


def test_text_is_not_normalised() -> None:
    """F-14."""
    composed, decomposed = "\u00e9", "e\u0301"
    assert canonical.encode(composed) != canonical.encode(decomposed)
    assert canonical.decode(canonical.encode({composed: 1, decomposed: 2}), LIMIT) == {composed: 1, decomposed: 2}


def test_names_are_sorted_by_utf_8_and_not_by_utf_16() -> None:
    """F-13."""
    assert canonical.encode({"\U00010000": 1, "\uffff": 2}) == '{"\uffff":2,"\U00010000":1}'.encode()


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\udc00\ud800"])
def test_a_lone_surrogate_is_refused_both_ways(text: str) -> None:
    """F-14."""
    for value in (text, {text: 1}, [text]):
        with pytest.raises(MalformedError, match="surrogate"):
            canonical.encode(value)  # type: ignore[arg-type]
    escaped = "".join(f"\\u{ord(c):04x}" if ord(c) > 127 else c for c in text)
    with pytest.raises(MalformedError):
        canonical.decode(f'"{escaped}"'.encode(), LIMIT)


@pytest.mark.parametrize(
    "data",
    [b"-0", b"+1", b"01", b"1.0", b"1e0", b"1E0", b".5", b"0x1", b"NaN", b"-Infinity", b"9" * 20, b"-" + b"9" * 9000],
)
def test_a_number_that_is_no_plain_integer_is_refused(data: bytes) -> None:
    """F-15."""
    with pytest.raises(MalformedError):
        canonical.decode(data, LIMIT)


def test_integers_end_at_2_to_the_53_minus_1() -> None:
    """F-15."""
    for edge in (2**53 - 1, -(2**53) + 1):
        assert canonical.decode(str(edge).encode(), LIMIT) == edge
    for beyond in (2**53, -(2**53), 10**5000):
        with pytest.raises(MalformedError):
            canonical.encode(beyond)
    with pytest.raises(MalformedError):
        canonical.decode(b"9007199254740992", LIMIT)


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value", [1.0, float("nan"), (1,), {1: 2}, {None: 1}, {1}, b"x", object(), Text("x"), OrderedDict(), [1.5]]
)
def test_a_value_without_an_encoding_is_refused_by_its_type(value: Any) -> None:
    """F-12: exact types only; a subclass could print itself otherwise."""
    with pytest.raises(MalformedError):
        canonical.encode(value)


def test_nesting_ends_at_64_levels() -> None:
    """F-16."""
    nested: Any = 1
    for _ in range(64):
        nested = [nested]
    assert canonical.decode(canonical.encode(nested), LIMIT) == nested
    for deeper in ([nested], {"a": nested}):
        with pytest.raises(MalformedError, match="nested"):
            canonical.encode(deeper)
    for depth in (65, 1_000, 500_000):
        with pytest.raises(MalformedError):
            canonical.decode(b"[" * depth + b"]" * depth, LIMIT)


def test_a_value_that_holds_itself_is_refused() -> None:
    """F-16."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(MalformedError, match="nested"):
        canonical.encode(loop)


def test_a_name_twice_is_refused_even_with_equal_values() -> None:
    """F-13."""
    for data in (b'{"a":1,"a":1}', b'{"a":1,"a":2}', b'[{"a":{"b":1,"b":1}}]'):
        with pytest.raises(MalformedError, match="twice"):
            canonical.decode(data, LIMIT)


def test_the_limit_is_checked_before_anything_else() -> None:
    """F-17."""
    data = canonical.encode("x" * 100)
    assert canonical.decode(data, len(data)) == "x" * 100
    with pytest.raises(MalformedError, match="limit"):
        canonical.decode(data, len(data) - 1)
