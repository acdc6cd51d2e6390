"""Savers and collections of one store at once: nothing that a ref or a pin names is lost, and who loses is told (B078).

Public sources: eng-floe/floecat#390; earth-mover/icechunk#368.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest
import torch

import ckptstore
from ckptstore import leases
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CommitAbortedError, ConflictError, NotFoundError
from ckptstore.format.keys import object_key
from ckptstore.store import Store
from tests.support.claims import listed
from tests.support.collecting import abandon, collected, commit, littered, problems, save_at_random, state
from tests.support.faulty import FaultyBackend
from tests.support.invariants import broken
from tests.support.states import memory_store

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child has none of the threads that torch computes with, and would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers wait for nobody."""
    monkeypatch.setattr(leases, "PATIENCE_SECONDS", 0.0)


def weight_keys(store: Store) -> list[str]:
    """Keys of the objects."""
    return listed(store, "objects/")


def test_an_old_object_that_a_save_uses_again_survives_the_collection_between(tmp_path: Path) -> None:
    """B078: whoever looked first. It was stored long ago and nothing names it; the save leaves out writing it."""
    store = ckptstore.open(tmp_path / "store", create=True)
    commit(store, "main", 0)
    abandon(store, 1, 2)
    with store.lease():
        attempt = store.begin("main")
        receipt = store.save_shard(state(0, 1, 2), attempt, step=2)  # writes none of them
        with pytest.raises(ConflictError, match="in use"):
            collected(ckptstore.open(store.url))
        root = store.commit(attempt, [receipt])
    assert ckptstore.open(store.url).verify(root).ok
    collected(ckptstore.open(store.url))
    assert ckptstore.open(store.url).verify(root).ok


def test_what_was_collected_between_two_saves_is_written_again(tmp_path: Path) -> None:
    """B078: this process wrote it, and remembers that; it is looked for nevertheless."""
    store = ckptstore.open(tmp_path / "store", create=True)
    commit(store, "main", 0)
    abandon(store, 1, 2)
    gone = set(weight_keys(store))
    collected(ckptstore.open(store.url))
    gone -= set(weight_keys(store))
    assert len(gone) == 2
    root = commit(store, "main", 0, 1, 2)
    assert ckptstore.open(store.url).verify(root).ok
    assert gone < set(weight_keys(store))


