"""The limits that keep parsers quick: what a run makes is far from them, and what is just within them is accepted."""

from __future__ import annotations

from random import Random

import pytest

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import canonical, values
from ckptstore.format.tree import path_below_another
from ckptstore.format.values import CROWDED
from ckptstore.toml import parse_toml

ONE_HASH = 2**61 - 1


def test_a_writer_refuses_the_keys_that_a_reader_refuses() -> None:
    """F-43: nothing is stored that could not be read."""
    within = {1 + number * ONE_HASH: None for number in range(CROWDED)}
    node = values.to_json(within)
    assert values.from_json(node) == within
    with pytest.raises(RefusedError, match="one hash"):
        values.to_json({**within, 1 + CROWDED * ONE_HASH: None})
    pairs = [[values.to_json(1 + number * ONE_HASH), {"t": "none"}] for number in range(CROWDED + 1)]
    with pytest.raises(MalformedError, match="one hash"):
        values.from_json({"t": "dict", "v": sorted(pairs, key=lambda pair: canonical.encode(pair[0]))})


def test_many_keys_of_many_hashes_are_no_matter() -> None:
    many = {number: str(number) for number in range(-2, 20_000)}
    assert values.from_json(values.to_json(many)) == many


def test_a_path_below_another_is_found_whatever_sorts_between_them() -> None:
    """F-92: ``a-b`` sorts between ``a`` and ``a/b``."""
    assert path_below_another(["a", "a-b", "a/b"]) == ("a", "a/b")
    assert path_below_another(["a", "a-b", "ab/c", "é", "é.txt"]) is None
    random = Random(1)
    for _ in range(3000):
        paths = {"/".join(random.choices(("a", "b", "a-", "a.b"), k=random.randrange(1, 4))) for _ in range(4)}
        expected = any(below.startswith(f"{above}/") for above in paths for below in paths)
        found = path_below_another(paths)
        assert (found is not None) == expected
        assert found is None or found[1].startswith(f"{found[0]}/")


def test_a_key_of_toml_has_few_parts_and_texts_have_any_points() -> None:
    assert parse_toml("a.b.c = 1", "it", "") == {"a": {"b": {"c": 1}}}
    points = ".".join("abcdefghijklmnopqrstuvwxyz")
    assert parse_toml(f"a = \"{points}\"\nb = '{points}'", "it", "") == {"a": points, "b": points}
    for text in (f"{points} = 1", f"x = 1\n[{points}]", f"a = {{{points} = 1}}", '"a".' * 20 + "b = 1"):
        with pytest.raises(MalformedError, match="a key of more than 16 parts"):
            parse_toml(text, "it", "")
