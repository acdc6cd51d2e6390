"""The deletions of a collection: what names something goes first, and what cannot go is told and not lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends.protocol import Stat
from ckptstore.collection.exclusion import exclusive
from ckptstore.collection.plan import Plan, plan
from ckptstore.collection.sweep import Swept, sweep
from ckptstore.errors import BackendError, ConflictError
from ckptstore.store import Store
from tests.support.backends import run_without_privilege
from tests.support.claims import dead, listed
from tests.support.collecting import LAST, collected, commit, kept, littered, problems
from tests.support.faulty import FaultyBackend
from tests.support.invariants import broken


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return littered(tmp_path / "store")


def swept(store: Store) -> tuple[Plan, Swept]:
    """Plan and sweep."""
    with exclusive(store) as guard:
        made = plan(store.backend, LAST)
        return made, sweep(store.backend, made, guard)


def test_what_is_kept_stays_and_what_is_not_goes(store: Store, tmp_path: Path) -> None:
    before = kept(store)
    made, done = swept(store)
    assert done.whole
    assert done.failed == ()
    assert (done.deleted_keys, done.deleted_bytes) == (len(made.deletions), made.freed_bytes)
    assert len(made.retired) == 2
    after = kept(store)
    gone = {stat.key for stat in made.deletions}
    assert before.keys() - after.keys() == {key for key in gone if not key.startswith("receipts/")}
    assert after.keys() - before.keys() == {f"retired/{item.root.hex}" for item in made.retired}
    assert sum(key.startswith("objects/") for key in after) == 3
    assert broken(tmp_path / "store") == []
    assert problems(store) == []
    _, again = swept(store)
    assert (again.deleted_keys, again.whole) == (0, True)
    assert kept(store) == after


def test_whatever_names_something_goes_before_it_and_for_good(store: Store) -> None:
    """F-112, F-169: so at every instant nothing is left without what it names."""
    backend = FaultyBackend(store.backend)
    told: list[str] = []
    backend.before("create", told.append)
    backend.before("delete", told.append)
    made, _ = swept(Store(backend))
    marker, *calls = [key for key in told if not key.startswith("leases/")]
    assert marker == calls.pop()
    assert sorted(calls[: len(made.retired)]) == sorted(f"retired/{item.root.hex}" for item in made.retired)
    rest = calls[len(made.retired) :]
    for stage in made.stages:
        assert sorted(rest[: len(stage)]) == sorted(stat.key for stat in stage)
        del rest[: len(stage)]
    assert rest == []


@pytest.mark.parametrize("prefix", ["documents/", "objects/"])
def test_what_cannot_be_deleted_is_told_and_keeps_what_it_may_name(store: Store, tmp_path: Path, prefix: str) -> None:
    backend = FaultyBackend(store.backend)
    locked: list[str] = []

    def lock(key: str) -> None:
        locked.append(key)
        raise BackendError(f"deleting key {key}", "it is locked")

    backend.before("delete", lock, nth=1, prefix=prefix)
    made, done = swept(Store(backend))
    assert not done.whole
    ((key, why),) = done.failed
    assert [key] == locked
    assert "it is locked" in why
    number = next(i for i, stage in enumerate(made.stages) if key in {stat.key for stat in stage})
    left = {stat.key for stage in made.stages[number + 1 :] for stat in stage}
    assert done.left_keys == 1 + len(left)
    assert left < kept(store).keys()
    assert broken(tmp_path / "store") == []
    backend.heal()
    assert swept(Store(backend))[1].whole
    assert kept(store).keys().isdisjoint({key, *left})


def test_a_retirement_that_cannot_be_written_stops_everything(store: Store) -> None:
    """F-112."""
    before = kept(store)
    backend = FaultyBackend(store.backend)
    backend.fail("create", BackendError("disk", "broken"), prefix="retired/")
    with pytest.raises(BackendError, match="broken"):
        swept(Store(backend))
    assert kept(store) == before
    assert listed(store, "gc/") == []


def test_a_sweep_whose_marker_was_taken_away_stops(store: Store) -> None:
    """F-168: in the middle of it."""
    backend = FaultyBackend(store.backend)
    backend.after("delete", lambda _key: [store.backend.delete(key) for key in listed(store, "gc/")], nth=1)
    with pytest.raises(ConflictError, match="somebody took this collection for dead"):
        swept(Store(backend))
    assert sum(key.startswith("objects/") for key in kept(store)) == 6
    assert swept(store)[1].whole
    assert problems(store) == []


def test_progress_is_told_in_bytes(store: Store) -> None:
    told: list[tuple[int, int]] = []
    done = collected(store, progress=lambda *now: told.append(now))
    assert told[-1] == (done.plan.freed_bytes, done.plan.freed_bytes)
    assert [now for now, _ in told] == sorted(now for now, _ in told)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_dead_writers_left_half_written_goes_and_quarantine_stays(store: Store, tmp_path: Path) -> None:
    """F-139."""
    path = tmp_path / "store"
    (path / "tmp" / f"{dead()}.{'0' * 16}").write_bytes(b"half")
    (path / "tmp" / "somebody's").write_bytes(b"half")
    key = next(key for key in kept(store) if key.startswith("objects/"))
    good = store.backend.get(key)
    store.backend.replace(key, good)
    collected(store)
    assert os.listdir(path / "tmp") == ["somebody's"]
    assert len(os.listdir(path / "quarantine")) == 1


def test_many_keys_go_with_one_sync_of_each_folder(store: Store, tmp_path: Path) -> None:
    backend = store.backend
    assert hasattr(backend, "delete_many")
    keys = [f"objects/ab/{number:064x}" for number in range(5)] + [f"objects/ac/{0:064x}"]
    for key in keys:
        backend.create(key, b"x")
    absent = [f"objects/ab/{9:064x}", f"objects/ad/{9:064x}"]
    (tmp_path / "store" / keys[0]).unlink()
    (tmp_path / "store" / keys[0]).mkdir()
    assert list(backend.delete_many([*keys, *absent])) == keys[:1]
    assert {stat.key for stat in backend.list("objects/")}.isdisjoint(keys)


PROGRAM = """
import sys
import ckptstore
from tests.support.collecting import collected
done = collected(ckptstore.open(sys.argv[1]))
print(done.swept.deleted_keys, done.swept.left_keys, len(done.swept.failed), done.swept.failed[0][1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="drops a capability of Linux")
def test_a_folder_that_may_not_be_changed_is_told(store: Store, tmp_path: Path) -> None:
    """What lies in it stays, and so does what it may name."""
    key = next(stat.key for stat in plan(store.backend, LAST).stages[-1])
    folder = (tmp_path / "store" / key).parent
    folder.chmod(0o555)
    try:
        done = run_without_privilege(PROGRAM, str(tmp_path / "store"))
    finally:
        folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    _, left, failed, why = done.stdout.split(maxsplit=3)
    assert (left, failed) == ("1", "1")
    assert "EACCES" in why
    assert broken(tmp_path / "store") == []
    assert swept(store)[1].whole


def test_what_was_retired_and_is_made_again_is_whole(store: Store, tmp_path: Path) -> None:
    """The same training gives the same root again."""
    collected(store)
    again = ckptstore.open(tmp_path / "store")
    first = commit(again, "other", 3, 4)
    assert again.verify(first).ok
    collected(again)
    assert again.verify(first).ok
    assert broken(tmp_path / "store") == []


def test_a_plan_of_nothing_deletes_nothing(store: Store) -> None:
    class Empty:
        retired = ()
        stages: tuple[tuple[Stat, ...], ...] = ((), ())

    with exclusive(store) as guard:
        assert sweep(store.backend, Empty(), guard) == Swept(0, 0)
