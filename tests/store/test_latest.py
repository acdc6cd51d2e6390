"""Latest is the head, read back; only where its closure fails an ancestor, and never in silence."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    ConflictError,
    CorruptError,
    MismatchError,
    NotFoundError,
    RefusedError,
    UnsupportedVersionError,
    UsageError,
)
from ckptstore.format.canonical import decode, encode
from ckptstore.format.keys import document_key, object_key, ref_key, retired_key
from ckptstore.format.records import Retired
from ckptstore.readbacks.readbacks import Part
from ckptstore.remotes import add_remote
from ckptstore.running.latest import latest
from ckptstore.store import Store
from tests.support.documents import rewrite_checkpoint
from tests.support.faulty import FaultyBackend
from tests.support.syscalls import killed_at
from tests.support.training import commit_state, make_training, save_steps


def model(step: int = 0) -> nn.ModuleDict:
    """A weight that is an object, of which no step has the same, and two that go into a pack."""
    torch.manual_seed(step)
    return nn.ModuleDict({"large": nn.Linear(300, 300, bias=False), "small": nn.Linear(20, 20)})


def steps(store: Store, count: int, ref: str = "main") -> list[Digest]:
    return [commit_state(store, ref, [ckptstore.TrainingState(model=model(n))], n) for n in range(1, count + 1)]


def own(store: Store, root: Digest, others: list[Digest]) -> str:
    """An object that only ``root`` needs."""
    needed = {key for other in others for key in store.closure(other).objects}
    return min(store.closure(root).objects.keys() - needed)


def lose(store: Store, root: Digest, others: list[Digest]) -> str:
    key = own(store, root, others)
    store.backend.delete(key)
    return key


def spoil(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


# -- what latest is ----------------------------------------------------------------------------------------------------


def test_the_head_is_read_back_whole(disk_store: Store) -> None:
    roots = steps(disk_store, 2)
    found = latest(disk_store, "main")
    assert (found.head, found.root, found.skipped, found.move) == (roots[1], roots[1], (), "")
    assert found.checkpoint == disk_store.checkpoint(roots[1])
    assert found.report is not None
    assert found.report.bytes_read == sum(size for _, size in disk_store.closure(roots[1]).sizes())
    receipt = found.receipt(disk_store.url)
    assert (receipt.subject, receipt.exceptions) == (roots[1], ())


def test_a_ref_that_names_nothing_has_no_latest(store: Store) -> None:
    assert latest(store, "main").root is None
    store.refs.move("main", None, None)
    found = latest(store, "main")
    assert (found.head, found.root) == (None, None)
    with pytest.raises(UsageError, match="nothing was read"):
        found.receipt(store.url)


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_an_ancestor_is_taken_only_where_a_closure_fails(disk_store: Store, damage: str) -> None:
    """B050 (huggingface/transformers PR#35580) and F-150: the skipped are listed with reason and repair."""
    roots = steps(disk_store, 3)
    key = own(disk_store, roots[2], roots[:2])
    path = Path(disk_store.backend.path) / key  # type: ignore[attr-defined]
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:100])
    else:
        spoil(path)
    found = latest(ckptstore.open(disk_store.url), "main")
    assert (found.head, found.root) == (roots[2], roots[1])
    (skipped,) = found.skipped
    assert (skipped.root, skipped.step) == (roots[2], 3)
    assert key in skipped.reason
    assert "large" in skipped.reason, "it says which tensor"
    assert skipped.repair == f"ckpt repair {roots[2].hex} --from URL"
    assert found.move == f"ckpt ref move main {roots[1].hex} --expect {roots[2].hex}"


def test_where_remotes_are_known_the_repair_needs_no_url(disk_store: Store, tmp_path: Path) -> None:
    roots = steps(disk_store, 1)
    far = ckptstore.open(tmp_path / "far", create=True)
    ckptstore.push(disk_store, far, roots[0])
    add_remote(disk_store, "far", far.url)
    lose(disk_store, roots[0], [])
    with pytest.raises(NotFoundError) as caught:
        latest(disk_store, "main")
    assert f"ckpt repair {roots[0].hex} may bring" in caught.value.hint


@pytest.mark.parametrize("part", ["checkpoint", "shard", "page"])
def test_every_kind_of_document_counts(store: Store, part: str) -> None:
    roots = steps(store, 3)
    checkpoint = store.checkpoint(roots[2])
    page = store.closure(roots[2]).shards[0].shard.pages[0].digest
    lost = {"checkpoint": roots[2], "shard": checkpoint.shards[0], "page": page}[part]
    store.backend.delete(document_key(lost))
    found = latest(ckptstore.open(store.url), "main")
    assert found.root == roots[1]
    assert found.skipped[0].step == (None if part == "checkpoint" else 3)


