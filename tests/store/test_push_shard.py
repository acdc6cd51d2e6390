"""Shards that are saved in stores of their own are moved, read back, and committed where they arrived."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Cursor, ShardReceipt, TrainingState
from ckptstore.backends.counting import CountingBackend
from ckptstore.errors import CorruptError, NotFoundError, UsageError
from ckptstore.store import Store
from tests.support.training import commit_state


def halves(shift: float = 0.0) -> list[TrainingState]:
    torch.manual_seed(0)
    modules = [nn.ModuleDict({name: nn.Linear(300, 300)}) for name in ("first", "second")]
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.add_(shift)
    return [TrainingState(model=module) for module in modules]


@pytest.fixture
def locals_(tmp_path: Path) -> list[Store]:
    return [ckptstore.open(tmp_path / f"host-{index}", create=True) for index in range(2)]


def save(stores: list[Store], attempt: ckptstore.Attempt) -> list[ShardReceipt]:
    cursors = {"data": Cursor("samples", 32, per_step=32)}
    return [
        store.save_shard(state, attempt, step=1, index=index, count=2, cursors=cursors)
        for index, (store, state) in enumerate(zip(stores, halves(), strict=True))
    ]


def test_shards_of_two_stores_become_the_checkpoint_that_one_store_would_have(
    locals_: list[Store], store: Store, tmp_path: Path
) -> None:
    attempt = store.begin("main")
    receipts = save(locals_, attempt)
    counting = CountingBackend(store.backend)
    for local, receipt in zip(locals_, receipts, strict=True):
        done = ckptstore.push_shard(local, Store(counting), receipt)
        assert done.root == receipt.shard
        assert done.sent_bytes == done.receipt.bytes_read > 300 * 300 * 4
        assert counting.total("readback").bytes >= done.sent_bytes
        assert [one.operation for one in store.receipts(done.root)] == ["push"]
        again = ckptstore.push_shard(local, store, receipt)
        assert (again.sent_bytes, again.receipt.bytes_read) == (0, done.receipt.bytes_read)
    root = store.commit(attempt, receipts)
    assert store.verify("main").ok
    other = ckptstore.open(tmp_path / "other", create=True)
    shared = other.begin("main")
    assert other.commit(shared, save([other, other], shared)) == root


def test_a_shard_that_is_damaged_where_it_was_saved_is_not_moved(locals_: list[Store], store: Store) -> None:
    attempt = store.begin("main")
    receipts = save(locals_, attempt)
    stat = next(locals_[1].backend.list("objects/"))
    path = Path(str(locals_[1].backend.path)) / stat.key  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"shard 1.*weight"):
        ckptstore.push_shard(ckptstore.open(path.parents[2]), store, receipts[1])
    ckptstore.push_shard(locals_[0], store, receipts[0])
    with pytest.raises(NotFoundError):
        store.commit(attempt, receipts)
    assert store.head("main") is None


def test_a_receipt_without_a_shard_moves_nothing(locals_: list[Store], store: Store) -> None:
    receipt = replace(save(locals_, store.begin("main"))[1], shard=None, failure="out of memory")
    with pytest.raises(UsageError, match="out of memory"):
        ckptstore.push_shard(locals_[1], store, receipt)


def test_a_shard_can_be_pulled_without_the_files_of_its_run(store: Store, tmp_path: Path) -> None:
    trees = []
    for name in ("plan", "inputs", "sources"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name * 1000)
        trees.append(store.put_tree(tmp_path / name))
    run = store.put_preparation(*trees)
    attempt = store.begin("main")
    receipts = [store.save_shard(s, attempt, step=1, index=i, count=2, run=run) for i, s in enumerate(halves())]
    root = store.commit(attempt, receipts)
    bare, full = (ckptstore.open(tmp_path / name, create=True) for name in ("bare", "full"))
    without = ckptstore.pull(store, bare, root, shards=[1], files=False)
    with_files = ckptstore.pull(store, full, root, shards=[1])
    assert without.sent_bytes == sum(size for _, size in store.closure(root, [1], files=False).sizes())
    assert with_files.sent_bytes - without.sent_bytes > 3 * 4000
    fresh = halves(1.0)
    bare.restore(root, fresh[1], shard=1)
    with pytest.raises(NotFoundError):
        bare.restore(root, fresh[0], shard=0)


def test_only_the_named_files_of_a_tree_are_read(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a" / "one").write_text("1" * 1000)
    (source / "two").write_text("2" * 2000)
    tree = store.put_tree(source)
    counting = CountingBackend(store.backend)
    assert Store(counting).get_tree(tree, tmp_path / "target", ["a/one"]) == 1000
    assert counting.total("get", prefix="objects/").bytes == 1000
    assert [p.name for p in (tmp_path / "target").rglob("*") if p.is_file()] == ["one"]
    assert store.get_tree(tree, tmp_path / "target", []) == 0
    assert store.get_tree(tree, tmp_path / "target") == 2000
    with pytest.raises(NotFoundError, match="no file three, zero"):
        store.get_tree(tree, tmp_path / "target", ["zero", "two", "three"])


def test_a_state_without_a_run_is_pulled_the_same_with_and_without_files(store: Store, tmp_path: Path) -> None:
    root = commit_state(store, "main", halves(), 1)
    target = ckptstore.open(tmp_path / "target", create=True)
    assert ckptstore.pull(store, target, root, files=False).sent_bytes > 0
    assert ckptstore.pull(store, target, root).sent_bytes == 0
    assert target.verify(root).ok
