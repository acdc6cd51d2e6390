"""A museum of broken stores: each has been broken in one way, and what is said of it is known to the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.answers import unpacked
from tests.museum.damage import named
from tests.museum.exhibit import observe, recipes, recorded


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def keys(golden: Path) -> dict[str, str]:
    return named(golden)


@pytest.mark.parametrize("name", recipes())
def test_a_broken_store_is_known_for_what_it_is(name: str, golden: Path, keys: dict[str, str], tmp_path: Path) -> None:
    found, expected = observe(recipes()[name], golden, keys, tmp_path), recorded()[name]
    for asked, told in expected.items():
        assert found[asked] == told, f"{asked} of {name}: {recipes()[name]['story']}"
    assert found.keys() == expected.keys()


def test_everything_that_is_recorded_is_in_the_museum() -> None:
    assert recorded().keys() == recipes().keys()
