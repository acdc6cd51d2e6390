"""What every backend and every wrapper promises (ckptstore/backends/protocol.py)."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.backends.protocol import PruneBackend, ReadbackMethod, Stat
from ckptstore.errors import NotFoundError, UsageError
from tests.support.backends import KINDS, Subject

KEY = "objects/ab/" + "ab" * 32
OTHER = "objects/cd/" + "cd" * 32
CHUNK = 16 << 20

ILLEGAL_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", ".a", "a/.b", "a b", "a\\b"]
ILLEGAL_KEYS += ["a\n", "a\0", "ä", "a/\u202eb", "a:b", "a%2Fb", "x" * 513]


@pytest.fixture(params=sorted(KINDS))
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    return KINDS[request.param](tmp_path)


@pytest.fixture
def backend(subject: Subject) -> PruneBackend:
    return subject.backend


class TestCreate:
    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (1 << 20) + 1, CHUNK + 1])
    def test_what_was_created_comes_back(self, backend: PruneBackend, size: int) -> None:
        data = bytes(range(251)) * (size // 251 + 1)
        data = data[:size]
        assert backend.create(KEY, data) is True
        assert backend.get(KEY) == data
        assert backend.stat(KEY) == Stat(KEY, size)

    @pytest.mark.parametrize("empty_first", [False, True])
    def test_a_second_create_says_no_and_keeps_the_bytes(self, backend: PruneBackend, empty_first: bool) -> None:
        """F-120."""
        first = b"" if empty_first else b"first"
        assert backend.create(KEY, first) is True
        for data in (first, b"", b"second"):
            assert backend.create(KEY, data) is False
        assert backend.get(KEY) == first

    @pytest.mark.parametrize(
        "data",
        [bytearray(b"12345678"), memoryview(b"x12345678x")[1:-1], memoryview(array("d", [1.0])), memoryview(b"")],
        ids=["bytearray", "slice", "doubles", "empty"],
    )
    def test_any_contiguous_buffer_is_stored_as_its_bytes(
        self, backend: PruneBackend, data: bytearray | memoryview
    ) -> None:
        assert backend.create(KEY, data)
        assert backend.get(KEY) == bytes(data)

    def test_a_buffer_changed_afterwards_does_not_change_the_store(self, backend: PruneBackend) -> None:
        data = bytearray(b"before")
        backend.create(KEY, data)
        data[:] = b"after!"
        assert backend.get(KEY) == b"before"

    def test_of_many_threads_that_create_one_key_one_wins(self, backend: PruneBackend) -> None:
        barrier = Barrier(24)

        def create(number: int) -> bool:
            barrier.wait()
            return backend.create("refs/main/0000000000000001", f"writer {number}".encode() * 1000)

        with ThreadPoolExecutor(24) as pool:
            won = list(pool.map(create, range(24)))
        assert sum(won) == 1
        assert backend.get("refs/main/0000000000000001") == f"writer {won.index(True)}".encode() * 1000

    def test_a_put_is_invisible_until_it_is_whole(self, backend: PruneBackend) -> None:
        sizes: set[int] = set()
        data = b"x" * CHUNK
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(backend.create, KEY, data)
            while not writing.done():
                sizes.update(found.size for found in backend.list("objects/"))
                found = backend.stat(KEY)
                sizes.update([found.size] if found else [])
        assert writing.result() is True
        assert sizes <= {CHUNK}


class TestRead:
    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(offset=st.integers(0, 300), length=st.none() | st.integers(0, 300))
    def test_a_range_is_what_a_slice_would_be(self, backend: PruneBackend, offset: int, length: int | None) -> None:
        data = bytes(range(256))
        backend.create(KEY, data)
        assert backend.get(KEY, offset, length) == data[offset : None if length is None else offset + length]

    @pytest.mark.parametrize("window", [(-1, None), (0, -1), (-1, -1)])
    def test_a_negative_range_is_refused(self, backend: PruneBackend, window: tuple[int, int | None]) -> None:
        backend.create(KEY, b"data")
        with pytest.raises(UsageError):
            backend.get(KEY, *window)
        with pytest.raises(UsageError):
            backend.readback(KEY, -1)

    def test_an_absent_key_is_not_found_by_name(self, backend: PruneBackend) -> None:
        assert backend.stat(KEY) is None
        for read in (backend.get, backend.readback):
            with pytest.raises(NotFoundError, match=KEY):
                read(KEY)
        backend.create(OTHER, b"")
        assert backend.stat(KEY) is None

    @pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, 100_000, CHUNK + 1])
    def test_a_readback_returns_the_stored_bytes_and_its_method(self, backend: PruneBackend, size: int) -> None:
        data = (bytes(range(253)) * (size // 253 + 1))[:size]
        backend.create(KEY, data)
        for length in (None, size, size + 1, size // 2, 0):
            read, method = backend.readback(KEY, length)
            assert read == data[: size if length is None else length]
            assert isinstance(method, ReadbackMethod)


class TestList:
    def test_keys_come_sorted_by_their_bytes(self, backend: PruneBackend) -> None:
        keys = ["a/b", "a-b", "a/b/c-d", "a/b.x", "a/c", "A/b", "a0", "_x", "a/b-", "refs/m/0000000000000010"]
        keys = [key for key in keys if key != "a/b"] + ["refs/m/0000000000000009", "refs/m-x/0000000000000001"]
        for key in keys:
            assert backend.create(key, key.encode())
        assert list(backend.list("")) == [Stat(key, len(key)) for key in sorted(keys)]

    def test_a_prefix_selects_whole_components(self, backend: PruneBackend) -> None:
        for key in ("refs/main/1", "refs/main/2", "refs/main-2/1", "refs/mai/1", "other/refs/main/1"):
            backend.create(key, b"")
        assert [found.key for found in backend.list("refs/main/")] == ["refs/main/1", "refs/main/2"]
        assert list(backend.list("refs/nothing/")) == []
        assert list(backend.list("nothing/refs/")) == []

    @pytest.mark.parametrize("prefix", ["/", "a", "a//", "../", "a/../", ".a/", "a b/"])
    def test_an_illegal_prefix_is_refused_at_the_call(self, backend: PruneBackend, prefix: str) -> None:
        with pytest.raises(UsageError):
            backend.list(prefix)

    def test_nothing_but_keys_is_listed(self, subject: Subject) -> None:
        backend = subject.backend
        backend.create(KEY, b"bad")
        backend.replace(KEY, b"good")
        backend.create(OTHER, b"gone")
        backend.delete(OTHER)
        assert list(backend.list("")) == [Stat(KEY, 4)]


class TestReplace:
    def test_the_new_bytes_are_there_and_the_old_are_kept_aside(self, subject: Subject) -> None:
        """F-139."""
        backend = subject.backend
        backend.create(KEY, b"bad")
        backend.replace(KEY, b"better")
        assert backend.get(KEY) == backend.readback(KEY)[0] == b"better"
        backend.replace(KEY, b"")
        assert backend.get(KEY) == b""
        assert subject.quarantined(KEY) == [b"bad", b"better"]
        assert backend.create(KEY, b"new") is False

    def test_an_absent_key_is_created(self, subject: Subject) -> None:
        subject.backend.replace(KEY, b"data")
        assert subject.backend.get(KEY) == b"data"
        assert subject.quarantined(KEY) == []

    def test_of_many_threads_that_repair_one_key_all_succeed(self, subject: Subject) -> None:
        subject.backend.create(KEY, b"bad")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: subject.backend.replace(KEY, b"good"), range(8)))
        assert subject.backend.get(KEY) == b"good"
        assert b"bad" in subject.quarantined(KEY)


class TestDelete:
    def test_it_says_whether_the_key_was_there(self, backend: PruneBackend) -> None:
        assert backend.delete(KEY) is False
        backend.create(KEY, b"data")
        assert backend.delete(KEY) is True
        assert backend.delete(KEY) is False
        assert backend.stat(KEY) is None
        assert list(backend.list("")) == []
        with pytest.raises(NotFoundError):
            backend.get(KEY)
        assert backend.create(KEY, b"again") is True


@pytest.mark.parametrize("key", ILLEGAL_KEYS)
def test_an_illegal_key_is_refused_by_every_operation(backend: PruneBackend, key: str) -> None:
    for call in (backend.get, backend.readback, backend.stat, backend.delete):
        with pytest.raises(UsageError):
            call(key)
    for write in (backend.create, backend.replace):
        with pytest.raises(UsageError):
            write(key, b"")
    assert list(backend.list("")) == []


def test_the_url_has_a_scheme(backend: PruneBackend) -> None:
    assert ":" in backend.url
