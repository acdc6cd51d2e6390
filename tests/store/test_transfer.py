"""Push and pull move what is missing, trust no name, and read back what arrived (faults B065 to B067)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.backends.counting import CountingBackend
from ckptstore.errors import ConflictError, CorruptError, NotFoundError, ReadOnlyError, UsageError
from ckptstore.format.keys import document_key
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend
from tests.support.pairs import states
from tests.support.training import commit_state


@pytest.fixture
def root(store: Store) -> Digest:
    return commit_state(store, "main", states(), 1)


@pytest.fixture
def far(tmp_path: Path) -> Store:
    return ckptstore.open(tmp_path / "far", create=True)


def test_a_push_reads_back_every_byte_and_says_how(store: Store, root: Digest, far: Store) -> None:
    """F-143."""
    counting = CountingBackend(far.backend)
    done = ckptstore.push(store, Store(counting), root, ref="main")
    sizes = dict(store.closure(root).sizes())
    assert done.sent_keys == len(sizes)
    assert done.sent_bytes == sum(sizes.values())
    assert done.receipt.bytes_read == sum(sizes.values())
    read = counting.by_key("readback")
    assert {key: read[key].bytes for key in sizes} == sizes
    assert far.head("main") == root
    assert far.verify("main").ok
    assert [receipt.operation for receipt in far.receipts(root)] == ["push"]


def test_children_arrive_before_their_parents(store: Store, root: Digest, far: Store) -> None:
    """F-122."""
    created: list[str] = []
    faulty = FaultyBackend(far.backend)
    faulty.before("create", created.append)
    ckptstore.push(store, Store(faulty), root, ref="main")
    view = store.closure(root).shards[0]
    order = [
        next(iter(store.closure(root).objects)),
        document_key(view.shard.pages[0].digest),
        document_key(view.digest),
    ]
    order += [document_key(root)]
    positions = [created.index(key) for key in order]
    assert positions == sorted(positions)
    assert created.index(document_key(root)) < next(i for i, key in enumerate(created) if key.startswith("refs/"))


def test_a_second_push_sends_nothing_and_still_reads_everything(store: Store, root: Digest, far: Store) -> None:
    ckptstore.push(store, far, root)
    again = ckptstore.push(store, ckptstore.open(far.url), root)
    assert (again.sent_keys, again.sent_bytes) == (0, 0)
    assert again.receipt.bytes_read == sum(size for _, size in store.closure(root).sizes())


def test_only_what_changed_is_sent(store: Store, root: Digest, far: Store) -> None:
    ckptstore.push(store, far, root)
    changed = [states()[0], states(1.0)[1]]
    second = commit_state(store, "main", changed, 2)
    done = ckptstore.push(store, far, second)
    sizes = dict(store.closure(second).sizes())
    assert done.sent_bytes == sum(size for key, size in sizes.items() if key not in dict(store.closure(root).sizes()))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied"])
def test_bad_bytes_under_the_right_name_are_found_put_aside_and_replaced(
    store: Store, root: Digest, far: Store, damage: str
) -> None:
    """B066 (treeverse/dvc#7268): a name is no proof; also for a second checkpoint that shares the object."""
    ckptstore.push(store, far, root)
    folder = Path(far.url.removeprefix("file://"))
    key = max(store.closure(root).objects)
    path = folder / key
    data = path.read_bytes()
    path.chmod(0o644)
    bad = {"flipped": bytes([data[0] ^ 1]) + data[1:], "truncated": data[:-3], "emptied": b""}[damage]
    path.write_bytes(bad)
    second = commit_state(store, "main", states(), 2)
    done = ckptstore.push(store, ckptstore.open(far.url), second)
    assert done.repaired_keys == 1
    assert path.read_bytes() == data
    quarantined = list((folder / "quarantine").rglob("*"))
    assert any(file.is_file() and file.read_bytes() == bad for file in quarantined)
    assert far.verify(second).ok


def test_a_pull_never_hands_out_bad_bytes(store: Store, root: Digest, far: Store) -> None:
    """B066: from a source whose answers are wrong."""
    key = max(store.closure(root).objects)
    faulty = FaultyBackend(store.backend)
    faulty.flip_bit(key, 12)
    with pytest.raises(CorruptError):
        ckptstore.pull(Store(faulty), far, root)
    assert far.backend.stat(key) is None
    assert far.backend.stat(document_key(root)) is None
    assert ckptstore.pull(store, far, root).sent_keys > 0
    assert far.verify(root).ok


def test_a_save_over_damaged_bytes_heals_them(disk_store: Store) -> None:
    """F-121. B066, local store: a fresh process finds the name and does not believe it."""
    first = commit_state(disk_store, "main", states(), 1)
    folder = Path(disk_store.url.removeprefix("file://"))
    path = folder / max(disk_store.closure(first).objects)
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 128]))
    second = commit_state(ckptstore.open(disk_store.url), "main", states(), 2)
    assert path.read_bytes() == data
    assert disk_store.verify(second).ok


