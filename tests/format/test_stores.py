"""Rules that hold between documents: forged with every digest recomputed, and refused for what they say."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.backends.counting import CountingBackend
from ckptstore.errors import CkptStoreError, ConflictError, CorruptError, RefusedError, UnsupportedVersionError
from ckptstore.findings import Finding, Kind
from ckptstore.format.checkpoint import Checkpoint, Deviation, Replica
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, object_key, ref_key
from ckptstore.format.page import WEIGHT, Entry, HyperEntry, encode_page, make_tensor_entry
from ckptstore.format.progress import Cursor
from ckptstore.format.records import Lease, Receipt, RefRecord
from ckptstore.format.records import Store as Header
from ckptstore.format.shard import Alias, PageRef, RolePacks, Shard
from ckptstore.format.tree import Excluded, File, Tree
from ckptstore.format.values import to_json
from ckptstore.store import Store
from tests.format.kinds import VECTORS


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store of the vectors; its head has two shards, its parent one."""
    shutil.copytree(VECTORS / "store", tmp_path / "store")
    return ckptstore.open(tmp_path / "store")


@pytest.fixture
def root(store: Store) -> Digest:
    return store.resolve("main")


def forge(store: Store, root: Digest, **changes: Any) -> Digest:
    """The root of a checkpoint with other fields."""
    return store.objects.put_document(replace(store.checkpoint(root), **changes).encode())


def forge_shard(store: Store, root: Digest, index: int, change: Callable[[Shard], Shard]) -> Digest:
    """The root of a checkpoint with another shard; the roots of the state are left as they were."""
    shards = list(store.checkpoint(root).shards)
    shard = change(Shard.parse(store.backend.get(document_key(shards[index]))))
    shards[index] = store.objects.put_document(shard.encode())
    return forge(store, root, shards=tuple(shards))


def findings(store: Store, root: Digest) -> list[Finding]:
    found = list(store.verify(root).findings)
    if found:
        with pytest.raises(CkptStoreError):
            store.closure(root)
    return found


def only(store: Store, root: Digest) -> Finding:
    (finding,) = findings(store, root)
    return finding


# -- header, keys -----------------------------------------------------------------------------------------------------


def test_a_new_store_has_its_header_and_nothing_else(tmp_path: Path) -> None:
    """F-02, F-100."""
    made = ckptstore.open(tmp_path / "new", create=True)
    assert [stat.key for stat in made.backend.list("")] == ["ckptstore.json"]
    data = made.backend.get("ckptstore.json")
    assert Header.parse(data).encode() == data
    again = ckptstore.open(tmp_path / "new", create=True)
    assert again.backend.get("ckptstore.json") == data


def test_a_folder_with_other_files_does_not_become_a_store(tmp_path: Path) -> None:
    """F-02."""
    (tmp_path / "precious").write_text("x")
    with pytest.raises(RefusedError, match=r"no ckptstore\.json"):
        ckptstore.open(tmp_path, create=True)


def test_a_store_with_an_unknown_feature_or_another_format_is_refused(store: Store) -> None:
    """F-09, F-19, F-101."""
    store.backend.create("features/encodings", b"{}")
    with pytest.raises(UnsupportedVersionError, match="'encodings'"):
        ckptstore.open(store.url)
    store.backend.delete("features/encodings")
    ckptstore.open(store.url)
    store.backend.replace("ckptstore.json", store.backend.get("ckptstore.json").replace(b'"format":1', b'"format":2'))
    with pytest.raises(UnsupportedVersionError, match="format 2"):
        ckptstore.open(store.url)


# -- shards and pages --------------------------------------------------------------------------------------------------


def test_shards_in_another_order_are_refused(store: Store, root: Digest) -> None:
    """F-60, F-82 (B049): the position of a shard is bound."""
    found = findings(store, forge(store, root, shards=store.checkpoint(root).shards[::-1]))
    assert [finding.place.shard for finding in found[:2]] == [0, 1]
    assert all("another position" in finding.message for finding in found[:2])


