"""Verifying several checkpoints together: each object is read once, and what is damaged is a finding of all whom it
hurts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest
from ckptstore.backends.counting import CountingBackend
from ckptstore.errors import NotFoundError, UsageError
from ckptstore.findings import Kind
from ckptstore.format.keys import document_key, object_key
from ckptstore.format.page import Entry, TensorEntry, make_tensor_entry
from ckptstore.readbacks.durability import ledger
from ckptstore.readbacks.kept import kept_checkpoints
from ckptstore.readbacks.readbacks import Part, readback_of
from ckptstore.readbacks.several import verify_many
from ckptstore.store import Store
from ckptstore.verify import Verifier
from tests.support.documents import rewrite_entries
from tests.support.faulty import FaultyBackend
from tests.support.training import commit_state


def layers() -> nn.ModuleDict:
    """Two weights that are objects, and two that go into a pack."""
    torch.manual_seed(0)
    large = {f"large{number}": nn.Linear(300, 300, bias=False) for number in range(2)}
    return nn.ModuleDict({**large, "small": nn.Linear(20, 20)})


def steps(store: Store, count: int, ref: str = "main") -> list[Digest]:
    """Checkpoints of which each changed one large weight of the one before."""
    model = layers()
    roots = []
    for step in range(1, count + 1):
        with torch.no_grad():
            model["large1"].weight.add_(1)  # type: ignore[operator, union-attr]
        roots.append(commit_state(store, ref, [ckptstore.TrainingState(model=model)], step))
    return roots


def counted(store: Store) -> tuple[CountingBackend, Store]:
    counting = CountingBackend(store.backend)
    return counting, Store(counting)


def test_of_several_checkpoints_each_key_is_read_once(store: Store) -> None:
    roots = steps(store, 4)
    counting, reader = counted(store)
    reports = list(verify_many(reader, roots))
    assert [report.root for report in reports] == roots
    assert all(report.ok for report in reports)
    sizes = {key: size for root in roots for key, size in store.closure(root).sizes()}
    read = counting.by_key("readback")
    assert {key: tally.bytes for key, tally in read.items()} == sizes
    assert {tally.calls for tally in read.values()} == {1}
    assert sum(report.bytes_read for report in reports) == sum(sizes.values())


def test_ancestors_that_several_share_are_looked_at_once(store: Store) -> None:
    roots = steps(store, 4)
    counting, reader = counted(store)
    reports = list(verify_many(reader, list(reversed(roots))))
    assert [[a.root for a in report.ancestors] for report in reports] == [
        list(reversed(roots[:number])) for number in (3, 2, 1, 0)
    ]
    looked = [counting.by_key("get")[document_key(root)].calls for root in roots[:3]]
    assert looked == [1, 1, 1]


def test_a_damaged_object_is_a_finding_of_each_checkpoint_that_needs_it(store: Store) -> None:
    roots = steps(store, 3)
    shared = set.intersection(*(set(store.closure(root).objects) for root in roots))
    pack = next(key for key in shared if store.closure(roots[0]).objects[key].slots)
    whole = next(key for key in shared if not store.closure(roots[0]).objects[key].slots)
    own = (set(store.closure(roots[1]).objects) - set(store.closure(roots[0]).objects)).pop()
    faulty = FaultyBackend(store.backend)
    faulty.flip_bit(pack)
    faulty.truncate(whole, 5)
    faulty.flip_bit(own)
    counting = CountingBackend(faulty)
    reports = {report.root: report for report in verify_many(Store(counting), roots)}
    for root, report in reports.items():
        alone = Store(faulty).verify(root)
        assert set(report.findings) == set(alone.findings)
        assert {finding.place.checkpoint for finding in report.findings} == {root}
        hurt = {pack, whole} | ({own} if root == roots[1] else set())
        assert {finding.key for finding in report.findings} == hurt
        assert report.exit_code == 3
    assert {counting.by_key("readback")[key].calls for key in (pack, whole, own)} == {1}
    chunks = [f for f in reports[roots[2]].findings if f.key == pack and f.place.path is not None]
    assert [finding.message for finding in chunks] == ["wrong bytes at 0 of its pack"]


def test_a_missing_object_is_asked_for_once_and_hurts_all(store: Store) -> None:
    roots = steps(store, 3)
    pack = next(key for key, need in store.closure(roots[0]).objects.items() if need.slots)
    store.backend.delete(pack)
    counting, reader = counted(store)
    reports = list(verify_many(reader, roots))
    assert [report.exit_code for report in reports] == [4, 4, 4]
    assert [{f.kind for f in report.findings} for report in reports] == [{Kind.MISSING}] * 3
    assert counting.by_key("readback")[pack].calls == 1


def test_a_pack_that_is_cut_otherwise_is_read_again(store: Store) -> None:
    """Two states may have packs of equal bytes and other borders between the chunks."""
    one = nn.ParameterDict({"a": nn.Parameter(torch.zeros(40)), "b": nn.Parameter(torch.ones(80))})
    other = nn.ParameterDict({"a": nn.Parameter(torch.cat([torch.zeros(40), torch.ones(80)]))})
    roots = [
        commit_state(store, ref, [ckptstore.TrainingState(model=model)], 1)
        for ref, model in (("one", one), ("other", other))
    ]
    keys = [set(store.closure(root).objects) for root in roots]
    assert keys[0] == keys[1]
    counting, reader = counted(store)
    assert all(report.ok for report in verify_many(reader, roots))
    assert counting.by_key("readback")[keys[0].pop()].calls == 2


def test_a_forged_shard_does_not_hide_behind_what_was_read_for_another(store: Store) -> None:
    root = steps(store, 1)[0]
    pack = next(need for need in store.closure(root).objects.values() if need.slots)
    wrong = Digest.of(b"other bytes")

    def forge(entry: Entry) -> Entry:
        if isinstance(entry, TensorEntry) and entry.path == "small.weight":
            return make_tensor_entry(entry.path, entry.role, entry.dtype, entry.shape, [wrong], None)
        return entry

    forged = rewrite_entries(store, root, 0, forge)
    reports = list(verify_many(store, [root, forged]))
    assert reports[0].ok
    assert any(f.key == object_key(pack.digest) and f.kind is Kind.CORRUPT for f in reports[1].findings)


def test_a_receipt_says_what_was_read_for_it_and_how_old_the_rest_may_be(disk_store: Store) -> None:
    roots = steps(disk_store, 3)
    for report in verify_many(disk_store, roots):
        disk_store.add_receipt(report.receipt(disk_store.url))
    first, second, third = (disk_store.receipts(root)[-1] for root in roots)
    sizes = [dict(disk_store.closure(root).sizes()) for root in roots]
    assert first.bytes_read == sum(sizes[0].values())
    assert second.bytes_read == sum(size for key, size in sizes[1].items() if key not in sizes[0])
    told = readback_of(Digest.of(third.encode()), third, lambda _: None)
    assert told is not None
    assert (told.part, told.max_age > timedelta()) == (Part(), True)
    assert told.read is not None
    found = ledger(disk_store, roots)
    lasting = third.method in ("direct", "fsync-dropped")
    assert [root.verified(found.at) for root in found.roots] == [1 if lasting else 0] * 3
    oldest = found.roots[2].oldest(found.at)
    assert oldest is None or oldest <= datetime.now(UTC)


def test_a_root_that_is_named_twice_is_verified_once(store: Store) -> None:
    root = steps(store, 1)[0]
    reports = list(verify_many(store, ["main", root, root.hex[:12]]))
    assert [report.root for report in reports] == [root]
    assert reports[0].history_bytes > 0, "and the log of the ref was read"


def test_names_are_looked_up_before_anything_is_read(store: Store) -> None:
    steps(store, 1)
    counting, reader = counted(store)
    with pytest.raises(NotFoundError):
        verify_many(reader, ["main", "gone"])
    with pytest.raises(UsageError):
        verify_many(reader, ["main", "..."])
    assert counting.total("readback").calls == 0


def test_only_a_bounded_number_of_documents_is_kept(store: Store) -> None:
    roots = steps(store, 3)
    counting, reader = counted(store)
    verifier = Verifier(reader.backend, room=0)
    assert all(verifier.verify(root).ok for root in (*roots, roots[0]))
    read = counting.by_key("readback")
    assert read[document_key(roots[0])].calls == 2
    objects = {key for root in roots for key in store.closure(root).objects}
    assert {read[key].calls for key in objects} == {1}


def test_parts_that_pins_keep_are_verified_as_parts(store: Store, disk_store: Store) -> None:
    states = [ckptstore.TrainingState(model=nn.ModuleDict({name: nn.Linear(30, 30)})) for name in "ab"]
    root = commit_state(store, "main", states, 1)
    ckptstore.push(store, disk_store, root, shards=[1])
    kept = kept_checkpoints(disk_store)
    assert (kept.heads, kept.pinned, kept.faults) == ({}, (root,), ())
    (report,) = verify_many(disk_store, kept.names)
    assert report.ok
    assert report.objects == len(store.closure(root, [1]).objects)


def test_a_head_that_cannot_be_read_is_told_and_the_others_are_found(disk_store: Store) -> None:
    root = steps(disk_store, 1)[0]
    steps(disk_store, 1, "broken")
    faulty = FaultyBackend(disk_store.backend)
    faulty.truncate("refs/broken/0000000000000001", 5)
    kept = kept_checkpoints(Store(faulty))
    assert kept.heads == {"main": root}
    assert ["broken" in fault.what for fault in kept.faults] == [True]
