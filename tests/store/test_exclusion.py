"""Having a store to oneself: writers and collections keep out of each other's way, and the dead are in nobody's."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from pathlib import Path

import pytest
from torch import nn

import ckptstore
from ckptstore.backends.flocks import lock_folder
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.owners import this_process
from ckptstore.collection.exclusion import exclusive
from ckptstore.errors import (
    BackendError,
    ConflictError,
    NotFoundError,
    ReadOnlyError,
    UsageError,
)
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY, collection_key
from ckptstore.format.records import CollectionMarker, Pin
from ckptstore.store import Store
from tests.support.claims import (
    ELSEWHERE,
    collect_nothing,
    dead,
    in_a_container,
    listed,
    plant_lease,
    plant_marker,
    twin,
)
from tests.support.faulty import FaultyBackend
from tests.support.states import memory_store
from tests.support.training import commit_state

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Digest.of(b"any")


@pytest.fixture
def store(either_store: Store) -> Store:
    return either_store


# -- writers are in the way of a collection ---------------------------------------------------------------------------


def test_a_collection_begins_where_nobody_writes_and_leaves_nothing_behind(store: Store) -> None:
    """F-164."""
    before = listed(store, "")
    with exclusive(store) as guard:
        (key,) = listed(store, "gc/")
        assert key == collection_key(1) == guard.key
        marker = CollectionMarker.parse(store.backend.get(key))
        assert marker.process == str(this_process())
        assert marker.nonce == guard.nonce
        guard.check()
        assert guard.broken == ()
    assert listed(store, "") == before


def test_a_collection_withdraws_from_a_live_writer_and_says_who_it_is(store: Store) -> None:
    """F-165: and nothing was changed, whatever age is to be broken: it lives."""
    with twin(store).lease():
        before = listed(store, "")
        for age in (None, 0):
            with pytest.raises(ConflictError, match=rf"in use: lease of process {os.getpid()} on .* since 20") as told:
                collect_nothing(store, age)
            assert "wait until it has ended" in told.value.hint
        assert listed(store, "") == before
    assert collect_nothing(store) == ()


def test_one_who_writes_cannot_collect_at_the_same_time(store: Store) -> None:
    with store.lease(), pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        collect_nothing(store)


def test_what_is_no_store_any_more_or_cannot_be_written_is_not_collected(tmp_path: Path) -> None:
    store = memory_store()
    store.backend.delete(STORE_KEY)
    with pytest.raises(NotFoundError, match="ckptstore"):
        collect_nothing(store)

    class Reading:
        url, traits = store.url, store.backend.traits

    with pytest.raises(ReadOnlyError, match="delete"):
        collect_nothing(Store(Reading()))  # type: ignore[arg-type]


@pytest.mark.parametrize("age", [-1, 1.5, True, "1h"])
def test_an_age_that_is_none_is_refused(store: Store, age: object) -> None:
    with pytest.raises(UsageError, match="seconds"):
        collect_nothing(store, age)  # type: ignore[arg-type]


# -- a collection is in the way of writers ----------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_a_writer_withdraws_from_a_running_collection_and_leaves_nothing_behind(store: Store) -> None:
    """F-141."""
    with exclusive(store):
        before = listed(store, "")
        with pytest.raises(ConflictError, match="collection"), twin(store).lease():
            pass
        with pytest.raises(ConflictError, match="collection"), store.lease():
            pass
        assert listed(store, "") == before
    with twin(store).lease(), store.lease():
        pass


def test_a_writer_waits_for_a_collection_that_ends(store: Store) -> None:
    entered, leave = threading.Event(), threading.Event()

    def collect() -> None:
        with exclusive(twin(store)):
            entered.set()
            leave.wait(60)

    collector = threading.Thread(target=collect)
    collector.start()
    entered.wait(60)
    threading.Timer(0.1, leave.set).start()
    with store.lease():
        assert listed(store, "gc/") == []
    collector.join()


def test_a_writer_waits_no_longer_than_its_own_deadline(store: Store) -> None:
    with exclusive(twin(store)), ckptstore.deadline(1.5), pytest.raises(ConflictError, match="collection"):
        store.lease().__enter__()


@pytest.mark.usefixtures("impatient")
def test_of_two_collections_one_wins_and_the_other_is_told(store: Store) -> None:
    with exclusive(store):
        before = listed(store, "")
        with pytest.raises(ConflictError, match=rf"collection of process {os.getpid()}"):
            collect_nothing(twin(store), 0)
        assert listed(store, "") == before
    assert collect_nothing(twin(store)) == ()


def test_of_two_collections_that_begin_at_the_same_moment_at_most_one_wins() -> None:
    """Whichever made the number first; the other finds it taken. And one that saw an old listing finds another's."""
    faulty = FaultyBackend(MemoryBackend())
    faulty.create(STORE_KEY, b"a header")
    store = Store(faulty)
    faulty.before("create", lambda _key: plant_marker(store, this_process()), nth=1, prefix="gc/")
    with pytest.raises(ConflictError, match="at the same moment"):
        collect_nothing(store)
    assert listed(store, "gc/") == [collection_key(1)]
    store.backend.delete(collection_key(1))
    faulty.heal()
    faulty.before("create", lambda _key: plant_marker(store, this_process(), 2), nth=1, prefix="gc/")
    with pytest.raises(ConflictError, match="in use: collection of"):
        collect_nothing(store)
    assert listed(store, "gc/") == [collection_key(2)]


