"""Processes that write to one store at once: one wins a ref, the others are told, and nobody waits for ever.

B055, B081.

Public sources: TensorAuto/OpenTau#396; jentic/jentic-one#529, ovumcy/ovumcy-web#155.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.catalogue import CatalogueError
from ckptstore.errors import CommitAbortedError, ConflictError, NoSpaceError, RefusedError
from ckptstore.store import Store
from tests.support.children import Child
from tests.support.faulty import FaultyBackend
from tests.support.invariants import broken, temporaries
from tests.support.training import commit_state, make_training, save_steps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child has none of the threads that torch computes with, and would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def at_once(folder: Path, *works: Callable[[], object]) -> list[str]:
    """What each of ``works`` returned or raised, done in processes of their own that begin together."""
    gate, opener = os.pipe()
    children = []
    for number, work in enumerate(works):
        child = os.fork()
        if child == 0:
            try:
                os.close(opener)
                os.read(gate, 1)  # returns in all at once, when the parent closes its end
                try:
                    came_to = str(work())
                except ckptstore.CkptStoreError as error:
                    came_to = type(error).__name__
                (folder / f"came-to-{number}").write_text(json.dumps(came_to))
            finally:
                os._exit(0)
        children.append(child)
    os.close(gate)
    os.close(opener)
    for child in children:
        os.waitpid(child, 0)
    return [json.loads((folder / f"came-to-{number}").read_text()) for number in range(len(works))]


def resumed(path: Path, seed: int) -> Callable[[], object]:
    """A job that resumed, and makes the next checkpoint when it is told to."""
    training = make_training(seed)
    run = ckptstore.open(path).run("main", **training.objects())
    step = run.resume()
    training.step()

    def save() -> object:
        with run:
            return run.save(step + 1)

    return save


def test_of_jobs_that_save_to_one_ref_from_one_parent_one_wins_and_the_others_are_told(tmp_path: Path) -> None:
    """Also of one job that was started again while its first process lived: it would have made the same root."""
    path = tmp_path / "store"
    (parent,) = save_steps(ckptstore.open(path, create=True), "main", make_training(), 1)
    works = [resumed(path, seed) for seed in (0, 0, 1)]
    came_to = at_once(tmp_path, *works)
    (root,) = {text for text in came_to if text != ConflictError.__name__}
    assert came_to.count(ConflictError.__name__) == 2
    store = ckptstore.open(path)
    assert [record.root for record in store.refs.log("main")] == [store.head("main"), parent]
    assert str(store.head("main")) == root
    assert broken(path) == []
    assert temporaries(path) == []


def test_processes_that_make_one_store_at_once_all_get_it(tmp_path: Path) -> None:
    path = tmp_path / "store"

    def write() -> object:
        store = ckptstore.open(path, create=True)
        commit_state(store, f"ref-{os.getpid()}x", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)
        return store.backend.get("ckptstore.json").decode()

    assert len(set(at_once(tmp_path, *[write] * 6))) == 1
    assert len(ckptstore.open(path).refs.names()) == 6
    assert broken(path) == []


def test_of_pushes_of_one_line_the_newest_is_the_head_whoever_comes_last(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    roots = save_steps(store, "main", make_training(), 4)

    def push(root: ckptstore.Digest) -> Callable[[], object]:
        def work() -> object:
            return ckptstore.push(store, ckptstore.open(tmp_path / "far", create=True), root, ref="main").root

        return work

    came_to = at_once(tmp_path, *map(push, roots * 2))
    for root, outcome in zip(roots * 2, came_to, strict=True):
        assert outcome in (str(root), ConflictError.__name__)
    assert came_to[len(roots) - 1] == came_to[-1] == str(roots[-1])
    far = ckptstore.open(tmp_path / "far")
    assert far.head("main") == roots[-1]
    moved = [record.root for record in far.refs.log("main")]
    assert moved == [root for root in roots[::-1] if root in moved]
    assert broken(tmp_path / "far") == []
    assert temporaries(tmp_path / "far") == []


def test_whoever_looks_while_others_save_sees_whole_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "store"
    save_steps(ckptstore.open(path, create=True), "main", make_training(), 1)
    done = tmp_path / "done"

    def save() -> object:
        try:
            return len(save_steps(ckptstore.open(path), "main", make_training(), 9))
        finally:
            done.touch()

    def until_done(work: Callable[[], object]) -> Callable[[], object]:
        def again() -> object:
            found = [work()]
            while not done.exists():
                found.append(work())
            return sorted(map(str, set(found)))

        return again

    def verify() -> object:
        return ckptstore.open(path).verify("main").findings

    def rebuild() -> object:
        try:
            with ckptstore.open(path).catalogue() as catalogue:
                return sorted(catalogue.rebuild()) != []
        except CatalogueError as error:  # one at a time makes it anew, and who waited for long is told
            return "somebody else holds it" in str(error)

    def history() -> object:
        store = ckptstore.open(path)
        steps = [checkpoint.step for _, checkpoint in store.history(store.resolve("main"))]
        return steps == list(range(len(steps), 0, -1))

    came_to = at_once(tmp_path, save, *map(until_done, (verify, rebuild, rebuild, history)))
    assert came_to == ["8", "['()']", "['True']", "['True']", "['True']"]
    with ckptstore.open(path).catalogue() as catalogue:
        catalogue.update()
        rows = catalogue.rows()
        assert not catalogue.stale()
        catalogue.rebuild()
        assert catalogue.rows() == rows


def test_of_many_processes_that_move_one_ref_one_at_a_time_wins_and_the_others_are_told(tmp_path: Path) -> None:
    """B055: each from the head that it saw. No move is lost, and none is told that it won and did not."""
    path = tmp_path / "store"
    store = ckptstore.open(path, create=True)
    roots = [
        commit_state(store, f"own-{number}x", [ckptstore.TrainingState(model=nn.Linear(number + 1, 2))], 1)
        for number in range(8)
    ]

    def move(root: ckptstore.Digest) -> Callable[[], object]:
        def work() -> object:
            mine, won = ckptstore.open(path), 0
            for _ in range(10):
                try:
                    mine.move_ref("shared", root, mine.head("shared"))
                    won += 1
                except ConflictError:
                    pass
            return won

        return work

    came_to = at_once(tmp_path, *map(move, roots))
    moved = [record.root for record in store.refs.log("shared")]
    assert [str(moved.count(root)) for root in roots] == came_to
    assert moved, "somebody always wins"
    assert store.refs.findings("shared")[0] == []
    assert broken(path) == []


def test_processes_that_make_the_same_objects_at_once_all_have_them_whole(tmp_path: Path) -> None:
    """Also where the bytes that lie there already are damaged: whoever finds them puts good ones in their place."""
    path = tmp_path / "store"
    store = ckptstore.open(path, create=True)
    datas = [bytes([number]) * 300_000 for number in range(6)]
    digests = [store.objects.put_object(data) for data in datas[:3]]
    for digest in digests:
        file = path / "objects" / digest.hex[:2] / digest.hex
        file.chmod(0o644)
        file.write_bytes(b"\xff" * 300_000)
        file.chmod(0o444)

    def put() -> object:
        mine = ckptstore.open(path)
        with mine.lease():
            return [str(mine.objects.put_object(data)) for data in datas]

    came_to = at_once(tmp_path, *[put] * 8)
    assert len(set(came_to)) == 1
    assert broken(path) == []
    assert temporaries(path) == []
    assert len(list(store.backend.list("objects/"))) == 6
    assert set(os.listdir(path / "quarantine"))


def test_a_zombie_that_wakes_up_finds_its_retry_in_its_place(tmp_path: Path) -> None:
    """B055: the first process is stopped in the middle of a save, the second one resumes and saves, the first goes on:
    it made the same checkpoint, and is told that it was not the one."""
    path = tmp_path / "store"
    (parent,) = save_steps(ckptstore.open(path, create=True), "main", make_training(), 1)

    def zombie() -> object:
        training = make_training()
        backend = FaultyBackend(DirectoryBackend(path))
        backend.before("create", lambda _key: os.kill(os.getpid(), signal.SIGSTOP), prefix="refs/", nth=1)
        with Store(backend).run("main", **training.objects()) as run:
            step = run.resume()
            training.step()
            try:
                return str(run.save(step + 1))
            except ConflictError:
                return "told"

    child = Child(zombie, tmp_path / "zombie")
    while not child.is_stopped():
        time.sleep(0.01)
    (root,) = save_steps(ckptstore.open(path), "main", make_training(), 2)
    child.go_on()
    assert child.wait() == "told"
    store = ckptstore.open(path)
    assert [record.root for record in store.refs.log("main")] == [root, parent]
    assert broken(path) == []
    assert temporaries(path) == []


def test_a_restore_while_others_save_is_of_one_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "store"
    save_steps(ckptstore.open(path, create=True), "main", make_training(), 1)
    expected = [
        str(digest) for digest in save_steps(ckptstore.open(tmp_path / "copy", create=True), "main", make_training(), 7)
    ]
    done = tmp_path / "done"

    def save() -> object:
        try:
            return len(save_steps(ckptstore.open(path), "main", make_training(), 7))
        finally:
            done.touch()

    def restore() -> object:
        found: set[tuple[int, str]] = set()
        while not done.exists() or not found:
            training = make_training(9)
            run = ckptstore.open(path).run("main", **training.objects())
            step = run.resume()
            assert training.scheduler.last_epoch == step
            found.add((step, str(run.root)))
        return all(expected[step - 1] == root for step, root in found)

    assert at_once(tmp_path, save, restore, restore) == ["6", "True", "True"]


def test_a_lock_that_a_stopped_process_holds_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B081: who changes the remotes and is stopped in the middle costs the others a wait with a deadline."""
    monkeypatch.setattr("ckptstore.remotes._WAIT_SECONDS", 0.2)
    store = ckptstore.open(tmp_path / "store", create=True)
    ckptstore.open(tmp_path / "other", create=True)
    with (tmp_path / "store" / "config.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(ConflictError, match="find out whether it hangs"):
            ckptstore.add_remote(store, "other", str(tmp_path / "other"))
    ckptstore.add_remote(store, "other", str(tmp_path / "other"))
    assert list(ckptstore.known_remotes(store)) == ["other"]


def test_a_participant_that_gives_up_late_cannot_abort_the_attempt_that_came_after(tmp_path: Path) -> None:
    """F-130: the fence of an attempt stands right after where it began, or nowhere."""
    store = ckptstore.open(tmp_path / "store", create=True)
    state = ckptstore.TrainingState(model=nn.Linear(2, 2))
    dead = store.begin("main")
    receipt = store.save_shard(state, dead, step=1, index=0, count=2)
    root = commit_state(store, "main", [state], 1)
    live = store.begin("main")
    mine = store.save_shard(state, live, step=2)
    with pytest.raises(CommitAbortedError):
        store.commit(dead, count=2, deadline=0.0)  # the coordinator of the dead attempt wakes up
    with pytest.raises(CommitAbortedError):
        store.verdict(dead, receipt, deadline=0.0)
    with pytest.raises(CommitAbortedError):
        store.commit(dead, [receipt])
    assert store.head("main") == root
    assert store.checkpoint(store.commit(live, [mine])).parent == root


@pytest.mark.parametrize("phase", ["documents/", "receipts/"])
def test_a_coordinator_that_finds_no_room_tells_the_others_at_once(tmp_path: Path, phase: str) -> None:
    """B054, B051: its attempt is fenced before anybody's deadline is over, whatever it failed at."""
    path = tmp_path / "store"
    store = ckptstore.open(path, create=True)
    attempt = store.begin("main")
    parts = [ckptstore.TrainingState(model=nn.ModuleDict({name: nn.Linear(3, 3)})) for name in "ab"]
    receipts = [store.save_shard(part, attempt, step=1, index=i, count=2) for i, part in enumerate(parts)]
    backend = FaultyBackend(DirectoryBackend(path))
    backend.fail("create", NoSpaceError("writing", "ENOSPC"), prefix=phase, nth=1)
    with pytest.raises(NoSpaceError):
        Store(backend).commit(attempt, receipts, metrics={"loss": 0.5})
    assert store.refs.record("main", 1).root is None
    for receipt in receipts:
        with pytest.raises(CommitAbortedError):
            store.verdict(attempt, receipt, deadline=3600.0)
    assert broken(path) == []


def test_an_attempt_without_an_answer_is_fenced_once_for_all(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    state = ckptstore.TrainingState(model=nn.Linear(2, 2))
    attempt = store.begin("main")
    receipts = [store.save_shard(state, attempt, step=1, index=0, count=2)]

    def wait() -> object:
        return store.verdict(attempt, receipts[0], deadline=0.0)

    def collect() -> object:
        return store.commit(attempt, count=2, deadline=0.0)

    came_to = at_once(tmp_path, wait, collect, wait, collect)
    assert set(came_to) == {CommitAbortedError.__name__}
    assert [record.root for record in store.refs.log("main")] == [None]
    with pytest.raises((CommitAbortedError, ConflictError)):
        store.commit(attempt, receipts)


def test_a_lease_lasts_as_long_as_any_thread_needs_it(tmp_path: Path) -> None:
    """F-140."""
    store = ckptstore.open(tmp_path / "store", create=True)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store.lease():
            entered.set()
            leave.wait(60)

    def leases() -> int:
        return len(list(store.backend.list("leases/")))

    thread = threading.Thread(target=hold)
    with store.lease():
        thread.start()
        entered.wait(60)
        assert leases() == 1
    assert leases() == 1
    leave.set()
    thread.join()
    assert leases() == 0
    store.backend.create("gc/now", b"")
    for _ in range(2):
        with pytest.raises(ConflictError), store.lease():
            pass
    assert leases() == 0


def test_a_job_that_did_not_resume_takes_nobody_elses_ref(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    save_steps(store, "main", make_training(), 1)
    training = make_training()
    training.step()
    with store.run("main", **training.objects()) as run, pytest.raises(RefusedError, match="did not resume"):
        run.save(1)
