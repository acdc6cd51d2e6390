"""The wrapper that goes wrong on order does so exactly where it was told to."""

from __future__ import annotations

import pytest

from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import BackendError
from tests.support.faulty import FaultyBackend


def test_the_nth_call_fails_before_or_after_it_took_effect() -> None:
    backend = FaultyBackend(MemoryBackend())
    backend.fail("create", BackendError("planted"), nth=2)
    backend.fail("create", BackendError("lost answer"), nth=1, prefix="c", took_effect=True)
    assert backend.create("a", b"")
    with pytest.raises(BackendError, match="planted"):
        backend.create("b", b"")
    with pytest.raises(BackendError, match="lost answer"):
        backend.create("c", b"")
    assert [found.key for found in backend.list("")] == ["a", "c"]
    backend.heal()
    assert backend.create("b", b"")


def test_damage_is_in_what_is_read_and_in_the_right_place() -> None:
    inner = MemoryBackend()
    backend = FaultyBackend(inner)
    backend.create("a", bytes(8))
    backend.flip_bit("a", 8 * 5 + 3)
    assert backend.get("a") == backend.readback("a")[0] == b"\0\0\0\0\0\x08\0\0"
    assert backend.get("a", 4, 2) == b"\0\x08"
    assert backend.get("a", 0, 5) == bytes(5)
    backend.truncate("a", 6)
    assert backend.get("a", 4) == b"\0\x08"
    assert backend.get("a", 7) == b""
    assert inner.get("a") == bytes(8)
