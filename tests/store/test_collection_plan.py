"""What is reachable stays, what nothing leads to goes, and where something is not understood nothing goes."""

from __future__ import annotations

import secrets
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.backends.counting import CountingBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.protocol import ReadBackend
from ckptstore.collection.collect import collect
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.errors import NotFoundError, ReadOnlyError
from ckptstore.format import values
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.keys import (
    document_key,
    object_key,
    pin_key,
    receipt_prefix,
    ref_key,
    retired_key,
)
from ckptstore.format.page import encode_page, make_tensor_entry
from ckptstore.format.progress import Progress
from ckptstore.format.records import Pin, Receipt, Retired, attempt_subject
from ckptstore.format.shard import PageRef, Shard
from ckptstore.pinning import list_pins, pin, unpin
from ckptstore.store import Store
from tests.support.documents import rewrite_checkpoint
from tests.support.faulty import FaultyBackend
from tests.support.invariants import broken, children
from tests.support.lines import (
    aborted,
    content,
    kept,
    keys,
    line,
    needed,
    planned,
    read_back,
    reasons,
    rich,
    saved,
    state,
    store_over,
    whole,
)

LAST = Policy((KeepLast(1),))


# -- reachability -----------------------------------------------------------------------------------------------------


def test_exactly_what_the_kept_need_stays(store: Store, tmp_path: Path) -> None:
    """F-158: documents of every kind, packs, chunks and files, by the closures that readers walk."""
    first, second = rich(store, tmp_path), rich(store, tmp_path, step=8)
    other = line(store, [1, 2])
    read_back(store, second)
    assert {stat.key.partition("/")[0] for stat in planned(store).deletions} == {"receipts"}  # of ended attempts
    done = collect(store, LAST, delete=True).plan
    assert kept(done) == {second, other[1]}
    assert content(store) == needed(store, second, other[1])
    assert all(whole(store, root) for root in kept(done))
    assert store.checkpoint(first).step == 7
    assert store.backend.stat(retired_key(first)) is not None
    assert [ancestor.status for ancestor in store.verify("wide").ancestors] == ["retired"]


def test_what_checkpoints_share_stays_with_the_one_that_is_kept(store: Store) -> None:
    roots = [saved(store, step, value=5) for step in (1, 2)]
    roots.append(saved(store, 3, value=6))
    shared = {key for key in needed(store, roots[0]) & needed(store, roots[1]) if key.startswith("objects/")}
    assert shared
    pin(store, roots[0])
    done = collect(store, LAST, delete=True).plan
    assert kept(done) == {roots[0], roots[2]}
    assert shared <= content(store)
    assert whole(store, roots[0])
    unpin(store, roots[0])
    assert shared <= {stat.key for stat in collect(store, LAST, delete=True).plan.deletions}


@pytest.mark.parametrize("failure", [False, True])
def test_what_an_aborted_attempt_left_goes(store: Store, failure: bool) -> None:
    """F-158."""
    roots = line(store, [1, 2])
    left = aborted(store, failure=failure)
    assert any(key.startswith("receipts/") for key in left)
    gone = {stat.key for stat in collect(store, delete=True).plan.deletions}
    assert left <= gone
    assert {key for key in gone - left if not key.startswith("receipts/")} == set()  # receipts of committed attempts
    assert all(whole(store, root) for root in roots)


def test_receipts_of_attempts_go_and_receipts_about_checkpoints_stay(store: Store) -> None:
    """Also about retired ones: their documents stay as history, and so does what is known of them."""
    roots = [saved(store, step, metrics={"loss": step}) for step in (1, 2)]
    attempt = store.begin("main")
    store.save_shard(state(3), attempt, step=3, index=0, count=2)
    assert list(store.backend.list(receipt_prefix(attempt_subject(attempt.nonce))))
    before = [store.receipts(root) for root in roots]
    collect(store, LAST, delete=True)
    assert [store.receipts(root) for root in roots] == before
    subjects = {key.split("/")[1] for key in keys(store) if key.startswith("receipts/")}
    assert subjects == {root.hex for root in roots}


def test_a_receipt_that_is_not_understood_stays(store: Store) -> None:
    line(store, [1])
    key = f"receipts/{'ab' * 32}/{'cd' * 32}"
    store.backend.create(key, b"whatever")
    aborted(store)
    assert collect(store, delete=True).plan.deletions != ()
    assert store.backend.stat(key) is not None


def trees(store: Store, folder: Path, *names: str) -> list[Digest]:
    """Trees of one file each."""
    found = []
    for name in names:
        (folder / name).mkdir()
        (folder / name / "file").write_bytes(name.encode() * 100)
        found.append(store.put_tree(folder / name))
    return found


