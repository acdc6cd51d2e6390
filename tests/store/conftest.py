from __future__ import annotations

import secrets
from pathlib import Path

import pytest

import ckptstore
from ckptstore.store import Store
from tests.support.damages import World, build, opened


@pytest.fixture
def store() -> Store:
    """An empty store in memory."""
    return ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)


@pytest.fixture
def disk_store(tmp_path: Path) -> Store:
    """An empty store in a directory."""
    return ckptstore.open(tmp_path / "store", create=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Stores with one of each kind of key, made once for all tests of a module, which change copies of it."""
    return build(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(built: World, tmp_path: Path) -> World:
    """A copy of it for one test."""
    return opened(built, tmp_path)
