from __future__ import annotations

import secrets
from pathlib import Path

import pytest

import ckptstore
from ckptstore.store import Store


@pytest.fixture
def store() -> Store:
    """An empty store in memory."""
    return ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)


@pytest.fixture
def disk_store(tmp_path: Path) -> Store:
    """An empty store in a directory."""
    return ckptstore.open(tmp_path / "store", create=True)
