"""Writers and collections of whom nobody can tell whether they live, and those that only slept."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from torch import nn

import ckptstore
from ckptstore import leases
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.collection.exclusion import exclusive
from ckptstore.errors import (
    BackendError,
    ConflictError,
)
from ckptstore.format.digest import Digest
from ckptstore.format.keys import pin_key
from ckptstore.format.records import CollectionMarker, Pin
from ckptstore.store import Store
from tests.support.claims import (
    ELSEWHERE,
    collect_nothing,
    dead,
    listed,
    plant_lease,
    plant_marker,
)
from tests.support.faulty import FaultyBackend
from tests.support.states import memory_store
from tests.support.training import commit_state

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Digest.of(b"any")


@pytest.fixture
def store(either_store: Store) -> Store:
    return either_store


def test_a_writer_of_whom_nobody_can_tell_is_in_the_way(store: Store) -> None:
    """F-165: until the user says that it is gone, and it is as old as the user said."""
    key = plant_lease(store, ELSEWHERE, ago=100)
    before = listed(store, "")
    with pytest.raises(ConflictError, match=rf"cannot be told.* process 4321 on elsewhere since .*{key}") as told:
        collect_nothing(store)
    assert "--break-leases-older-than" in told.value.hint
    with pytest.raises(ConflictError, match="cannot be told") as told:
        collect_nothing(store, 3600)
    assert "younger than 3600 s" in told.value.hint
    assert listed(store, "") == before
    assert key in collect_nothing(store, 0)[0]


def age_file(store: Store, key: str, ago: float) -> None:
    """Let the file system say that a key was written so long ago."""
    assert isinstance(store.backend, DirectoryBackend)
    path = store.backend.path / key
    moment = path.stat().st_mtime - ago
    os.utime(path, (moment, moment))


@pytest.mark.parametrize(("written", "stored"), [(100, 9999), (9999, 100), (-9999, 9999), (9999, -9999), (0, 0)])
def test_no_clock_alone_makes_a_lease_old(disk: Store, written: int, stored: int) -> None:
    """F-165: neither its maker's nor the file system's: a clock that was set back or ahead breaks nothing. And one who
    says that age does not matter is taken at his word."""
    key = plant_lease(disk, ELSEWHERE, ago=written)
    age_file(disk, key, stored)
    with pytest.raises(ConflictError, match="cannot be told"):
        collect_nothing(disk, 3600)
    assert key in collect_nothing(disk, 0)[0]


def test_a_lease_that_is_old_by_every_clock_is_taken_away_if_asked_for(disk: Store) -> None:
    key = plant_lease(disk, ELSEWHERE, ago=9999)
    age_file(disk, key, 9999)
    with pytest.raises(ConflictError, match="cannot be told"):
        collect_nothing(disk)
    assert key in collect_nothing(disk, 3600)[0]


def test_a_writer_that_only_slept_cannot_move_a_ref(monkeypatch: pytest.MonkeyPatch) -> None:
    """F-167: every ref is fenced, also for a writer that does not look for its lease."""
    store = memory_store()
    state = [ckptstore.TrainingState(model=nn.Linear(2, 2))]
    root = commit_state(store, "main", state, 1)
    commit_state(store, "other", state, 1)
    head = store.refs.head("main")
    backend = FaultyBackend(store.backend)
    monkeypatch.setattr(leases, "this_process", lambda: ELSEWHERE)
    sleeper = Store(backend)
    with sleeper.lease():
        assert len(collect_nothing(store, 0)) == 1
        assert [record.root for record in store.refs.log("main")] == [root, root]
        assert len(list(store.refs.log("other"))) == 2
        with pytest.raises(ConflictError, match="took this process for dead"):
            sleeper.refs.move("main", None, head)
        backend.before("stat", lambda _key: plant_back(store, sleeper), prefix="leases/")
        with pytest.raises(ConflictError, match="somebody else"):
            sleeper.refs.move("main", None, head)
    assert store.head("main") == root


def plant_back(store: Store, sleeper: Store) -> None:
    """As if the lease was still there when the writer looked."""
    key = leases._tenures[id(sleeper.backend)].key
    store.backend.create(key, b"there")


def test_a_writer_that_only_slept_names_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """F-168: neither by the first record of a ref nor by a pin. What it created before it looked again goes."""
    store = memory_store()
    backend = FaultyBackend(store.backend)
    sleeper = Store(backend)
    works: dict[str, Callable[[], object]] = {
        "pins/": lambda: leases.publish(backend, pin_key(ROOT, "0" * 32), Pin(None, "late").encode()),
        "refs/": lambda: sleeper.refs.move("new", ROOT, None),
    }
    monkeypatch.setattr(leases, "this_process", lambda: ELSEWHERE)
    with sleeper.lease():
        (mine,) = listed(store, "leases/")
        for prefix, work in works.items():
            backend.before("create", lambda _key: collect_nothing(store, 0), nth=1, prefix=prefix)
            with pytest.raises(ConflictError, match="took this process for dead"):
                work()
            left = listed(store, prefix)
            with pytest.raises(ConflictError, match="took this process for dead"):
                work()
            assert listed(store, prefix) == left
            store.backend.create(mine, b"there")
    assert [record.root for record in store.refs.log("new")] == [None, ROOT]
    assert listed(store, "pins/") == []


def test_an_answer_that_the_lease_is_not_there_is_asked_for_twice() -> None:
    """Over a network, one may be wrong."""
    store = memory_store()
    backend = FaultyBackend(store.backend)
    with Store(backend).lease():
        backend.before("stat", lambda key: store.backend.delete(key), prefix="leases/")
        with pytest.raises(ConflictError):
            leases.check_lease(backend)


def test_a_pin_that_was_there_stays_if_the_lease_is_lost() -> None:
    store = memory_store()
    backend = FaultyBackend(store.backend)
    key = pin_key(ROOT, "0" * 32)
    store.backend.create(key, Pin(None, "mine").encode())
    with Store(backend).lease():
        (mine,) = listed(store, "leases/")
        backend.before("create", lambda _key: store.backend.delete(mine), prefix="pins/")
        with pytest.raises(ConflictError):
            leases.publish(backend, key, Pin(None, "late").encode())
    assert listed(store, "pins/") == [key]


def test_a_collection_that_only_slept_stops(store: Store) -> None:
    """F-168: its marker is gone, or is somebody else's."""
    with exclusive(store) as guard:
        guard.check()
        store.backend.delete(guard.key)
        with pytest.raises(ConflictError, match="marker"):
            guard.check()
        plant_marker(store, ELSEWHERE)
        with pytest.raises(ConflictError, match="marker"):
            guard.check()


@linux
def test_a_collection_that_dies_before_its_fence_leaves_the_fence_to_the_next(disk: Store) -> None:
    """F-167: its own marker tells the next one that there may be sleepers, though their leases are gone."""
    root = commit_state(disk, "main", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)
    plant_lease(disk, ELSEWHERE)
    faulty = FaultyBackend(disk.backend)
    faulty.fail("list", BackendError("power cut"), prefix="refs/")
    faulty.fail("delete", BackendError("power cut"), prefix="gc/")
    with pytest.raises(BackendError, match="power cut"):
        collect_nothing(Store(faulty), 0)
    assert listed(disk, "leases/") == []
    (key,) = listed(disk, "gc/")
    disk.backend.replace(key, CollectionMarker("here", str(dead()), "then", "0" * 32).encode())
    assert len(collect_nothing(disk)) == 1
    assert [record.root for record in disk.refs.log("main")] == [root, root]
