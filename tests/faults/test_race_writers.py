"""Processes that write to one store at once: one wins a ref, the others are told, and nobody waits for ever.

B055, B081.

Public sources: TensorAuto/OpenTau#396; jentic/jentic-one#529, ovumcy/ovumcy-web#155.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import CommitAbortedError, ConflictError, RefusedError
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
        with ckptstore.open(path).catalogue() as catalogue:
            return sorted(catalogue.rebuild()) != []

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