def test_several_are_passed_over_and_each_is_listed(store: Store) -> None:
    roots = steps(store, 4)
    lose(store, roots[3], roots[:3])
    lose(store, roots[2], [roots[0], roots[1]])
    found = latest(ckptstore.open(store.url), "main")
    assert found.root == roots[1]
    assert [item.root for item in found.skipped] == [roots[3], roots[2]]


def test_a_retired_ancestor_is_passed_over_and_its_reason_told(store: Store) -> None:
    roots = steps(store, 3)
    lose(store, roots[2], roots[:2])
    store.backend.create(retired_key(roots[1]), Retired("older than a week").encode())
    store.backend.delete(document_key(store.checkpoint(roots[1]).shards[0]))
    found = latest(ckptstore.open(store.url), "main")
    assert found.root == roots[0]
    assert "retired (older than a week)" in found.skipped[1].reason


def test_what_is_marked_as_retired_and_whole_is_whole(store: Store) -> None:
    """The marker comes before the deletion, and a later push may bring the closure back."""
    roots = steps(store, 2)
    store.backend.create(retired_key(roots[1]), Retired("history only").encode())
    assert latest(store, "main").root == roots[1]


def test_if_nothing_is_whole_all_are_listed(store: Store) -> None:
    roots = steps(store, 3)
    faulty = FaultyBackend(store.backend)
    for number, root in enumerate(roots):
        if number:
            faulty.flip_bit(own(store, root, [other for other in roots if other != root]), 9)
    lose(store, roots[0], roots[1:])
    with pytest.raises(CorruptError) as caught:
        latest(Store(faulty), "main")
    assert all(root.short in caught.value.why for root in roots)
    assert f"ckpt repair {roots[2].hex}" in caught.value.hint


def test_a_checkpoint_that_is_named_itself_has_no_latest(store: Store) -> None:
    (root,) = steps(store, 1)
    for name in (str(root), root.hex, root.hex[:8], "no ref!"):
        with pytest.raises(UsageError, match="latest is asked of a ref"):
            latest(store, name)


def save_second(path: Path) -> None:
    commit_state(ckptstore.open(path), "main", [ckptstore.TrainingState(model=model(2))], 2)


def latest_after_kills(path: Path, calls: range) -> tuple[int, int]:
    """Save in a child that is killed around each of these changing calls: how often the head was the old one, and how
    often the new one. Either way it has to be whole, and nothing skipped."""
    pristine = ckptstore.open(path / "pristine", create=True)
    (old,) = steps(pristine, 1)
    seen = {True: 0, False: 0}
    for nth in calls:
        for late in (False, True):
            copy = path / f"{nth}-{late}"
            shutil.copytree(path / "pristine", copy)
            killed = killed_at(nth, late=late, work=partial(save_second, copy))
            found = latest(ckptstore.open(copy), "main")
            assert found.skipped == (), f"call {nth}, {late=}"
            assert found.root is not None
            seen[found.root == old] += 1
            shutil.rmtree(copy)
            if not killed:
                return seen[True], seen[False]
    return seen[True], seen[False]


def test_latest_is_whole_whenever_a_writer_was_killed(tmp_path: Path) -> None:
    """B050 (vllm-project/speculators#739, RLinf/RLinf#1469): at some of the calls that change the disk."""
    old, _ = latest_after_kills(tmp_path, range(1, 200, 23))
    assert old > 0


@pytest.mark.deep
def test_latest_is_whole_whenever_a_writer_was_killed_at_many_calls(tmp_path: Path) -> None:
    """B050, at every third of them, before it and after it."""
    old, new = latest_after_kills(tmp_path, range(1, 1000, 3))
    assert old > 20
    assert new > 0


# -- what is no damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["get", "readback", "present"])
def test_a_storage_that_does_not_answer_is_no_damage(store: Store, operation: str) -> None:
    steps(store, 3)
    faulty = FaultyBackend(store.backend)
    prefix = "documents/" if operation == "get" else "objects/"
    faulty.fail(
        "stat" if operation == "present" else operation, BackendError("key", "permission denied"), prefix=prefix
    )
    with pytest.raises(BackendError, match="permission denied"):
        latest(Store(faulty), "main")


def test_a_storage_that_does_not_answer_makes_no_run_go_back(store: Store) -> None:
    roots = save_steps(store, "main", make_training(), 2)
    faulty = FaultyBackend(store.backend)
    faulty.fail("get", BackendError("key", "permission denied"), prefix="objects/")
    training = make_training(seed=1)
    with Store(faulty).run("main", **training.objects()) as run:
        with pytest.raises(CkptStoreError, match="permission denied"):
            run.resume()
        assert run.skipped == []
        with pytest.raises(RefusedError):
            run.save(3)
        faulty.heal()
        assert run.resume() == 2
    assert store.head("main") == roots[1]