def test_a_shard_left_out_or_doubled_is_refused(store: Store, root: Digest) -> None:
    """F-60, F-82."""
    first, second = store.checkpoint(root).shards
    for shards in ((first,), (second,), (first, first), (first, second, second)):
        assert findings(store, forge(store, root, shards=shards))


@pytest.mark.parametrize("change", [{"count": 3}, {"path": "x"}, {"role": ("buffer",)}])
def test_a_page_that_is_not_as_the_shard_says_is_refused(store: Store, root: Digest, change: dict[str, Any]) -> None:
    """F-61."""
    forged = forge_shard(store, root, 1, lambda shard: replace(shard, pages=(replace(shard.pages[0], **change),)))
    finding = only(store, forged)
    assert (finding.kind, finding.place.shard, finding.place.part) == (Kind.INCONSISTENT, 1, "page 0")


def test_pages_that_overlap_are_refused(store: Store, root: Digest) -> None:
    """F-51: each page in order, and yet an entry between those of the page before, or one of them again."""
    entries = store.closure(root).shards[1].entries
    for split in ([entries[:1] + entries[2:], entries[1:2]], [entries[:3], entries[2:]]):

        def change(shard: Shard, split: list[list[Entry]] = split) -> Shard:
            refs = [
                PageRef(store.objects.put_document(encode_page(part)), len(part), part[0].role, part[0].path)
                for part in split
            ]
            return replace(shard, pages=tuple(refs))

        assert any("not sorted" in finding.message for finding in findings(store, forge_shard(store, root, 1, change)))


def test_an_entry_of_a_group_that_is_not_described_is_refused(store: Store, root: Digest) -> None:
    """F-66."""
    entries = [
        replace(entry, group=1) if isinstance(entry, HyperEntry) else entry
        for entry in store.closure(root).shards[1].entries
    ]
    digest = store.objects.put_document(encode_page(entries))
    forged = forge_shard(store, root, 1, lambda shard: replace(shard, pages=(replace(shard.pages[0], digest=digest),)))
    assert "group 1 is not described" in only(store, forged).message
    forged = forge_shard(store, root, 1, lambda shard: replace(shard, optimizers=()))
    assert "no such optimizer" in only(store, forged).message


def test_one_shard_alone_is_held_to_its_own_rules(store: Store, root: Digest) -> None:
    """F-51, F-66: a reader of this shard only refuses what a reader of all would refuse about it."""
    forged = forge_shard(store, root, 1, lambda shard: replace(shard, optimizers=()))
    (finding,) = store.verify(forged, [1]).findings
    assert "no such optimizer" in finding.message
    with pytest.raises(CkptStoreError, match="no such optimizer"):
        store.closure(forged, [1])
    assert store.verify(forged, [0]).findings == ()


@pytest.mark.parametrize("packs", ["none", "more", "another role"])
def test_packs_that_do_not_follow_from_the_entries_are_refused(store: Store, root: Digest, packs: str) -> None:
    """F-39."""
    kept = store.closure(root).shards[1].shard.packs[0]
    changed = {
        "none": (),
        "more": (RolePacks(kept.role, kept.digests * 2),),
        "another role": (RolePacks(("optim", "optimizer", "step"), kept.digests),),
    }[packs]
    found = findings(store, forge_shard(store, root, 1, lambda shard: replace(shard, packs=changed)))
    assert all("do not follow from its entries" in finding.message for finding in found)


def test_a_chunk_that_is_not_the_one_in_its_pack_is_refused_by_name(store: Store, root: Digest) -> None:
    """F-39: the pack is whole and has its digest, and yet does not hold the chunk."""
    other = store.objects.put_object(bytes(128))
    forged = forge_shard(store, root, 1, lambda shard: replace(shard, packs=(RolePacks(WEIGHT, (other,)),)))
    finding = store.verify(forged).findings[0]
    assert (finding.kind, finding.place.role, finding.place.path) == (Kind.CORRUPT, WEIGHT, "w")
    assert finding.key == object_key(other)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["state_root", "rng_root"])
