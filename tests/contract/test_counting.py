"""Figures such as "bytes read" come from a backend that counts them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ckptstore.backends.counting import CountingBackend, Tally
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import NotFoundError


def test_bytes_are_those_that_went_through() -> None:
    backend = CountingBackend(MemoryBackend())
    backend.create("a/1", b"12345")
    backend.create("a/1", b"1234567890")  # refused: nothing published
    backend.get("a/1", 3, 100)
    backend.get("a/1")
    backend.readback("a/1", 1)
    backend.stat("a/1")
    list(backend.list("a/"))
    backend.replace("a/1", b"12")
    with suppress(NotFoundError):
        backend.get("b/2")
    backend.delete("a/1")

    assert backend.total("create") == Tally(2, 5)
    assert backend.total("get") == Tally(3, 7)
    assert backend.total("get", "readback", prefix="a/") == Tally(3, 8)
    assert backend.total("replace") == Tally(1, 2)
    assert backend.total("stat", "list", "delete") == Tally(3, 0)
    assert backend.by_key("get") == {"a/1": Tally(2, 7), "b/2": Tally(1, 0)}
    assert list(backend.by_key()) == ["a/", "a/1", "b/2"]
    assert backend.total() == Tally(10, 15)
    backend.reset()
    assert backend.total() == Tally()


def test_no_call_of_any_thread_is_lost() -> None:
    backend = CountingBackend(MemoryBackend())
    backend.create("a", b"12345")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: backend.get("a"), range(2000)))
    assert backend.total("get") == Tally(2000, 10_000)


def test_an_unknown_operation_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="put"):
        CountingBackend(MemoryBackend()).total("put")
