"""Having a store to oneself: writers and collections keep out of each other's way, and the dead are in nobody's."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import ckptstore
from ckptstore import leases
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.backends.flocks import lock_folder
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.owners import this_process
from ckptstore.collection import exclusion
from ckptstore.collection.exclusion import exclusive
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    ConflictError,
    CorruptError,
    NotFoundError,
    ReadOnlyError,
    UsageError,
)
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY, collection_key, pin_key
from ckptstore.format.records import CollectionMarker, Pin
from ckptstore.store import Store
from tests.support.claims import ELSEWHERE, dead, in_a_container, listed, plant_lease, plant_marker
from tests.support.distant import Distant, made
from tests.support.faulty import FaultyBackend
from tests.support.states import memory_store
from tests.support.training import commit_state, make_training, save_steps

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Digest.of(b"any")


@pytest.fixture(params=["directory", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store."""
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


def twin(store: Store) -> Store:
    """The same store, opened once more."""
    return ckptstore.open(store.url)


def collect_nothing(store: Store, age: int | None = None) -> tuple[str, ...]:
    """Go in and out; what was taken away."""
    with exclusive(store, break_leases_older_than=age) as guard:
        guard.check()
        return guard.broken


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


# -- those of whom nobody can tell ------------------------------------------------------------------------------------


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


# -- what is decided under a lease ------------------------------------------------------------------------------------


def test_files_that_were_collected_before_the_save_are_missed_by_it(disk: Store, tmp_path: Path) -> None:
    """An object that this process wrote under an earlier lease may be gone: it is looked for before a ref names it."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer.json").write_text("{}" * 50)
    tree = disk.put_tree(tmp_path / "files")
    (chunk,) = disk.tree(tree).files[0].chunks
    training = make_training()
    training.step()
    with disk.run("main", **training.objects(), files=tree) as run:
        run.resume()
        disk.backend.delete(f"objects/{chunk.hex[:2]}/{chunk.hex}")
        with pytest.raises(NotFoundError, match="tokenizer"):
            run.save(1)
        assert disk.head("main") is None
        assert disk.put_tree(tmp_path / "files") == tree
        run.save(1)
    assert disk.verify("main").ok


def test_every_writer_holds_a_lease_from_its_first_look_to_its_last_word(tmp_path: Path) -> None:
    """F-140, B078: what it finds there, and leaves out for that, is not collected before a ref or a pin names it."""
    here = ckptstore.open(tmp_path / "here", create=True)
    (root,) = save_steps(here, "main", make_training(), 1)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_text("a")
    from ckptstore.export import export_weights, import_weights

    export_weights(here, root, tmp_path / "weights.safetensors")

    def sharded(store: Store) -> None:
        attempt = store.begin("wide")
        parts = [ckptstore.TrainingState(model=nn.ModuleDict({name: nn.Linear(3, 3)})) for name in "ab"]
        receipts = [store.save_shard(part, attempt, step=1, index=i, count=2) for i, part in enumerate(parts)]
        store.commit(attempt, receipts)

    works: dict[str, Callable[[Store], object]] = {
        "save": lambda store: save_steps(store, "main", make_training(), 1),
        "sharded": sharded,
        "push": lambda store: ckptstore.push(here, store, root, ref="main"),
        "pull": lambda store: ckptstore.pull(here, store, root, shards=[0]),
        "tree": lambda store: store.put_tree(tmp_path / "files"),
        "import": lambda store: import_weights(store, tmp_path / "weights.safetensors", "weights"),
        "move": lambda store: store.refs.move("empty", None, None),
    }
    for name, work in works.items():
        backend = FaultyBackend(memory_store().backend)
        alone: list[str] = []

        def look(key: str, backend: FaultyBackend = backend, alone: list[str] = alone) -> None:
            if not list(backend.list("leases/")):
                alone.append(key)

        for prefix in ("objects/", "documents/", "refs/", "pins/", "retired/"):
            backend.before("create", look, prefix=prefix)
        work(Store(backend))
        assert alone == [], name
        assert list(backend.list("leases/")) == []
