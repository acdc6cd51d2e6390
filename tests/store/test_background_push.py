"""Checkpoints are pushed on while the training goes on; every error surfaces, and none costs a checkpoint."""

from __future__ import annotations

import os
import random
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest
from ckptstore.backends.deadline import check
from ckptstore.errors import BackendError, CkptStoreError, ConflictError, CorruptError, NotFoundError, UsageError
from ckptstore.remotes import add_remote
from ckptstore.running.run import Run
from ckptstore.store import Store
from ckptstore_cli.main import run as ckpt
from tests.support.faulty import FaultyBackend
from tests.support.states import memory_store
from tests.support.training import commit_state, make_training, save_steps


class Changing(nn.Linear):
    """Another one at each save."""

    def __init__(self) -> None:
        super().__init__(30, 30)

    def change(self) -> None:
        with torch.no_grad():
            self.weight.add_(1.0)


def broken_store(error: str = "the other end is gone") -> tuple[Store, FaultyBackend]:
    """A store that takes no object, and the backend to heal."""
    faulty = FaultyBackend(memory_store().backend)
    faulty.fail("create", BackendError("create", error), prefix="objects/")
    return Store(faulty), faulty


def save_and_push(run: Run, model: Changing, steps: int, **options: Any) -> list[Digest]:
    roots = []
    for _ in range(steps):
        model.change()
        roots.append(run.save(1 if run.checkpoint is None else run.checkpoint.step + 1, **options))
    return roots


def history(store: Store, ref: str = "main") -> list[Digest]:
    """Roots that the ref named, oldest first."""
    return [record.root for record in store.refs.log(ref) if record.root is not None][::-1]


def states(run: Run) -> list[str]:
    return [push.state.value for push in run.pushes]


# -- what is pushed ---------------------------------------------------------------------------------------------------


def test_every_checkpoint_that_was_asked_for_arrives_and_the_ref_follows(disk_store: Store, tmp_path: Path) -> None:
    far = ckptstore.open(tmp_path / "far", create=True)
    model = Changing()
    with disk_store.run("main", model=model) as run:
        run.resume()
        roots = save_and_push(run, model, 4, push_to=far)
    assert history(far) == roots
    fresh = ckptstore.open(far.url)
    assert all(fresh.verify(root).ok for root in roots)
    assert [(push.root, push.step, push.ref) for push in run.pushes] == list(
        zip(roots, (1, 2, 3, 4), ["main"] * 4, strict=True)
    )
    assert states(run) == ["done"] * 4
    assert all(push.transfer is not None and push.transfer.receipt.bytes_read for push in run.pushes)


def test_only_those_are_pushed_that_were_asked_for(disk_store: Store, tmp_path: Path) -> None:
    far = ckptstore.open(tmp_path / "far", create=True)
    model = Changing()
    with disk_store.run("main", model=model) as run:
        run.resume()
        save_and_push(run, model, 2)
        roots = save_and_push(run, model, 1, push_to=far)
        save_and_push(run, model, 1)
    assert history(far) == roots
    assert [ancestor.status for ancestor in far.verify("main").ancestors] == ["retired", "retired"]


def test_a_target_is_a_store_a_path_a_url_or_the_name_of_a_remote(disk_store: Store, tmp_path: Path) -> None:
    stores = [ckptstore.open(tmp_path / name, create=True) for name in ("one", "two", "three", "four")]
    add_remote(disk_store, "backup", stores[3].url)
    with disk_store.run("main", model=Changing()) as run:
        run.resume()
        root = run.save(1, push_to=[stores[0], tmp_path / "two", stores[2].url, "backup", stores[0].url])
    assert [store.head("main") for store in stores] == [root] * 4
    assert len(run.pushes) == 4, "the same store twice is one target"


@pytest.mark.parametrize("wrong", ["itself", "scheme", "kind", "credentials"])
def test_a_target_that_cannot_be_meant_is_refused_before_anything_is_saved(disk_store: Store, wrong: str) -> None:
    given: Any = {"itself": disk_store.url, "scheme": "ftp://host/x", "kind": 7, "credentials": "s3://me:secret@bucket"}
    with disk_store.run("main", model=Changing()) as run:
        run.resume()
        with pytest.raises(UsageError) as told:
            run.save(1, push_to=given[wrong] if wrong != "kind" else [7])
        assert disk_store.head("main") is None
    assert "secret" not in str(told.value)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def failed(store: Store) -> tuple[Run, Digest, FaultyBackend, Store]:
    """A run whose only push failed, and nobody was told yet."""
    target, faulty = broken_store()
    run = store.run("main", model=Changing())
    run.resume()
    root = run.save(1, push_to=target)
    while states(run) != ["failed"]:
        threading.Event().wait(0.01)
    return run, root, faulty, target