def test_a_later_version_is_no_damage(store: Store) -> None:
    """Who goes back because he does not understand the newest would lose it."""
    roots = steps(store, 1)
    node = decode(rewritten(store, roots[0]), 2**22)
    assert type(node) is dict
    newer = store.objects.put_document(encode({**node, "format": 2}))
    store.refs.move("main", newer, store.refs.head("main"))
    with pytest.raises(CkptStoreError) as caught:
        latest(store, "main")
    assert isinstance(caught.value, UnsupportedVersionError) or caught.value.exit_code == 9
    assert roots[0].short not in str(caught.value)
    with store.run("main", model=model(1)) as run, pytest.raises(CkptStoreError):
        run.resume()
    assert run.skipped == []


def rewritten(store: Store, root: Digest) -> bytes:
    return replace(store.checkpoint(root), parent=root, step=2).encode()


def test_a_damaged_ref_is_an_error_and_nothing_is_guessed(disk_store: Store) -> None:
    steps(disk_store, 2)
    spoil(Path(disk_store.backend.path) / ref_key("main", 2))  # type: ignore[attr-defined]
    with pytest.raises(CkptStoreError, match="generation 2"):
        latest(disk_store, "main")


# -- a lost document, and the log of the ref ---------------------------------------------------------------------------


def test_the_parent_of_a_lost_document_is_what_the_ref_named_before(store: Store) -> None:
    roots = steps(store, 3)
    store.refs.fence("main", 3)
    store.backend.delete(document_key(roots[2]))
    assert latest(store, "main").root == roots[1]


def test_a_lost_document_does_not_lead_to_what_came_after_it(store: Store) -> None:
    """The ref went on from it, and was moved back: what follows it in the log is its child."""
    first, second, third = steps(store, 3)
    store.move_ref("main", second, third)
    store.backend.delete(document_key(second))
    found = latest(store, "main")
    assert found.root == first
    assert [item.root for item in found.skipped] == [second]


def test_a_lost_document_of_the_first_checkpoint_has_nothing_before_it(store: Store) -> None:
    """Nor does it lead round in a circle."""
    first, second = steps(store, 2)
    store.move_ref("main", first, second)
    store.backend.delete(document_key(first))
    with pytest.raises(NotFoundError) as caught:
        latest(store, "main")
    assert second.short not in caught.value.why


def test_a_log_that_cannot_be_read_ends_the_search_and_is_told(disk_store: Store) -> None:
    roots = steps(disk_store, 3)
    disk_store.backend.delete(document_key(roots[2]))
    spoil(Path(disk_store.backend.path) / ref_key("main", 2))  # type: ignore[attr-defined]
    with pytest.raises(CorruptError, match="log of the ref cannot be read further"):
        latest(disk_store, "main")


# -- a run after a fallback --------------------------------------------------------------------------------------------


def broken_run(store: Store) -> tuple[list[Digest], Store]:
    """Three steps, the newest broken, and the store opened anew."""
    roots = save_steps(store, "main", make_training(), 3)
    lose(store, roots[2], roots[:2])
    return roots, ckptstore.open(store.url)