def test_a_shard_that_was_collected_before_its_commit_aborts_it(tmp_path: Path) -> None:
    """Between its save and the commit no lease holds it; the coordinator looks before the ref names it."""
    store = ckptstore.open(tmp_path / "store", create=True)
    commit(store, "main", 0)
    attempt = store.begin("main")
    receipts = [store.save_shard(state(number), attempt, step=2, index=number, count=2) for number in (0, 1)]
    collected(ckptstore.open(store.url))
    with pytest.raises(NotFoundError) as told:
        store.commit(attempt, receipts)
    assert "store it again" in told.value.hint
    assert problems(store) == []
    with pytest.raises(CommitAbortedError):
        store.verdict(attempt, receipts[0], deadline=0.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("held", [False, True], ids=["two leases", "one lease"])
def test_a_collection_at_any_call_of_a_save_is_refused_or_does_no_harm(held: bool, late: bool) -> None:
    """B078: every interleaving of a save with a whole collection in one place.

    Under one lease, as a run does it, each save comes about. With one for the shard and one for the commit, the
    collection may come in between; then that is told, and the next save comes about.
    """

    def world() -> tuple[Store, FaultyBackend]:
        store = memory_store()
        faulty = FaultyBackend(store.backend)
        saver = Store(faulty)
        commit(saver, "main", 0)
        abandon(saver, 1, 2)
        return store, faulty

    def interleave(nth: int) -> tuple[int, str]:
        store, faulty = world()
        seen, came_to = 0, "not yet"

        def collect(_key: str) -> None:
            nonlocal seen, came_to
            seen += 1
            if seen == nth:
                try:
                    collected(Store(store.backend))
                    came_to = "done"
                except ConflictError:
                    came_to = "refused"

        for operation in ("get", "readback", "stat", "list", "create", "delete"):
            (faulty.after if late else faulty.before)(operation, collect)
        saver = Store(faulty)
        saver.objects.put_object(b"")  # a set of verified keys that is not empty
        with saver.lease() if held else nullcontext():
            try:
                root = commit(saver, "main", 0, 1, 2)
            except NotFoundError:
                if held:
                    raise
                root = commit(saver, "main", 0, 1, 2)
        faulty.heal()
        reader = Store(store.backend)
        assert reader.head("main") == root
        assert reader.verify(root).ok, f"collection at call {nth} {came_to}"
        collected(reader)
        assert reader.verify(root).ok
        assert listed(reader, "leases/") == listed(reader, "gc/") == []
        return seen, came_to

    calls, _ = interleave(0)
    came_to = {interleave(nth)[1] for nth in range(1, calls + 1)}
    assert came_to == {"done", "refused"}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_save_at_a_call_of_a_collection_is_refused_or_whole(late: bool, step: int) -> None:
    """B078: every interleaving of a collection with a whole save in one place, which uses what is being deleted."""

    litter = littered(memory_store().url)

    def interleave(nth: int) -> tuple[int, str]:
        store = Store(MemoryBackend())
        for stat in litter.backend.list(""):
            store.backend.create(stat.key, litter.backend.get(stat.key))
        faulty = FaultyBackend(store.backend)
        seen, came_to = 0, "not yet"

        def save(_key: str) -> None:
            nonlocal seen, came_to
            seen += 1
            if seen == nth:
                try:
                    commit(Store(store.backend), "main", 3, 5)
                    came_to = "done"
                except ConflictError:
                    came_to = "refused"

        for operation in ("get", "readback", "stat", "list", "create", "delete"):
            (faulty.after if late else faulty.before)(operation, save)
        try:
            collected(Store(faulty))
        except ConflictError:  # the save came first, and the collection looked while it was at work
            came_to += ", collection refused"
        faulty.heal()
        assert problems(store) == [], f"save at call {nth} {came_to}"
        commit(store, "main", 3, 4, 5)
        assert problems(store) == []
        return seen, came_to

    calls, _ = interleave(0)
    came_to = {interleave(nth)[1] for nth in {*range(1 + late, calls + 1, step), calls}}
    assert {"done", "refused"} <= came_to


# -- processes --------------------------------------------------------------------------------------------------------


def at_once(folder: Path, *works: Callable[[], object]) -> list[dict[str, int]]:
    """What each of ``works`` came to, done in processes of their own; none hangs, and none fails."""
    children = []
    for number, work in enumerate(works):
        child = os.fork()
        if child == 0:
            try:
                (folder / f"came-to-{number}").write_text(json.dumps(work()))
            except BaseException as error:
                (folder / f"came-to-{number}").write_text(json.dumps({"failed": repr(error)}))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    came_to = [json.loads((folder / f"came-to-{number}").read_text()) for number in range(len(works))]
    assert [item for item in came_to if "failed" in item] == []
    return came_to


def saver(url: str, seed: int, rounds: int, deleted: Path) -> Callable[[], object]:
    """Saves; half-way it leaves an attempt behind, and goes on when a collection has deleted something."""

    def work() -> object:
        store, ref = ckptstore.open(url), f"ref-{seed % 2}x"
        first = save_at_random(store, ref, seed, rounds - rounds // 2)
        abandon(store, 0, 6)
        end = time.monotonic() + 120
        while not deleted.exists():
            assert time.monotonic() < end, "no collection came about"
            time.sleep(0.02)
        second = save_at_random(store, ref, seed + 1000, rounds // 2)
        return {name: first[name] + second[name] for name in first}

    return work


def collector(url: str, seed: int, done: Path, savers: int, deleted: Path) -> Callable[[], object]:
    """Collects, again and again, until the savers have ended; makes the file ``deleted`` when it first was of use."""

    def work() -> object:
        draw = Random(seed)
        counts = {"collected": 0, "deleted": 0, "told": 0}
        while len(list(done.iterdir())) < savers:
            try:
                swept = collected(ckptstore.open(url)).swept
                assert swept is not None
                counts["collected"] += 1
                counts["deleted"] += swept.deleted_keys
                if swept.deleted_keys:
                    deleted.touch()
            except ConflictError:
                counts["told"] += 1
            time.sleep(draw.uniform(0, 0.05))
        return counts

    return work


def race(url: str, folder: Path, *, savers: int, collectors: int, rounds: int, seed: int) -> dict[str, int]:
    """Let them loose; what came about in all, when everything is sound."""
    ckptstore.open(url, create=True)
    done, deleted = folder / "done", folder / "deleted"
    done.mkdir()

    def until_done(number: int) -> Callable[[], object]:
        work = saver(url, seed + number, rounds, deleted)

        def save() -> object:
            try:
                return work()
            finally:
                (done / f"{number}").touch()

        return save

    works = [until_done(number) for number in range(savers)]
    works += [collector(url, seed + 100 + number, done, savers, deleted) for number in range(collectors)]
    came_to = at_once(folder, *works)
    total: dict[str, int] = {}
    for counts in came_to:
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    store = ckptstore.open(url)
    assert problems(store) == []
    collected(store)
    assert problems(store) == []
    assert listed(store, "leases/") == listed(store, "gc/") == []
    return total


@linux
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("rounds", "seed"),
    [(8, 1), *(pytest.param(25, seed, marks=pytest.mark.deep) for seed in range(2, 5))],
)
def test_savers_and_collections_at_once_lose_nothing(
    tmp_path: Path, rounds: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """B078: three savers and two collections, whose states share weights of which some are nobody's for a while."""
    url = str(tmp_path / "store")
    total = race(url, tmp_path, savers=3, collectors=2, rounds=rounds, seed=seed)
    with capsys.disabled():
        print(f"\n{total}", end="")
    assert broken(tmp_path / "store") == []
    assert total["saved"] > 0
    assert total["collected"] > 0
    assert total["deleted"] > 0


def test_objects_that_are_shared_have_keys_that_are_shared(tmp_path: Path) -> None:
    """The races above are about something: the same weight has the same key in every state."""
    store = ckptstore.open(tmp_path / "store", create=True)
    abandon(store, 0, 1)
    abandon(store, 1, 2)
    assert len(weight_keys(store)) == 3
    assert all(key == object_key(ckptstore.Digest.parse(key.rpartition("/")[2])) for key in weight_keys(store))
