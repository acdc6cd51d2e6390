from __future__ import annotations

import secrets
from pathlib import Path

import pytest

import ckptstore
from ckptstore import leases
from ckptstore.collection import exclusion
from ckptstore.store import Store
from tests.support.damages import World, build, opened
from tests.support.distant import Distant, made
from tests.support.states import memory_store


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


@pytest.fixture(params=["directory", "memory"])
def either_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store, in a directory or in memory."""
    return ckptstore.open(tmp_path / "store", create=True) if request.param == "directory" else memory_store()


@pytest.fixture
def disk(tmp_path: Path) -> Store:
    """An empty store in a directory."""
    return ckptstore.open(tmp_path / "disk", create=True)


@pytest.fixture
def distant() -> Store:
    """An empty store at the other end of a network."""
    return Store(made(Distant()))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers and collections wait for nobody."""
    monkeypatch.setattr(leases, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(exclusion, "_LOCK_SECONDS", 0.0)