def test_a_marker_whose_answer_was_lost_is_found_again() -> None:
    store = memory_store()
    faulty = FaultyBackend(store.backend)
    faulty.fail("create", BackendError("lost"), nth=1, prefix="gc/", took_effect=True)
    with pytest.raises(BackendError, match="lost"):
        collect_nothing(Store(faulty))
    assert listed(store, "gc/") == []


# -- the dead ---------------------------------------------------------------------------------------------------------


@linux
def test_leases_of_dead_writers_are_taken_away_at_once(store: Store) -> None:
    """F-113, F-165: by number and start of the process; no clock is asked."""
    key = plant_lease(store, dead(), ago=-9999)
    roots = commit_state(store, "main", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)
    (broken,) = collect_nothing(store)
    assert broken.startswith("lease of process")
    assert key in broken
    assert listed(store, "leases/") == []
    assert [record.root for record in store.refs.log("main")] == [roots], "the dead make no late moves"


@linux
def test_over_a_network_what_the_dead_asked_for_may_be_under_way(distant: Store) -> None:
    """F-167: so a ref is fenced, and a marker of a dead collection is in every writer's way."""
    root = commit_state(distant, "main", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)
    plant_lease(distant, dead())
    assert len(collect_nothing(distant)) == 1
    assert [record.root for record in distant.refs.log("main")] == [root, root]


@linux
def test_a_collection_that_died_is_in_no_writers_way_on_this_machine(disk: Store) -> None:
    """F-141: it deletes nothing any more. The next collection removes its marker, and fences what it may not have."""
    root = commit_state(disk, "main", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)
    key = plant_marker(disk, dead(), 7)
    with disk.lease():
        assert listed(disk, "gc/") == [key]
    (broken,) = collect_nothing(disk)
    assert broken.startswith("collection of process")
    assert listed(disk, "gc/") == []
    assert [record.root for record in disk.refs.log("main")] == [root, root]


@linux
@pytest.mark.usefixtures("impatient")
def test_a_collection_that_died_elsewhere_is_in_the_way_until_somebody_says_so(store: Store, distant: Store) -> None:
    for place, owner in ((store, ELSEWHERE), (distant, dead())):
        key = plant_marker(place, owner, ago=50)
        with pytest.raises(ConflictError, match="collection is running, or ended without") as told, place.lease():
            pass
        assert "--break-leases-older-than" in told.value.hint
        assert listed(place, "") == [STORE_KEY, key]
    with pytest.raises(ConflictError, match="cannot be told"):
        collect_nothing(store)
    assert len(collect_nothing(store, 0)) == 1
    assert len(collect_nothing(distant)) == 1
    for place in (store, distant):
        with place.lease():
            pass


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 100, Pin(None, "no marker").encode()])
def test_a_marker_or_lease_that_cannot_be_read_is_in_the_way(store: Store, data: bytes) -> None:
    for key in ("gc/now", f"leases/{secrets.token_hex(16)}"):
        store.backend.create(key, data)
        if key == "gc/now":
            with pytest.raises(ConflictError, match="cannot be read"), store.lease():
                pass
        for age in (None, 3600):
            with pytest.raises(ConflictError, match="cannot be read"):
                collect_nothing(store, age)
        (broken,) = collect_nothing(store, 0)
        assert key in broken
    assert listed(store, "") == [STORE_KEY]


@linux
def test_a_writer_in_a_container_that_died_has_given_its_lock_back(disk: Store, tmp_path: Path) -> None:
    """F-166: a process number says nothing there, and the lock of the kernel that both run under does."""
    key = plant_lease(disk, in_a_container())
    assert key in collect_nothing(disk)[0]
    plant_lease(disk, in_a_container())
    held = lock_folder(tmp_path / "disk", exclusive=False)
    assert held is not None
    with held, pytest.raises(ConflictError, match="process 4321 on elsewhere"):
        collect_nothing(disk, 0)
    assert len(collect_nothing(disk)) == 1


@linux
def test_a_collection_in_a_container_that_died_has_given_its_lock_back(disk: Store) -> None:
    plant_marker(disk, in_a_container())
    with disk.lease():
        pass