def test_a_root_that_does_not_follow_is_refused(store: Store, root: Digest, field: str) -> None:
    """F-29."""
    finding = only(store, forge(store, root, **{field: Digest.of(b"")}))
    assert (finding.kind, finding.actual) == (Kind.INCONSISTENT, str(Digest.of(b"")))
    assert finding.expected == str(getattr(store.checkpoint(root), field))


def test_the_root_covers_every_field_of_a_checkpoint(store: Store, root: Digest) -> None:
    """F-80, F-81."""
    other = Digest.of(b"")
    changes: list[dict[str, Any]] = [
        {"step": 4},
        {"parent": None},
        {"run": None},
        {"state_root": other},
        {"rng_root": other},
        {"shards": (other,)},
        {"ties": ()},
        {"replicas": (Replica(WEIGHT, "w"),)},
        {"progress": replace(store.checkpoint(root).progress, cursors=())},
        {"binding": to_json({})},
        {"files": other},
        {"deviations": (Deviation("code", "", ""),)},
    ]
    assert {next(iter(change)) for change in changes} == set(Checkpoint.__dataclass_fields__)
    assert len({root, *(forge(store, root, **change) for change in changes)}) == len(changes) + 1


def test_counters_off_by_one_are_refused_for_the_progress(store: Store, root: Digest) -> None:
    """F-72, F-75, F-76 (B014): on verify and on load, although every digest fits."""
    for step in (2, 4):
        found = findings(store, forge(store, root, step=step))
        assert [finding.kind for finding in found] == [Kind.PROGRESS] * 3
        assert store.verify(forge(store, root, step=step)).exit_code == 5
    progress = store.checkpoint(root).progress
    for changed in (
        replace(progress, counters=progress.counters[1:]),
        replace(progress, counters=progress.counters[:1]),
        replace(progress, cursors=(("data", Cursor("samples", 95, 32)),)),
        replace(progress, micro_index=1),
    ):
        assert only(store, forge(store, root, progress=changed)).kind is Kind.PROGRESS


@pytest.mark.parametrize("shard", [0, 1])
def test_one_shard_alone_is_held_to_the_same_progress(store: Store, root: Digest, shard: int) -> None:
    """F-77."""
    assert store.verify(root, [shard]).findings == ()
    assert [finding.kind for finding in store.verify(forge(store, root, step=4), [shard]).findings] == [
        Kind.PROGRESS
    ] * 3


@pytest.mark.parametrize(
    "ties", [(), (Alias("seen", "a"),), (Alias("w.tied", "seen-not"),), (Alias("w.tied", "w"), Alias("x", "nowhere"))]
)
def test_ties_must_lead_to_entries_and_give_the_state_root(store: Store, root: Digest, ties: tuple[Alias, ...]) -> None:
    """F-27, F-85."""
    assert all(finding.kind is Kind.INCONSISTENT for finding in findings(store, forge(store, root, ties=ties)))
    assert findings(store, forge(store, root, ties=ties))


def test_a_replica_that_no_shard_holds_is_refused(store: Store, root: Digest) -> None:
    """F-86."""
    assert "in no shard" in only(store, forge(store, root, replicas=(Replica(WEIGHT, "v"),))).message


def test_a_reference_to_a_document_of_another_kind_is_refused(store: Store, root: Digest) -> None:
    """F-19, F-84."""
    checkpoint = store.checkpoint(root)
    tree = store.preparation(checkpoint.run).plan if checkpoint.run else None
    for change in ({"run": tree}, {"files": checkpoint.run}, {"run": root}, {"files": root}):
        found = findings(store, forge(store, root, **change))
        assert [finding.kind for finding in found] == [Kind.MALFORMED]


def test_the_parent_is_history_and_no_part_of_the_closure(store: Store, root: Digest) -> None:
    """F-83, F-133."""
    parent = store.checkpoint(root).parent
    assert parent is not None
    assert document_key(parent) not in store.closure(root).documents
    assert store.closure(forge(store, root, parent=Digest.of(b"gone"))).documents.keys() >= {
        document_key(shard) for shard in store.checkpoint(root).shards
    }