def test_what_the_source_lacks_fails_before_anything_that_refers_to_it_is_there(
    store: Store, root: Digest, far: Store
) -> None:
    """B067 (treeverse/dvc#4343)."""
    key = max(store.closure(root).objects)
    store.backend.delete(key)
    with pytest.raises(NotFoundError, match=key):
        ckptstore.push(ckptstore.open(store.url), far, root, ref="main")
    assert [stat.key for stat in far.backend.list("documents/")] == []
    assert far.head("main") is None


def test_a_destination_that_changes_what_it_is_given_is_found_out(store: Store, root: Digest, far: Store) -> None:
    faulty = FaultyBackend(far.backend)
    faulty.flip_bit(max(store.closure(root).objects), 3)
    with pytest.raises(CorruptError, match="readback after sending failed"):
        ckptstore.push(store, Store(faulty), root, ref="main")
    assert far.head("main") is None
    assert far.receipts(root) == []


def test_one_shard_comes_alone_with_a_pin_of_that_scope(store: Store, root: Digest, far: Store) -> None:
    done = ckptstore.pull(store, far, root, shards=[1])
    whole = dict(store.closure(root).sizes())
    part = dict(store.closure(root, [1]).sizes())
    assert done.sent_bytes == sum(part.values()) < sum(whole.values())
    assert {stat.key for stat in far.backend.list("objects/")} == set(store.closure(root, [1]).objects)
    assert len(list(far.backend.list(f"pins/{root.hex}/"))) == 1
    assert far.verify(root, shards=[1]).ok
    assert far.verify(root).exit_code == 4
    assert far.refs.names() == []
    fresh = states(9.0)[1]
    far.restore(root, fresh, shard=1)
    with pytest.raises(UsageError):
        ckptstore.pull(store, far, root, shards=[1], ref="main")
    with pytest.raises(UsageError, match="shard 7"):
        ckptstore.pull(store, far, root, shards=[7])


def test_history_comes_along_and_says_that_its_closures_may_be_gone(store: Store, root: Digest, far: Store) -> None:
    second = commit_state(store, "main", states(1.0), 2)
    ckptstore.push(store, far, second, ref="main")
    assert [(a.root, a.status) for a in far.verify("main").ancestors] == [(root, "retired")]
    ckptstore.push(store, far, root)
    assert [(a.root, a.status) for a in far.verify("main").ancestors] == [(root, "present")]


def test_a_ref_is_never_moved_sideways(store: Store, root: Digest, far: Store) -> None:
    ckptstore.push(store, far, root, ref="main")
    other = commit_state(store, "other", states(4.0), 1)
    with pytest.raises(ConflictError, match="no ancestor"):
        ckptstore.push(store, far, other, ref="main")
    assert far.head("main") == root
    ckptstore.push(store, far, root, ref="main")
    assert far.refs.head("main").generation == 1  # type: ignore[union-attr]


class TestReceipts:
    def test_a_push_leaves_its_receipt_at_both_ends(self, store: Store, root: Digest, far: Store) -> None:
        done = ckptstore.push(store, far, root)
        assert far.receipts(root) == [done.receipt]
        assert done.receipt in store.receipts(root)
        assert done.receipt.where == far.url

    def test_that_of_another_store_is_no_readback_of_this_one(self, store: Store, root: Digest, far: Store) -> None:
        done = ckptstore.push(store, far, root)
        assert far.readbacks(root) == [done.receipt]
        assert store.readbacks(root) == []

    def test_a_source_that_cannot_be_written_is_a_warning(
        self, store: Store, root: Digest, far: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        faulty = FaultyBackend(store.backend)
        faulty.fail("create", ReadOnlyError("key", "read-only file system"))
        with caplog.at_level(logging.WARNING, "ckptstore"):
            done = ckptstore.push(Store(faulty), far, root, ref="main")
        assert far.receipts(root) == [done.receipt]
        assert far.head("main") == root
        assert "read-only file system" in caplog.text

    def test_a_pull_writes_nothing_at_its_source(self, store: Store, root: Digest, far: Store) -> None:
        counting = CountingBackend(store.backend)
        ckptstore.pull(Store(counting), far, root)
        assert counting.total("create", "replace", "delete").calls == 0
