"""Processes, threads and forks that have a store open at once, and the lock of the kernel between them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore import leases
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.backends.flocks import lock_folder
from ckptstore.collection.exclusion import exclusive
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    ConflictError,
    CorruptError,
)
from ckptstore.store import Store
from tests.support.claims import (
    collect_nothing,
    in_a_container,
    listed,
    plant_lease,
    twin,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def store(either_store: Store) -> Store:
    return either_store


# -- processes, threads, forks ----------------------------------------------------------------------------------------


def test_all_blocks_and_threads_of_a_process_share_one_lease(store: Store) -> None:
    """F-140: by backend; another store object on the same place has its own."""
    with leases.lease(store.backend), store.lease(), leases.lease(store.backend):
        assert len(listed(store, "leases/")) == 1
        if isinstance(store.backend, DirectoryBackend):
            with twin(store).lease():
                assert len(listed(store, "leases/")) == 2
        assert leases.held_since(store.backend) is not None
    assert leases.held_since(store.backend) is None
    assert listed(store, "leases/") == []


def in_a_child(work: Callable[[], object]) -> int:
    """Exit code of a forked child that does ``work``: 1 after an error of ours, 3 after another."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except CkptStoreError:
            os._exit(1)
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@linux
def test_a_child_neither_releases_nor_holds_what_its_parent_holds(disk: Store) -> None:
    """Not when it leaves the parent's block, and not for as long as it lives."""
    block = leases.lease(disk.backend)
    with block:
        (mine,) = listed(disk, "leases/")

        def leave() -> None:
            try:
                raise KeyError
            finally:
                block.__exit__(None, None, None)  # what unwinding the parent's block does

        assert in_a_child(leave) == 3
        assert listed(disk, "leases/") == [mine]

        def collect() -> None:
            collect_nothing(twin(disk), 0)

        assert in_a_child(collect) == 1, "the parent still writes"

        def write() -> None:
            with leases.lease(disk.backend):
                assert len(listed(disk, "leases/")) == 2

        assert in_a_child(write) == 0, "a child has a lease of its own"
        assert listed(disk, "leases/") == [mine]
        gate, opener = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(opener)
            os.read(gate, 1)
            os._exit(0)
    assert collect_nothing(disk) == (), "the child lives, and holds nothing"
    os.close(opener)
    os.close(gate)
    os.waitpid(child, 0)


@linux
def test_a_child_does_not_end_its_parents_collection(disk: Store) -> None:
    with exclusive(disk) as guard:
        context = exclusive(disk)

        def check() -> None:
            guard.check()

        assert in_a_child(check) == 1, "it is the parent's"

        def collect() -> None:
            with context:
                pass

        assert in_a_child(collect) == 1
        guard.check()
        with pytest.raises(ConflictError, match="process"):
            collect_nothing(twin(disk))
    assert collect_nothing(disk) == ()


@linux
def test_a_writer_that_is_killed_is_in_nobodys_way(disk: Store) -> None:
    """Nor are the workers that it started, which outlive it."""
    gate, opener = os.pipe()
    ready, worker_runs = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(opener)
        with disk.lease():
            if os.fork() == 0:
                os.write(worker_runs, b"1")
            os.read(gate, 1)
            os._exit(0)
    os.read(ready, 1)
    with pytest.raises(ConflictError, match=f"process {writer}"):
        collect_nothing(disk)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    assert len(collect_nothing(disk)) == 1
    for fd in (gate, opener, ready, worker_runs):
        os.close(fd)


# -- the lock ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_a_lock_without_a_lease_ends_the_wait_with_a_word(disk: Store, tmp_path: Path) -> None:
    held = lock_folder(tmp_path / "disk", exclusive=False)
    assert held is not None
    with held, pytest.raises(ConflictError, match="shows no lease") as told:
        collect_nothing(disk)
    assert "fuser" in told.value.hint
    held = lock_folder(tmp_path / "disk", exclusive=True)
    assert held is not None
    with held, pytest.raises(ConflictError, match="holds the lock"), disk.lease():
        pass
    with disk.lease():
        pass


def without_locks(number: int) -> Callable[[int, int], None]:
    def flock(_fd: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_there_are_no_locks_leases_alone_keep_others_out(
    disk: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """F-166: and that is said, once to a process that writes, and to whoever collects."""
    monkeypatch.setattr(fcntl, "flock", without_locks(number))
    for _ in range(2):
        with disk.lease(), pytest.raises(ConflictError, match=f"process {os.getpid()}"):
            collect_nothing(twin(disk))
    assert caplog.text.count("has no file locks") == 1
    with exclusive(disk) as guard:
        (note,) = guard.notes
        assert "no file locks" in note
    plant_lease(disk, in_a_container())
    with pytest.raises(ConflictError, match="cannot be told"):
        collect_nothing(disk)


@pytest.mark.parametrize("plant", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("ckptstore.json")])
def test_nothing_but_a_regular_file_is_locked(disk: Store, tmp_path: Path, plant: Callable[[Path], object]) -> None:
    (tmp_path / "disk" / "lock").unlink(missing_ok=True)
    plant(tmp_path / "disk" / "lock")
    with pytest.raises(CorruptError, match="not a regular file"), disk.lease():
        pass
    with pytest.raises(CorruptError, match="not a regular file"):
        collect_nothing(disk)


def test_a_lock_that_fails_is_told(disk: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks(errno.ENOMEM))
    with pytest.raises(BackendError, match="ENOMEM"), disk.lease():
        pass
    assert listed(disk, "leases/") == []
