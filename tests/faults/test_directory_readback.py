"""A readback says how far down it reached, and never claims a medium that it did not reach."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends import medium
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.backends.libc import filesystem_type, resident_pages
from ckptstore.backends.protocol import ReadbackMethod
from tests.support.syscalls import intercept

KEY = "objects/ab/" + "ab" * 32
DATA = bytes(range(256)) * 5000 + b"tail"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the page cache is asked about in Linux's way")


@pytest.fixture
def backend(tmp_path: Path) -> DirectoryBackend:
    backend = DirectoryBackend.create_root(tmp_path / "store")
    backend.create(KEY, DATA)
    return backend


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system where O_DIRECT does not mean what it says."""
    monkeypatch.setattr(medium, "_MEANS_DIRECT", frozenset())


def kind(path: Path) -> int | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return filesystem_type(fd)
    finally:
        os.close(fd)


def resident(path: Path) -> int | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return resident_pages(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def test_a_disk_is_read_around_the_page_cache(backend: DirectoryBackend) -> None:
    if kind(backend.path) not in medium._MEANS_DIRECT:
        pytest.skip("the temporary folder is on no such disk")
    assert backend.readback(KEY) == (DATA, ReadbackMethod.DIRECT)
    assert resident(backend.path / KEY) == 0


@pytest.mark.usefixtures("no_direct")
def test_dropped_pages_are_proven_to_be_gone(backend: DirectoryBackend) -> None:
    if kind(backend.path) in medium._MEMORY:
        pytest.skip("the temporary folder is in memory")
    assert backend.readback(KEY) == (DATA, ReadbackMethod.DROPPED)
    assert backend.readback(KEY, 0) == (b"", ReadbackMethod.DROPPED)


@pytest.mark.usefixtures("no_direct")
def test_pages_that_somebody_maps_stay_and_the_readback_says_so(backend: DirectoryBackend) -> None:
    with (backend.path / KEY).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) >= 0  # touch every page
        assert backend.readback(KEY) == (DATA, ReadbackMethod.CACHED)
    assert not ReadbackMethod.CACHED.reaches_medium


def test_memory_is_no_medium(backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium, "_MEMORY", frozenset({kind(backend.path)}))
    assert backend.readback(KEY) == (DATA, ReadbackMethod.CACHED)


@pytest.mark.usefixtures("no_direct")
def test_a_server_is_the_most_that_a_network_file_system_claims(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind(backend.path) in medium._MEMORY:
        pytest.skip("the temporary folder is in memory")
    monkeypatch.setattr(medium, "_SERVED", frozenset({kind(backend.path)}))
    assert backend.readback(KEY) == (DATA, ReadbackMethod.SERVER)
    monkeypatch.setattr(medium, "resident_pages", lambda _fd, _size: 1)
    assert backend.readback(KEY) == (DATA, ReadbackMethod.CACHED)


@pytest.mark.parametrize("answer", [3, None])
@pytest.mark.usefixtures("no_direct")
def test_pages_left_or_unknown_are_cached(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch, answer: int | None
) -> None:
    """F-138."""
    monkeypatch.setattr(medium, "resident_pages", lambda _fd, _size: answer)
    assert backend.readback(KEY) == (DATA, ReadbackMethod.CACHED)


def test_where_o_direct_is_refused_the_pages_are_dropped(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind(backend.path) in medium._MEMORY:
        pytest.skip("the temporary folder is in memory")
    monkeypatch.setattr(medium, "_MEANS_DIRECT", frozenset({kind(backend.path)}))
    real_fcntl, real_preadv = fcntl.fcntl, os.preadv

    def no_flag(fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_fcntl(fd, command, argument)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", no_flag)
        assert backend.readback(KEY) == (DATA, ReadbackMethod.DROPPED)

    def no_read(fd: int, rooms: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_preadv(fd, [rooms[0][: mmap.PAGESIZE]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", no_read)
        assert backend.readback(KEY) == (DATA, ReadbackMethod.DROPPED)


def test_dirty_pages_are_on_the_device_before_they_are_read(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that somebody else put there may not have been synced by anyone."""
    path = backend.path / "objects" / "ab" / "other"
    path.write_bytes(DATA)
    order: list[str] = []

    def around(name: str, _arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        order.append(name)
        return call()

    intercept(monkeypatch, around, ("fsync", "posix_fadvise", "pread", "preadv"))
    data, method = backend.readback("objects/ab/other")
    assert data == DATA
    if method is not ReadbackMethod.CACHED:
        assert order[:2] == ["fsync", "posix_fadvise"]
        assert set(order[2:]) <= {"pread", "preadv"}