def test_an_attempt_carries_the_root_that_the_ref_named(store: Store, root: Digest) -> None:
    """F-83."""
    assert store.begin("main").parent == root
    assert store.begin("other").parent is None


# -- refs, receipts, trees ---------------------------------------------------------------------------------------------


def test_a_record_under_another_generation_is_corrupt(store: Store, root: Digest) -> None:
    """F-102."""
    store.backend.create(ref_key("main", 3), store.backend.get(ref_key("main", 2)))
    with pytest.raises(CorruptError, match="generation 2"):
        store.head("main")


def test_a_record_that_does_not_follow_the_one_before_is_found(store: Store, root: Digest) -> None:
    """F-105."""
    store.backend.create(ref_key("main", 3), RefRecord(3, Digest.of(b""), root, secrets.token_hex(16)).encode())
    (finding,) = store.verify("main").findings
    assert (finding.kind, finding.key) == (Kind.CORRUPT, ref_key("main", 2))


def test_a_forged_receipt_proves_nothing(store: Store, root: Digest) -> None:
    """F-107."""
    report = store.verify(root)
    receipt = Receipt("verify", root, report.closure, 9, 9, report.bytes_read, "direct", "2026-09-14T03:56:28Z", "x")
    store.add_receipt(receipt)
    assert receipt in store.receipts(root)
    key = next(key for key in report.keys)
    store.backend.replace(key, bytes(len(store.backend.get(key))))
    assert ckptstore.open(store.url).verify(root).findings


def test_copies_are_read_back_and_history_says_what_is_not_there(store: Store, root: Digest) -> None:
    """F-106, F-112."""
    far = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    done = ckptstore.push(store, far, root)
    assert done.receipt in far.receipts(root)
    sizes = store.closure(root).sizes()
    assert (done.receipt.bytes_read, done.receipt.closure) == (sum(n for _, n in sizes), store.verify(root).closure)
    parent = store.checkpoint(root).parent
    assert parent is not None
    assert far.backend.stat(f"retired/{parent.hex}") is not None
    assert far.verify(root).findings == ()


def test_a_tree_takes_files_and_links_to_them_and_nothing_else(store: Store, tmp_path: Path) -> None:
    """F-94, F-95, F-96."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("text")
    (folder / "link").symlink_to("file")
    (folder / "tool").write_text("run")
    (folder / "tool").chmod(0o755)
    (folder / "draft").write_text("not this")
    tree = store.tree(store.put_tree(folder, {"draft": "not read by the run"}))
    text, run = Digest.of(b"text"), Digest.of(b"run")
    assert tree == Tree(
        (File("file", False, 4, (text,)), File("link", False, 4, (text,), "file"), File("tool", True, 3, (run,))),
        (Excluded("draft", "not read by the run"),),
    )
    with pytest.raises(RefusedError, match="not there: gone"):
        store.put_tree(folder, {"gone": "why"})
    (tmp_path / "outside").write_text("secret")
    (folder / "leads-out").symlink_to("../outside")
    with pytest.raises(RefusedError, match="leads-out"):
        store.put_tree(folder)
    (folder / "leads-out").unlink()
    (folder / "dangling").symlink_to("nowhere")
    with pytest.raises(RefusedError, match="dangling"):
        store.put_tree(folder)


def test_a_tree_overwrites_no_other_file(store: Store, tmp_path: Path) -> None:
    """F-97."""
    plan = store.preparation(store.checkpoint(store.resolve("main")).run or Digest.of(b"")).plan
    target = tmp_path / "out"
    assert store.get_tree(plan, target) == 6
    assert (target / "notes" / "hello").read_text() == "hello\n"
    assert store.get_tree(plan, target) == 0
    (target / "empty").write_text("mine")
    with pytest.raises(RefusedError, match="empty"):
        store.get_tree(plan, target)
    assert (target / "empty").read_text() == "mine"


def test_a_forged_tensor_digest_is_malformed_wherever_it_stands(store: Store, root: Digest) -> None:
    """F-54."""
    entries = store.closure(root).shards[0].entries
    wrong = replace(make_tensor_entry("seen", ("buffer",), "i64", (), (), bytes(8)), digest=Digest.of(b""))
    assert len(entries) == 1
    digest = store.objects.put_document(encode_page([wrong]))
    forged = forge_shard(store, root, 0, lambda shard: replace(shard, pages=(replace(shard.pages[0], digest=digest),)))
    assert only(store, forged).kind is Kind.MALFORMED


# -- writers, copies, limits -------------------------------------------------------------------------------------------


def test_a_writer_is_seen_by_its_lease_and_leaves_none_behind(store: Store) -> None:
    """F-113, F-140."""
    with store.lease():
        (stat,) = store.backend.list("leases/")
        lease = Lease.parse(store.backend.get(stat.key))
        assert lease.host
        assert lease.process
    assert list(store.backend.list("leases/")) == []


def test_a_writer_withdraws_where_a_collection_is_running(store: Store, root: Digest, tmp_path: Path) -> None:
    """F-141."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("new")
    store.backend.create("gc/1", b"{}")
    before = [stat.key for stat in store.backend.list("")]
    with pytest.raises(ConflictError, match="collection"):
        store.put_tree(tmp_path / "folder")
    with pytest.raises(ConflictError, match="collection"):
        ckptstore.push(ckptstore.open(VECTORS / "store"), store, root)
    assert [stat.key for stat in store.backend.list("")] == before