def test_a_fallback_is_loud(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    roots, again = broken_run(store)
    training = make_training(seed=2)
    with caplog.at_level(logging.WARNING, "ckptstore"), again.run("main", **training.objects()) as run:
        assert run.resume() == 2
    told = [record.getMessage() for record in caplog.records]
    assert any(roots[2].short in text and f"ckpt repair {roots[2].hex}" in text for text in told)
    assert any(roots[1].short in text and "next save" in text for text in told)
    assert [(item.root, item.repair != "") for item in run.skipped] == [(roots[2], True)]
    assert again.head("main") == roots[2], "resuming itself changes nothing in the store"


def test_after_a_fallback_the_parent_is_what_was_restored_and_the_ref_says_so(store: Store) -> None:
    roots, again = broken_run(store)
    training = make_training(seed=2)
    with again.run("main", **training.objects()) as run:
        run.resume()
        training.step()
        training.step()
        saved = run.save(4)
    assert again.checkpoint(saved).parent == roots[1]
    assert [record.root for record in again.refs.log("main")] == [saved, roots[1], *reversed(roots)]
    assert again.verify("main").ok
    assert latest(again, "main").skipped == ()


def test_a_replayed_step_ends_in_the_very_root_that_was_lost(store: Store) -> None:
    roots, again = broken_run(store)
    training = make_training(seed=2)
    with again.run("main", **training.objects()) as run:
        run.resume()
        training.step()
        assert run.save(3) == roots[2]
    assert again.verify("main").ok


def test_what_is_repaired_before_the_next_save_is_resumed_from(store: Store, tmp_path: Path) -> None:
    roots = save_steps(store, "main", make_training(), 3)
    far = ckptstore.open(tmp_path / "far", create=True)
    ckptstore.push(store, far, roots[2])
    lose(store, roots[2], roots[:2])
    training = make_training(seed=2)
    again = ckptstore.open(store.url)
    with again.run("main", **training.objects()) as run:
        assert run.resume() == 2
        ckptstore.pull(far, again, roots[2])
        assert run.resume() == 3
        assert run.skipped == []
        training.step()
        saved = run.save(4)
    assert again.checkpoint(saved).parent == roots[2]


def test_who_moved_the_ref_meanwhile_is_not_overtaken(store: Store) -> None:
    roots, again = broken_run(store)
    training = make_training(seed=2)
    with again.run("main", **training.objects()) as run:
        run.resume()
        store.move_ref("main", roots[0], roots[2])
        training.step()
        with pytest.raises(ConflictError):
            run.save(3)
    assert store.head("main") == roots[0]


def test_after_a_resume_that_found_nothing_nothing_is_saved(store: Store) -> None:
    """Else a state that was never trained would become what the ref names."""
    roots = save_steps(store, "main", make_training(), 1)
    lose(store, roots[0], [])
    training = make_training(seed=2)
    with ckptstore.open(store.url).run("main", **training.objects()) as run:
        with pytest.raises(NotFoundError, match="no checkpoint of it can be loaded"):
            run.resume()
        training.step()
        with pytest.raises(RefusedError):
            run.save(1)
    assert store.head("main") == roots[0]


def test_after_a_resume_that_did_not_fit_nothing_is_saved(store: Store) -> None:
    """It would have a parent that it does not continue."""
    roots = save_steps(store, "main", make_training(), 1)
    other = nn.Linear(3, 3)
    with store.run("main", model=other) as run:
        with pytest.raises(MismatchError):
            run.resume()
        with pytest.raises(RefusedError, match="did not resume from it"):
            run.save(2)
    assert store.head("main") == roots[0]


def test_a_run_that_had_resumed_goes_on_after_a_resume_that_changed_nothing(store: Store) -> None:
    training = make_training()
    with store.run("main", **training.objects()) as run:
        run.resume()
        training.step()
        root = run.save(1)
        shard = document_key(store.checkpoint(root).shards[0])
        data = store.backend.get(shard)
        store.backend.delete(shard)
        with pytest.raises(NotFoundError):
            run.resume()
        store.backend.create(shard, data)
        training.step()
        saved = run.save(2)
    assert store.checkpoint(saved).parent == root


def test_a_controller_moves_the_ref_before_its_workers_go_on(store: Store) -> None:
    """A sharded commit follows what the ref names: to be true, that has to be what the workers restored."""
    states: Callable[[int], list[ckptstore.TrainingState]] = lambda n: [  # noqa: E731
        ckptstore.TrainingState(model=nn.ModuleDict({name: model(10 * n + i)})) for i, name in enumerate("ab")
    ]
    roots = [commit_state(store, "main", states(n), n) for n in (1, 2)]
    lose(store, roots[1], roots[:1])
    found = latest(ckptstore.open(store.url), "main")
    assert found.root == roots[0]
    store.move_ref("main", found.root, found.head)
    again = ckptstore.open(store.url)
    assert again.checkpoint(commit_state(again, "main", states(3), 3)).parent == roots[0]


def test_a_receipt_says_that_files_were_not_read(disk_store: Store, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(b"abc")
    tree = disk_store.put_tree(tmp_path / "files")
    attempt = disk_store.begin("main")
    receipt = disk_store.save_shard(ckptstore.TrainingState(model=model()), attempt, step=1, files=tree)
    root = disk_store.commit(attempt, [receipt])
    disk_store.backend.delete(object_key(disk_store.tree(tree).files[0].chunks[0]))
    found = latest(disk_store, "main")
    assert found.root == root, "no restore needs the files"
    assert found.receipt(disk_store.url).exceptions == Part(files=False).exceptions()


def test_a_forged_head_does_not_hide_its_parent(store: Store) -> None:
    roots = steps(store, 2)
    forged = rewrite_checkpoint(store, roots[1], lambda _: {"state_root": Digest.of(b"lie"), "parent": roots[1]})
    store.refs.move("main", forged, store.refs.head("main"))
    found = latest(store, "main")
    assert found.root == roots[1]
    assert "state root does not follow" in found.skipped[0].reason