PLACES: dict[str, Callable[[Run], object]] = {
    "the next save": lambda run: run.save(2),
    "waiting": lambda run: run.wait(),
    "closing": lambda run: run.close(),
    "the end of the block": lambda run: run.__exit__(None, None, None),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_failed_push_is_told_once_and_everywhere(disk_store: Store, place: str) -> None:
    """B058 (google/orbax#605)."""
    run, root, _, _ = failed(disk_store)
    with pytest.raises(BackendError, match="the other end is gone"):
        PLACES[place](run)
    assert disk_store.head("main") == root, "nothing was saved by the call that told it"
    assert ckptstore.open(disk_store.url).verify("main").ok
    assert "the other end is gone" in str(run.pushes[0].error)
    run.save(2)
    run.close()


def test_a_failed_push_never_masks_the_error_of_the_training(disk_store: Store) -> None:
    run, _, _, _ = failed(disk_store)

    def train() -> None:
        with run:
            raise ZeroDivisionError("training went wrong")

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert any("the other end is gone" in note for note in caught.value.__notes__)


def test_several_failures_are_all_named(disk_store: Store) -> None:
    targets = [broken_store(f"{name} is gone")[0] for name in ("alpha", "beta")]
    with pytest.raises(BackendError) as told, disk_store.run("main", model=Changing()) as run:  # noqa: PT012
        run.resume()
        run.save(1, push_to=targets)
    text = str(told.value) + "".join(told.value.__notes__)
    assert "alpha is gone" in text
    assert "beta is gone" in text


def test_a_broken_target_does_not_keep_the_other_from_its_checkpoints(disk_store: Store, tmp_path: Path) -> None:
    far = ckptstore.open(tmp_path / "far", create=True)
    target, _ = broken_store()
    model = Changing()
    run = disk_store.run("main", model=model)
    run.resume()
    roots = []
    for _ in range(3):
        while len(roots) < 3:
            try:
                roots += save_and_push(run, model, 1, push_to=[target, far])
            except BackendError:  # of the target that is broken: told, and then the save is done
                continue
    with pytest.raises(BackendError):
        run.close()
    assert history(far) == roots
    assert states(run) == ["failed", "done"] * 3


def test_a_target_that_comes_back_gets_what_it_lacks(disk_store: Store) -> None:
    run, first, faulty, target = failed(disk_store)
    with pytest.raises(BackendError):
        run.wait()
    faulty.heal()
    second = run.save(2, push_to=target)
    run.close()
    assert target.head("main") == second
    assert Store(target.backend).verify("main").ok
    assert disk_store.checkpoint(second).parent == first


def test_the_message_says_how_to_repeat_the_push(disk_store: Store, tmp_path: Path) -> None:
    """And what it says does it."""
    model = Changing()
    run = disk_store.run("main", model=model)
    run.resume()
    root = run.save(1, push_to=tmp_path / "late")
    with pytest.raises(NotFoundError) as told:
        run.close()
    command = str(told.value).rpartition("repeat this push with: ")[2].removesuffix(")")
    ckptstore.open(tmp_path / "late", create=True)
    words = shlex.split(command)
    assert words[0] == "ckpt"
    assert ckpt(words[1:]) == 0
    assert ckptstore.open(tmp_path / "late").head("main") == root


def test_a_ref_of_the_target_that_went_elsewhere_is_a_conflict_and_stays(disk_store: Store) -> None:
    target = memory_store()
    there = commit_state(target, "main", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)
    run = disk_store.run("main", model=Changing())
    run.resume()
    run.save(1, push_to=target)
    with pytest.raises(ConflictError, match="is no ancestor"):
        run.close()
    assert target.head("main") == there


def test_bytes_that_the_target_does_not_keep_are_told(disk_store: Store) -> None:
    faulty = FaultyBackend(memory_store().backend)
    faulty.after("create", lambda key: faulty.flip_bit(key, 9) if key.startswith("objects/") else None)
    run = disk_store.run("main", model=Changing())
    run.resume()
    run.save(1, push_to=Store(faulty))
    with pytest.raises(CorruptError, match="readback"):
        run.close()
    assert Store(faulty).head("main") is None


def test_a_push_that_fails_unexpectedly_is_told_as_well(disk_store: Store) -> None:
    faulty = FaultyBackend(memory_store().backend)
    faulty.fail("create", RuntimeError("a bug"), prefix="objects/")
    run = disk_store.run("main", model=Changing())
    run.resume()
    run.save(1, push_to=Store(faulty))
    with pytest.raises(CkptStoreError, match="RuntimeError: a bug"):
        run.close()


# -- how it is done ---------------------------------------------------------------------------------------------------


def blocked_store() -> tuple[Store, threading.Event]:
    """A store that takes objects only after the event, unless the work is given up."""
    faulty = FaultyBackend(memory_store().backend)
    release = threading.Event()

    def wait(key: str) -> None:
        while not release.wait(0.01):
            check(f"storing key {key}")

    faulty.before("create", wait, prefix="objects/")
    return Store(faulty), release


def test_a_save_waits_when_too_many_checkpoints_wait_for_a_target(disk_store: Store) -> None:
    target, release = blocked_store()
    model = Changing()
    run = disk_store.run("main", model=model)
    run.resume()
    save_and_push(run, model, 3, push_to=target)
    assert states(run) == ["running", "waiting", "waiting"]
    fourth = threading.Thread(target=save_and_push, args=(run, model, 1), kwargs={"push_to": target})
    fourth.start()
    while len(run.pushes) < 4:
        threading.Event().wait(0.01)
    fourth.join(0.3)
    assert fourth.is_alive()
    assert disk_store.checkpoint(disk_store.resolve("main")).step == 4, "it is saved already"
    release.set()
    fourth.join()
    run.close()
    assert states(run) == ["done"] * 4
    assert target.checkpoint(target.resolve("main")).step == 4


def test_a_deadline_of_the_save_ends_its_waiting_and_not_the_push(disk_store: Store) -> None:
    target, release = blocked_store()
    run = disk_store.run("main", model=Changing())
    run.resume()
    with ckptstore.deadline(60):
        root = run.save(1, push_to=target)
    with pytest.raises(BackendError, match="deadline"), ckptstore.deadline(0.2):
        run.wait()
    release.set()
    run.close()
    assert target.head("main") == root


def test_a_run_that_ends_waits_for_its_pushes(disk_store: Store) -> None:
    target, release = blocked_store()
    threading.Timer(0.2, release.set).start()
    with disk_store.run("main", model=Changing()) as run:
        run.resume()
        root = run.save(1, push_to=target)
    assert target.head("main") == root


def test_an_interrupt_ends_them_and_a_later_push_goes_on_from_there(disk_store: Store) -> None:
    target, release = blocked_store()
    model = Changing()

    def train() -> None:
        with run:
            save_and_push(run, model, 2, push_to=target)
            raise KeyboardInterrupt

    run = disk_store.run("main", model=model)
    run.resume()
    with pytest.raises(KeyboardInterrupt) as told:
        train()
    assert states(run) == ["given up"] * 2
    assert sum("ckpt push" in note for note in told.value.__notes__) == 2
    assert target.head("main") is None
    root = disk_store.resolve("main")
    release.set()
    ckptstore.push(disk_store, target, root, ref="main")
    assert Store(target.backend).verify("main").ok


def names() -> set[str]:
    """Of threads that belong to a run; those that wait for the next request to a bucket are the process's."""
    started = {thread.name for thread in threading.enumerate() if thread.name.startswith("ckptstore")}
    return started - {"ckptstore-request"}


def test_no_thread_is_started_before_it_is_needed_and_none_is_left(disk_store: Store) -> None:
    target, release = blocked_store()
    release.set()
    with disk_store.run("main", model=Changing()) as run:
        assert names() == set()
        run.resume()
        assert names() == set()
        run.save(1, push_to=target)
    assert names() == set()


def test_a_child_made_by_fork_waits_for_nothing_of_its_parent(disk_store: Store) -> None:
    target, release = blocked_store()
    with disk_store.run("main", model=Changing()) as run:
        run.resume()
        run.save(1, push_to=target)
        child = os.fork()
        if not child:
            run.wait()
            os._exit(0 if run.pushes == () else 1)
        _, status = os.waitpid(child, 0)
        release.set()
    assert os.waitstatus_to_exitcode(status) == 0
    assert states(run) == ["done"]


def test_roots_do_not_depend_on_pushes(store: Store) -> None:
    """Neither readback nor push touches a generator that is saved."""
    straight = save_steps(store, "straight", make_training(), 4)
    training = make_training()
    other = memory_store()
    roots = []
    with store.run("pushed", **training.objects()) as run:
        step = run.resume()
        while step < 4:
            training.step()
            step += 1
            before = random.getstate(), torch.get_rng_state()
            roots.append(run.save(step, push_to=other))
            run.wait()
            assert random.getstate() == before[0]
            assert torch.equal(torch.get_rng_state(), before[1])
    assert roots == straight
    assert other.head("pushed") == straight[-1]


def test_of_many_pushes_those_that_failed_are_remembered_longest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.running.pushes._REMEMBERED", 2)
    target, faulty = broken_store()
    model = Changing()
    run = store.run("main", model=model)
    run.resume()
    run.save(1, push_to=target)
    with pytest.raises(BackendError):
        run.wait()
    faulty.heal()
    for _ in range(4):
        save_and_push(run, model, 1, push_to=target)
    run.close()
    assert states(run) == ["failed", "done", "done"]


# -- read back behind -------------------------------------------------------------------------------------------------


def test_what_the_readback_behind_found_bad_is_stored_anew_by_the_next_save(disk_store: Store) -> None:
    """B066: a name that is there is no proof, also not to the process that once wrote it."""
    model = Changing()
    run = disk_store.run("main", model=model)
    run.resume()
    run.save(1)
    run.wait()
    key = next(iter(disk_store.closure(disk_store.resolve("main")).objects))
    data = bytearray(disk_store.backend.get(key))
    data[3] ^= 1
    disk_store.backend.replace(key, data)
    disk_store.objects.forget(key)
    assert ckptstore.open(disk_store.url).verify(run.save(2)).ok
    run.close()