def test_trees_that_no_checkpoint_has_go_unless_they_are_pinned(store: Store, tmp_path: Path) -> None:
    """F-158: a pin keeps a document of any kind with all that it needs."""
    line(store, [1])
    found = trees(store, tmp_path, "one", "two")
    store.backend.create(pin_key(found[0], secrets.token_hex(16)), Pin(None, "for a run to come").encode())
    done = collect(store, delete=True).plan
    assert found[0] in kept(done)
    assert store.get_tree(found[0], tmp_path / "out") == 300
    with pytest.raises(NotFoundError):
        store.tree(found[1])


def test_what_was_prepared_waits_for_its_first_checkpoint(store: Store, tmp_path: Path) -> None:
    """F-158: days may lie between both. What a run had that is retired goes with it."""
    prepared = store.put_preparation(*trees(store, tmp_path, "plan", "inputs", "sources"))
    assert [item.root for item in collect(store, delete=True).plan.kept] == [prepared]
    root = rich(store, tmp_path)
    used = store.checkpoint(root).run
    assert used is not None
    newer = line(store, [8], "wide")[0]
    done = collect(store, LAST, delete=True).plan
    assert kept(done) == {prepared, newer}
    assert store.backend.stat(document_key(used)) is None
    assert store.preparation(prepared)
    collect(store, delete=True, retire=[prepared])
    assert content(store) == needed(store, newer)


def test_a_tree_of_which_a_receipt_tells_stays(store: Store, tmp_path: Path) -> None:
    """F-158: an archive of evidence is stored so."""
    tree, other = trees(store, tmp_path, "archive", "other")
    told = Receipt("evidence", tree, None, 1, 1, 700, "memory", "2026-03-01T00:00:00Z", "file:///before/it/was/moved")
    store.add_receipt(told)
    store.add_receipt(replace(told, subject=other, details=values.to_json({"store": "ab" * 16})))
    collect(store, delete=True)
    assert store.get_tree(tree, tmp_path / "out") == 700
    with pytest.raises(NotFoundError):
        store.tree(other)


def test_a_checkpoint_that_nothing_names_goes_and_is_told(store: Store) -> None:
    """F-158: what a writer left who lost the ref to another."""
    root = line(store, [1])[0]
    lost = rewrite_checkpoint(store, root, lambda checkpoint: {"step": 2, "parent": root})
    plan = planned(store)
    assert [(item.root, item.step) for item in plan.unnamed] == [(lost, 2)]
    assert document_key(lost) in {stat.key for stat in plan.deletions}
    assert lost not in {item.root for item in plan.retired}
    collect(store, delete=True)
    assert lost not in set(store.checkpoints())
    assert whole(store, root)


def test_what_a_push_brought_whole_stays_though_nothing_names_it(store: Store) -> None:
    """F-158: a copy that somebody made on purpose is not garbage; it goes when somebody names it."""
    root = line(store, [1, 2])[1]
    other = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    ckptstore.push(store, other, root)
    assert kept(planned(other)) == {root}
    assert "nothing names it" in reasons(planned(other, KeepLast(1)), root)
    done = collect(other, delete=True, retire=[root.hex]).plan
    assert root in [item.root for item in done.unnamed]
    assert [item for item in content(other) if item.startswith("objects/")] == []


# -- partial stores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [True, False])
def test_a_partial_store_keeps_the_shards_that_are_pinned(store: Store, tmp_path: Path, files: bool) -> None:
    """F-158, F-144: nothing of it is missed, and what other shards left goes."""
    root = rich(store, tmp_path)
    part = ckptstore.open(tmp_path / "part", create=True)
    ckptstore.pull(store, part, root, shards=[1], files=files)
    before = content(part)
    plan = planned(part, KeepLast(1))
    assert (plan.kept[0].root, plan.kept[0].shards) == (root, (1,))
    assert plan.deletions == ()
    ckptstore.pull(store, part, root, files=files)
    for item in list_pins(part, root):
        assert item.pin.shards == (1,)
    for stat in list(part.backend.list(receipt_prefix(root))):
        if b'"exceptions":["only' not in part.backend.get(stat.key):
            part.backend.delete(stat.key)  # else it is kept as one that came whole
    collect(part, delete=True)
    assert content(part) == before
    assert part.verify(root, [1], files=files).ok


def test_pins_of_several_scopes_keep_all_of_them(store: Store, tmp_path: Path) -> None:
    root = rich(store, tmp_path)
    part = ckptstore.open(tmp_path / "part", create=True)
    for shard in (0, 1):
        ckptstore.pull(store, part, root, shards=[shard])
    assert [item.shards for item in planned(part).kept] == [(0, 1)]
    pin(part, root, reason="whole")
    assert [item.shards for item in planned(part).kept] == [None]
    assert planned(part).deletions == ()


