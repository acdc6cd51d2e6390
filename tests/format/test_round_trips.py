"""What is encoded is parsed back as it was, and what is parsed encodes to the same bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CkptStoreError, MalformedError
from ckptstore.format import canonical, values
from tests.format.kinds import LIMITS, PARSERS, encode, valid_documents
from tests.format.strategies import documents, patient, python_values, same

VALID = valid_documents()


@pytest.mark.parametrize("kind", sorted(documents))
@given(data=st.data())
@settings(patient, max_examples=60)
def test_a_document_survives_the_round_trip(kind: str, data: st.DataObject) -> None:
    """F-12."""
    value = data.draw(documents[kind])
    encoded = encode(kind, value)
    assert PARSERS[kind](encoded) == value
    assert encode(kind, PARSERS[kind](encoded)) == encoded


@given(python_values)
@settings(patient, max_examples=300)
def test_a_value_comes_back_in_type_and_bits(value: object) -> None:
    """F-40."""
    node = values.to_json(value)
    back = values.from_json(canonical.decode(canonical.encode(node), 2**26))
    assert same(back, value)
    assert values.to_json(back) == node


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A valid document with a few bytes changed: flipped, dropped, repeated, moved, put in."""
    kind, _, data = draw(st.sampled_from(VALID))
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(changed)))
        stop = min(len(changed), start + draw(st.integers(0, 40)))
        match draw(st.integers(0, 5)):
            case 0 if start < len(changed):
                changed[start] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del changed[start:stop]
            case 2:
                changed[start:start] = changed[start:stop]
            case 3:
                changed[start:start] = draw(st.sampled_from(_INSERTS))
            case 4:
                piece = changed[start:stop]
                del changed[start:stop]
                place = draw(st.integers(0, len(changed)))
                changed[place:place] = piece
            case _:
                changed[start:stop] = draw(st.binary(max_size=8))
    return kind, bytes(changed)


_INSERTS = [
    b" ", b"\n", b"\xef\xbb\xbf", b"\0", b"1.0", b"1e9", b"-0", b"9007199254740992", b"null", b"true", b"[]", b"{}",
    b'"\\ud800"', b'"\\u0041"', b'"a":1,', b"[" * 200, b"{" * 3, b"9" * 5000, b"NaN", b"b3:", b"\xff",
]  # fmt: skip


@given(mutated())
@settings(patient, max_examples=600)
def test_a_damaged_document_is_refused_or_still_means_its_bytes(case: tuple[str, bytes]) -> None:
    """F-12."""
    _refused_or_exact(*case)


@given(st.sampled_from(sorted(PARSERS)), st.binary(max_size=200))
@settings(patient, max_examples=200)
def test_arbitrary_bytes_raise_only_our_errors(kind: str, data: bytes) -> None:
    """F-12."""
    _refused_or_exact(kind, data)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def replanted(draw: st.DrawFn) -> tuple[str, bytes]:
    """A valid document with one part replaced by other JSON, by another part of it, or by nothing."""
    kind, _, data = draw(st.sampled_from(VALID))
    value = json.loads(data)
    places = list(_places(value))
    parent, key = draw(st.sampled_from(places))
    match draw(st.integers(0, 3)):
        case 0:
            parent[key] = draw(_json)
        case 1:
            other, name = draw(st.sampled_from(places))
            parent[key] = json.loads(json.dumps(other[name]))
        case 2 if isinstance(parent, list):
            parent.insert(key, json.loads(json.dumps(parent[key])))
        case _:
            del parent[key]
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return kind, text.encode("utf-8", "surrogatepass")


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


@given(replanted())
@settings(patient, max_examples=600)
def test_a_document_with_a_wrong_part_raises_only_our_errors(case: tuple[str, bytes]) -> None:
    """F-18."""
    _refused_or_exact(*case)


@pytest.mark.parametrize("kind", sorted(PARSERS))
def test_a_document_beyond_its_limit_is_refused_before_it_is_parsed(kind: str) -> None:
    """F-17."""
    with pytest.raises(MalformedError, match="limit"):
        PARSERS[kind](b"[" * (LIMITS[kind] + 1))
    with pytest.raises(MalformedError, match="not JSON"):
        PARSERS[kind](b"[" * LIMITS[kind])


def _refused_or_exact(kind: str, data: bytes) -> None:
    try:
        value = PARSERS[kind](data)
    except CkptStoreError as error:
        refusal = error
    else:
        assert encode(kind, value) == data
        return
    assert refusal.code in ("malformed", "unsupported-version", "corrupt")
    assert len(str(refusal)) < 4000
