"""Documents that contradict each other, with every digest recomputed: verify finds it, and no reader is led astray."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.closure import read_closure
from ckptstore.errors import CkptStoreError, CorruptError, MalformedError, RefusedError
from ckptstore.export import export_weights
from ckptstore.findings import Finding, Kind
from ckptstore.format.digest import Digest
from ckptstore.format.keys import ref_key
from ckptstore.format.page import WEIGHT, Entry, TensorEntry, encode_page, make_tensor_entry
from ckptstore.format.records import RefRecord
from ckptstore.format.shard import PageRef, RolePacks, Shard
from ckptstore.format.state import shard_leaves, state_root
from ckptstore.store import Store
from tests.support.training import commit_state


def forged(store: Store, root: Digest, entries: list[Entry], packs: tuple[RolePacks, ...]) -> Digest:
    """The root of a checkpoint like ``root`` with one shard of one page of ``entries``, which nobody checked."""
    checkpoint = store.checkpoint(root)
    shard = store.closure(root).shards[0].shard
    page = PageRef(store.objects.put_document(encode_page(entries)), len(entries), entries[0].role, entries[0].path)
    changed = replace(shard, pages=(page,), packs=packs)
    leaves = shard_leaves(entries, shard.optimizers, shard.aliases)
    document = replace(
        checkpoint, shards=(store.objects.put_document(changed.encode()),), state_root=state_root(leaves)
    )
    return store.objects.put_document(document.encode())


def weight(path: str, length: int, chunk: Digest) -> TensorEntry:
    entry = make_tensor_entry(path, WEIGHT, "u8", (length,), [chunk], None)
    assert isinstance(entry, TensorEntry)
    return entry


class Bytes(nn.Module):
    def __init__(self, **lengths: int) -> None:
        super().__init__()
        for name, length in lengths.items():
            self.register_buffer(name, torch.zeros(length, dtype=torch.uint8))


@pytest.fixture
def root(store: Store) -> Digest:
    return commit_state(store, "main", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)


def test_one_chunk_under_tensors_of_two_lengths_is_refused_by_every_reader(
    store: Store, root: Digest, tmp_path: Path
) -> None:
    """F-33, F-39: its pack holds it, and its digest is right, and yet it is no chunk of the longer tensor."""
    chunk = store.objects.put_object(b"a" * 100)
    made = forged(store, root, [weight("a", 100, chunk), weight("b", 200, chunk)], (RolePacks(WEIGHT, (chunk,)),))
    (finding,) = store.verify(made).findings
    assert (finding.kind, finding.place.path) == (Kind.INCONSISTENT, "b")
    assert (finding.expected, finding.actual) == ("100 bytes", "200 bytes")
    with pytest.raises(CorruptError, match="different lengths"):
        export_weights(store, made, tmp_path / "exported")
    with pytest.raises(CkptStoreError):
        store.restore(made, ckptstore.TrainingState(model=Bytes(a=100, b=200)))
    left = forged(store, root, [weight("a", 100, chunk), weight("b", 200, Digest.of(b"b" * 200))], ())
    (change,) = (change for change in store.diff(left, made).tensors if change.path == "b")
    assert change.status == "unreadable"
    assert list(tmp_path.iterdir()) == []


def test_a_pack_that_two_roles_read_in_two_ways_is_checked_in_both(store: Store, root: Digest) -> None:
    """F-39: where chunks lie follows for each role from its own entries."""
    pack = store.objects.put_object(b"b" * 100 + b"a" * 100)
    chunks = {name: Digest.of(name.encode() * 100) for name in "ab"}
    other = ("optim", "optimizer", "key")
    entries: list[Entry] = [
        replace(weight(path, 100, chunks[name]), role=other) for path, name in (("1", "b"), ("2", "a"))
    ]
    entries += [weight(path, 100, chunks[name]) for path, name in (("1", "a"), ("2", "b"))]
    packs = (RolePacks(other, (pack,)), RolePacks(WEIGHT, (pack,)))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with_optimizer = commit_state(store, "with", [ckptstore.TrainingState(model=model, optimizer=optimizer)], 1)
    found = store.verify(forged(store, with_optimizer, entries, packs)).findings
    assert {(finding.kind, finding.place.role, finding.place.path) for finding in found} == {
        (Kind.CORRUPT, WEIGHT, "1"),
        (Kind.CORRUPT, WEIGHT, "2"),
    }


def test_a_planted_last_generation_hides_nothing_and_costs_nothing(store: Store, root: Digest) -> None:
    """A gap is one finding however long it is, and the ref says that it has come to its end."""
    last = 2**53 - 1
    planted = RefRecord(last, Digest.of(b"any"), root, secrets.token_hex(16))
    store.backend.create(ref_key("main", last), planted.encode())
    found, read = store.refs.findings("main")
    assert [(finding.kind, finding.place.part) for finding in found] == [
        (Kind.MISSING, f"ref main generation 2 to {last - 1}")
    ]
    assert read == len(store.backend.get(ref_key("main", 1))) + len(planted.encode())
    assert store.verify("main").exit_code == 4
    with pytest.raises(RefusedError, match="the last that there can be"):
        store.move_ref("main", None, root)
    with pytest.raises(CkptStoreError, match=f"{last - 1:016d}"):
        list(store.refs.log("main"))


def test_every_gap_of_a_ref_is_found(store: Store, root: Digest) -> None:
    for _ in range(4):
        store.move_ref("main", None, root)
        store.move_ref("main", root, None)
    for generation in (1, 2, 5, 7):
        store.backend.delete(ref_key("main", generation))
    found, _ = store.refs.findings("main")
    assert [finding.place.part for finding in found] == [
        "ref main generation 7",
        "ref main generation 5",
        "ref main generation 1 to 2",
    ]


# -- documents named a thousand times ----------------------------------------------------------------------------------

TIMES = 2000


def one_page_many_times(store: Store, root: Digest) -> Digest:
    """A checkpoint whose shard names one page again and again, each time as another one."""
    shard = store.closure(root).shards[0].shard
    entries = [weight(f"{number:04d}", 100, Digest.of(b"any")) for number in range(500)]
    page = store.objects.put_document(encode_page(entries))
    pages = tuple(PageRef(page, len(entries), WEIGHT, f"{number:06d}") for number in range(TIMES))
    return one_shard(store, root, replace(shard, pages=pages, packs=()))


def one_shard(store: Store, root: Digest, shard: Shard, times: int = 1) -> Digest:
    digest = store.objects.put_document(shard.encode())
    return store.objects.put_document(replace(store.checkpoint(root), shards=(digest,) * times).encode())


def one_shard_many_times(store: Store, root: Digest) -> Digest:
    entries = store.closure(root).shards[0].shard
    return one_shard(store, root, entries, TIMES)


@pytest.mark.parametrize("forge", [one_page_many_times, one_shard_many_times])
def test_what_a_document_names_many_times_is_taken_in_once_at_most(
    store: Store, root: Digest, forge: Callable[[Store, Digest], Digest]
) -> None:
    """Ten bytes in a document must not cost a megabyte of memory."""
    made = forge(store, root)
    found: list[Finding] = []
    closure = read_closure(store.objects, made, report=found.append)
    assert len(found) == TIMES
    assert {finding.kind for finding in found} == {Kind.INCONSISTENT}
    assert sum(len(view.entries) for view in closure.shards.values()) == 0
    assert sum(len(need.places) + len(need.slots) for need in closure.objects.values()) == 0
    difference = store.diff(root, made)
    assert len(difference.findings) == TIMES
    assert difference.exit_code == 3
    with pytest.raises((CorruptError, MalformedError)):
        store.closure(made)


@pytest.mark.parametrize("forge", [one_page_many_times, one_shard_many_times])
def test_the_catalogue_takes_a_forged_document_in_once_at_most(
    disk_store: Store, forge: Callable[[Store, Digest], Digest]
) -> None:
    root = commit_state(disk_store, "main", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)
    disk_store.move_ref("main", forge(disk_store, root), root)
    with disk_store.catalogue() as catalogue:
        counts = catalogue.rebuild()
    assert counts["tensors"] == 2
    assert counts["shard_pages"] <= 1