def test_what_a_ref_names_is_whole_whatever_pins_there_are(store: Store, tmp_path: Path) -> None:
    root = rich(store, tmp_path)
    pin(store, root, shards=[0], reason="part")
    assert [item.shards for item in planned(store, KeepLast(1)).kept] == [None]


def test_a_store_that_was_pulled_without_files_is_no_damaged_one(store: Store, tmp_path: Path) -> None:
    root = rich(store, tmp_path)
    bare = ckptstore.open(tmp_path / "bare", create=True)
    ckptstore.pull(store, bare, root, ref="main", files=False)
    assert planned(bare).deletions == ()
    assert kept(planned(bare)) == {root}


def test_history_that_came_without_closures_blocks_nothing(store: Store, tmp_path: Path) -> None:
    roots = line(store, [1, 2, 3])
    copy = ckptstore.open(tmp_path / "copy", create=True)
    ckptstore.pull(store, copy, roots[2], ref="main")
    plan = planned(copy)
    assert (kept(plan), plan.retired, plan.deletions) == ({roots[2]}, (), ())
    assert [root for root, _ in copy.history(roots[2])] == roots[::-1]


def test_ancestors_of_what_is_only_pinned_are_history(store: Store) -> None:
    """F-158: their documents stay, as do their closures until a policy lets them go, with a retirement."""
    roots = line(store, [1, 2, 3])
    pin(store, roots[2], reason="paper")
    store.backend.delete(ref_key("main", 3))
    store.backend.delete(ref_key("main", 2))
    store.backend.delete(ref_key("main", 1))
    assert kept(planned(store)) == set(roots)
    done = collect(store, LAST, delete=True).plan
    assert kept(done) == {roots[2]}
    assert [item.root for item in done.retired] == [roots[1], roots[0]]
    assert store.verify(roots[2]).ok


# -- order, interruption ----------------------------------------------------------------------------------------------


def test_whatever_names_something_goes_before_it(store: Store, tmp_path: Path) -> None:
    """F-169."""
    first = rich(store, tmp_path)
    read_back(store, rich(store, tmp_path, step=8))
    rewrite_checkpoint(store, first, lambda checkpoint: {"step": 9, "parent": first})
    aborted(store, "wide")
    plan = planned(store, KeepLast(1))
    position = {stat.key: number for number, stat in enumerate(plan.deletions)}
    assert all(stat.size == keys(store)[stat.key] for stat in plan.deletions)
    for key, number in position.items():
        if key.startswith("documents/"):
            assert all(position.get(child, number + 1) > number for child in children(store.backend.get(key)))
    stages = [{stat.key.partition("/")[0] for stat in stage} for stage in plan.stages]
    assert stages == [{"receipts"}, {"documents"}, {"documents"}, {"documents"}, {"objects"}]
    assert plan.freed_bytes == sum(stat.size for stat in plan.deletions)


def test_interrupted_after_any_deletion_the_next_collection_ends_the_same(disk_store: Store, tmp_path: Path) -> None:
    """F-163, F-169: retired closures that are half gone block nothing, and at each instant the store is sound."""
    roots = line(disk_store, [1, 2, 3])
    aborted(disk_store)
    plan = planned(disk_store, KeepLast(1))
    for item in plan.retired:
        disk_store.backend.create(retired_key(item.root), Retired(item.reason).encode())
    after = kept(plan)
    for number, stat in enumerate(plan.deletions):
        again = planned(disk_store, KeepLast(1))
        assert kept(again) == after
        assert [s.key for s in again.deletions] == [s.key for s in plan.deletions[number:]]
        assert {s.key for s in planned(disk_store).deletions} <= {s.key for s in again.deletions}
        assert broken(tmp_path / "store") == []
        disk_store.backend.delete(stat.key)
    assert planned(disk_store, KeepLast(1)).deletions == ()
    assert (len(keys(disk_store)), sum(keys(disk_store).values())) == (plan.remains.keys, plan.remains.bytes)
    assert whole(disk_store, roots[2])


def test_a_retired_checkpoint_that_came_back_whole_is_kept(store: Store) -> None:
    """A retirement says that a closure may be gone, and not that it has to go."""
    roots = line(store, [1, 2])
    other = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    ckptstore.push(store, other, roots[0])
    collect(store, LAST, delete=True)
    assert kept(planned(store)) == {roots[1]}
    ckptstore.pull(other, store, roots[0])
    assert kept(planned(store)) == set(roots)
    assert whole(store, roots[0])