def test_records_of_a_ref_stay_as_they_are(store: Store, root: Digest) -> None:
    """F-124, F-126: whoever moves or fences a ref adds a record."""
    parent = store.checkpoint(root).parent
    kept = {stat.key: store.backend.get(stat.key) for stat in store.backend.list("refs/")}
    first = store.refs.record("main", 1)
    store.refs.fence("main", store.begin("main").generation)
    store.move_ref("main", parent, root)
    store.move_ref("main", None, parent)
    with pytest.raises(ConflictError):
        store.refs.move("main", root, first)
    now = {stat.key: store.backend.get(stat.key) for stat in store.backend.list("refs/")}
    assert len(now) == len(kept) + 3
    assert kept.items() <= now.items()
    assert store.refs.findings("main")[0] == []


def test_a_part_of_a_root_is_verified_as_far_as_its_pins_go(store: Store, root: Digest) -> None:
    """F-111, F-144, F-145."""
    far = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    ckptstore.pull(store, far, root, shards=[1])
    assert far.scope(root) == (1,)
    assert far.refs.names() == []
    assert far.verify(root, far.scope(root)).findings == ()
    assert {finding.place.shard for finding in far.verify(root).findings} == {0}
    ckptstore.pull(store, far, root, shards=[0])
    assert far.scope(root) == (0, 1)
    assert far.verify(root).findings == ()


def test_no_more_is_read_than_was_promised(store: Store, root: Digest) -> None:
    """F-17, F-152: files that grew to megabytes under their keys cost one byte more each."""
    sizes = dict(store.closure(root).sizes())
    objects = [key for key in sizes if key.startswith("objects/")]
    for key in objects:
        store.backend.replace(key, store.backend.get(key) + bytes(2**22))
    counting = CountingBackend(store.backend)
    found = Store(counting).verify(root).findings
    assert {(finding.kind, finding.key) for finding in found if finding.place.chunk is None} <= {
        (Kind.TRUNCATED, key) for key in objects
    }
    assert {finding.key for finding in found} == set(objects)
    for key in objects:
        tally = counting.by_key("get", "readback", prefix=key)[key]
        assert tally.bytes <= tally.calls * (sizes[key] + 1)
    store.backend.replace(document_key(root), bytes(2**23))
    counting.reset()
    assert Store(counting).verify(root).findings
    assert counting.total("get", "readback", prefix="documents/").bytes <= 4 * 2**20 + 1