@pytest.mark.parametrize("ref", ["main", "new"])
def test_what_is_saved_while_the_plan_is_made_is_not_in_it(ref: str) -> None:
    """B078: keys are listed before refs are looked for, so that what comes later is none that could go."""
    backend = FaultyBackend(MemoryBackend())
    store = store_over(backend)
    line(store, [1])
    left = aborted(store)
    new: list[Digest] = []

    def save(_prefix: str) -> None:
        backend.heal()
        new.append(saved(Store(backend), 2, ref, value=1000.5))

    backend.after("list", save)
    plan = planned(store)
    assert kept(plan) >= set(new)
    gone = {stat.key for stat in plan.deletions}
    assert gone.isdisjoint(needed(store, *new))
    assert gone & left  # the receipt of the attempt; its objects have found another use meanwhile


def test_a_plan_writes_nothing(disk_store: Store, tmp_path: Path) -> None:
    line(disk_store, [1, 2])
    aborted(disk_store)
    counting = CountingBackend(disk_store.backend)
    before = keys(disk_store)
    assert collect(Store(counting), LAST).plan.deletions
    assert counting.total("create", "replace", "delete").calls == 0
    assert keys(disk_store) == before


class Readable:
    """Reads, and has no way to write."""

    def __init__(self, inner: ReadBackend) -> None:
        self.url, self.traits = inner.url, inner.traits
        self.get, self.readback, self.stat = inner.get, inner.readback, inner.stat
        self.present, self.list = inner.present, inner.list


def test_a_store_that_can_only_be_read_has_a_plan_and_no_collection(store: Store) -> None:
    line(store, [1, 2])
    reader = Store(Readable(store.backend))  # type: ignore[arg-type]
    assert collect(reader, LAST).plan == collect(store, LAST).plan
    with pytest.raises(ReadOnlyError):
        collect(reader, LAST, delete=True)


def test_the_catalogue_of_a_collected_store_is_said_to_be_old(disk_store: Store) -> None:
    line(disk_store, [1, 2])
    assert disk_store.catalogue().stale().gone == ()
    (note,) = collect(disk_store, LAST, delete=True).notes
    assert "ckpt catalogue rebuild" in note
    with disk_store.catalogue() as catalogue:
        assert catalogue.stale().gone
        catalogue.rebuild()
        assert not catalogue.stale()


def test_each_document_is_read_once_or_twice_however_many_checkpoints_need_it(disk_store: Store) -> None:
    for step in (1, 2, 3):
        saved(disk_store, step, value=step // 2)
    counting = CountingBackend(disk_store.backend)
    collect(Store(counting))
    assert max(tally.calls for tally in counting.by_key("get", "readback", prefix="documents/").values()) <= 2
    assert counting.total("get", "readback", prefix="objects/").calls == 0
    assert counting.total("list", prefix="documents/").calls == 0


# -- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.deep
def test_a_plan_holds_digests_and_little_else(store: Store) -> None:
    """For each key of a state of many tensors some hundred bytes, not the documents that name it."""
    number = 40_000
    parent = None
    for step in (1, 2):
        pages = []
        for start in range(0, number, 1024):
            entries = [
                make_tensor_entry(f"p{i:07d}", ("weight",), "f32", (65536,), [Digest.of(b"%d %d" % (step, i))], None)
                for i in range(start, min(start + 1024, number))
            ]
            page = store.objects.put_document(encode_page(entries))
            pages.append(PageRef(page, len(entries), ("weight",), entries[0].path))
            for entry in entries:
                store.backend.create(object_key(entry.chunks[0]), b"x")
        shard = store.objects.put_document(Shard(0, 1, tuple(pages), (), (), (), ()).encode())
        nothing, no_values = Digest.of(b""), values.to_json({})
        made = Checkpoint(step, parent, None, nothing, nothing, (shard,), (), (), Progress(), no_values, None, ())
        parent = store.objects.put_document(made.encode())
        store.refs.move("main", parent, store.refs.head("main"))
    told = Receipt("verify", parent, None, 0, 0, 0, "memory", "2026-03-01T00:00:00Z", store.url)
    store.add_receipt(told)
    tracemalloc.start()
    try:
        plan = planned(store, KeepLast(1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(plan.stages[-1]) == number
    assert peak < 700 * 2 * number


def test_a_ref_cannot_name_what_was_retired(store: Store) -> None:
    """Its document is history; invariant 3 is about all of it."""
    first, *_ = line(store, [1, 2, 3])
    collect(store, LAST, delete=True)
    with pytest.raises(NotFoundError, match=r"shard 0 .*retired or never here"):
        store.move_ref("old", first, None)
    assert store.head("old") is None
