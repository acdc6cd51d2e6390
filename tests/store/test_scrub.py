"""A scrub reads a whole store, oldest readings first, as far as a budget goes, and goes on where the last one ended."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.collection.collect import collect
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.errors import BackendError
from ckptstore.findings import Kind
from ckptstore.format.keys import document_key, object_key, pin_key, retired_key
from ckptstore.format.records import Pin, Retired
from ckptstore.readbacks.scrub import scrub
from ckptstore.store import Store
from tests.support.distant import Distant, made
from tests.support.faulty import FaultyBackend
from tests.support.lines import line
from tests.support.pairs import states
from tests.support.scrubbing import counted, found, model, notes, path_of, put, read_by, spoil, steps, stored
from tests.support.training import commit_state

# -- what is read ------------------------------------------------------------------------------------------------------


def test_every_key_is_read_once_whether_anything_leads_to_it_or_not(disk_store: Store) -> None:
    roots = steps(disk_store, 2)
    lost = disk_store.objects.put_object(b"nobody leads here" * 100)
    disk_store.backend.create(pin_key(roots[0], "1" * 32), Pin(None, "for ever").encode())
    disk_store.backend.create(retired_key(Digest.of(b"old")), Retired("gone").encode())
    sizes = stored(disk_store)
    counting, reader = counted(disk_store)
    done = scrub(reader)
    read = counting.by_key("readback")
    assert {key: tally.bytes for key, tally in read.items()} == sizes
    assert {tally.calls for tally in read.values()} == {1}
    assert (done.read_keys, done.read_bytes) == (len(sizes), sum(sizes.values()))
    assert (done.keys, done.size) == (len(sizes), sum(sizes.values()))
    assert (done.damaged, done.exit_code, done.ended_by) == ((), 0, "")
    assert (done.unreferenced_keys, done.unreferenced_bytes) == (1, sizes[object_key(lost)])
    assert (done.recent_keys, done.left_keys, done.unknown_keys, done.failures) == (0, 0, 0, ())


def test_what_is_abandoned_retired_or_partial_is_told_apart_from_what_is_missing(
    disk_store: Store, store: Store
) -> None:
    """A line of parents that is retired, shards that are not here on purpose, a checkpoint that a ref named before."""
    roots = steps(store, 3)
    ckptstore.push(store, disk_store, roots[1], ref="main")
    commit_state(store, "pair", states(), 1)
    pair = store.resolve("pair")
    ckptstore.push(store, disk_store, pair, shards=[1])
    done = scrub(disk_store)
    assert done.damaged == ()
    assert done.unreferenced_keys == 0
    commit_state(store, "other", [ckptstore.TrainingState(model=model(9))], 1)
    store.move_ref("main", roots[0], roots[2])
    assert scrub(store).unreferenced_keys == 0, "what a ref named before is led to, by its log"
    store.backend.delete(document_key(roots[2]))
    again = scrub(store)
    assert again.damaged == ()
    assert again.unreferenced_keys is not None
    assert again.unreferenced_keys > 0


def test_after_a_collection_nothing_is_missing(store: Store) -> None:
    """What a policy let go is named by the records of the ref for ever, and by documents that stay as history."""
    roots = line(store, [1, 2, 3])
    collected = collect(store, Policy((KeepLast(1),)), delete=True)
    assert len(collected.plan.retired) == 2
    done = scrub(store)
    assert (done.damaged, done.exit_code, done.unreferenced_keys) == ((), 0, 0)
    store.backend.delete(retired_key(roots[0]))
    assert {finding.kind for finding in scrub(store).findings} == {Kind.MISSING}


def test_a_part_needs_no_ancestors_and_a_pinned_tree_is_led_to(disk_store: Store, store: Store, tmp_path: Path) -> None:
    for step in (1, 2):
        commit_state(store, "pair", states(float(step)), step)
    ckptstore.push(store, disk_store, store.resolve("pair"), shards=[0])
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(b"abc")
    tree = disk_store.put_tree(tmp_path / "files")
    assert scrub(disk_store).unreferenced_keys == 2
    disk_store.backend.create(pin_key(tree, "1" * 32), Pin(None, "a data set").encode())
    done = scrub(disk_store)
    assert (done.damaged, done.unreferenced_keys) == ((), 0)
    chunk = object_key(disk_store.tree(tree).files[0].chunks[0])
    disk_store.backend.delete(chunk)
    assert found(scrub(disk_store)) == {chunk: Kind.MISSING}


def test_what_a_collection_takes_meanwhile_is_not_missing(store: Store) -> None:
    roots = steps(store, 3)
    faulty = FaultyBackend(store.backend)

    def collect(_key: str) -> None:
        store.backend.create(retired_key(roots[0]), Retired("too old").encode())
        keep = {key for root in roots[1:] for key, _ in store.closure(root).sizes()}
        for key, _ in store.closure(roots[0]).sizes():
            if key not in keep and key != document_key(roots[0]):
                store.backend.delete(key)

    faulty.before("readback", collect, nth=2)
    done = scrub(Store(faulty))
    assert done.damaged == ()
    assert scrub(store).damaged == ()
    store.backend.delete(retired_key(roots[0]))
    assert {finding.kind for finding in scrub(store).findings} == {Kind.MISSING}


def test_what_is_saved_meanwhile_is_found(store: Store) -> None:
    steps(store, 2)
    faulty = FaultyBackend(store.backend)
    faulty.before(
        "readback", lambda _: commit_state(store, "main", [ckptstore.TrainingState(model=model(3))], 3), nth=2
    )
    done = scrub(Store(faulty))
    assert done.damaged == ()
    assert done.unreferenced_keys == 0


def test_what_a_worker_saved_and_nobody_committed_is_counted(store: Store) -> None:
    steps(store, 1)
    attempt = store.begin("main")
    store.save_shard(ckptstore.TrainingState(model=model(7)), attempt, step=2)
    done = scrub(store)
    assert done.unreferenced_keys is not None
    assert done.unreferenced_keys >= 3
    assert done.damaged == ()


def test_a_key_of_an_unknown_kind_is_counted_and_not_read(store: Store) -> None:
    steps(store, 1)
    store.backend.create("encoded/ab/" + "ab" * 32, b"?")
    store.backend.create("later/thing", b"?")
    assert (scrub(store).unknown_keys, read_by(scrub, store).get("later/thing")) == (2, None)


# -- what is found -----------------------------------------------------------------------------------------------------


def test_damage_of_every_kind_is_found_and_does_not_end_it(disk_store: Store) -> None:
    """Flipped, truncated, emptied, missing, grown, foreign: each is named, and all the rest is read."""
    roots = steps(disk_store, 4)
    disk_store.backend.create(pin_key(roots[0], "1" * 32), Pin(None, "for ever").encode())
    put(disk_store, disk_store.verify(roots[0]).receipt(disk_store.url))
    closures = [disk_store.closure(root).objects for root in roots]
    own = [min(c.keys() - {k for o in closures if o is not c for k in o}) for c in closures]
    page = document_key(disk_store.closure(roots[1]).shards[0].shard.pages[0].digest)
    receipt = next(s.key for s in disk_store.backend.list(f"receipts/{roots[0].hex}/"))
    spoil(path_of(disk_store, own[0]))
    path_of(disk_store, own[1]).chmod(0o644)
    path_of(disk_store, own[1]).write_bytes(b"")
    path_of(disk_store, own[2]).unlink()
    path_of(disk_store, own[3]).chmod(0o644)
    with path_of(disk_store, own[3]).open("ab") as file:
        file.write(b"more")
    keys = [pin_key(roots[0], "1" * 32), receipt, "refs/main/0000000000000002", page]
    for key in keys:
        spoil(path_of(disk_store, key))
    done = scrub(ckptstore.open(disk_store.url))
    expected = {own[0]: Kind.CORRUPT, own[1]: Kind.CORRUPT, own[2]: Kind.MISSING, own[3]: Kind.CORRUPT}
    kinds = found(done)
    assert {key: kinds[key] for key in expected} == expected
    assert kinds.keys() == expected.keys() | set(keys)
    assert done.exit_code == 3
    assert done.unreferenced_keys is None, "a page that leads on cannot be read"
    assert done.read_keys == len(stored(disk_store))


def test_a_finding_says_what_it_hurts_and_where(disk_store: Store) -> None:
    roots = steps(disk_store, 3)
    closures = [disk_store.closure(root).objects for root in roots]
    shared = [key for key in closures[0] if all(key in closure for closure in closures)]
    whole = next(key for key in shared if not closures[0][key].slots)
    spoil(path_of(disk_store, whole))
    (damage,) = scrub(ckptstore.open(disk_store.url)).damaged
    assert damage.hurts is not None
    assert set(damage.hurts) == set(roots)
    place = damage.finding.place
    assert place.checkpoint in roots
    assert (place.shard, place.role, place.path, place.chunk) == (0, ("weight",), "same.weight", 0)
    assert damage.finding.expected.startswith("b3:")


def test_what_hurts_nobody_is_said_to(store: Store) -> None:
    steps(store, 1)
    lost = object_key(store.objects.put_object(b"nobody leads here" * 100))
    faulty = FaultyBackend(store.backend)
    faulty.flip_bit(lost)
    (damage,) = scrub(Store(faulty)).damaged
    assert (damage.finding.key, damage.hurts) == (lost, ())


def test_a_document_that_is_lost_hurts_its_checkpoint_and_its_ancestors_are_found_still(store: Store) -> None:
    roots = steps(store, 2)
    shard = document_key(store.checkpoint(roots[1]).shards[0])
    store.backend.delete(shard)
    (damage,) = scrub(ckptstore.open(store.url)).damaged
    assert (damage.finding.key, damage.finding.kind, damage.hurts) == (shard, Kind.MISSING, (roots[1],))


def test_what_lies_in_the_way_of_a_listing_does_not_hide_the_rest(disk_store: Store) -> None:
    roots = steps(disk_store, 2)
    keys = sorted(disk_store.closure(roots[1]).objects)
    path_of(disk_store, keys[0]).unlink()
    os.mkfifo(path_of(disk_store, keys[0]))
    counting, reader = counted(disk_store)
    done = scrub(reader)
    assert found(done)[keys[0]] is Kind.CORRUPT
    assert done.exit_code == 3
    others = {key for root in roots for key, _ in disk_store.closure(root).sizes()} - {keys[0]}
    assert others <= counting.by_key("readback").keys()


def test_a_file_that_is_too_large_for_an_object_is_not_read(disk_store: Store) -> None:
    steps(disk_store, 1)
    key = "objects/ab/" + "ab" * 32
    path_of(disk_store, key).parent.mkdir(exist_ok=True)
    with path_of(disk_store, key).open("wb") as file:
        file.truncate(2**34)
    counting, reader = counted(disk_store)
    assert found(scrub(reader)) == {key: Kind.TRUNCATED}
    assert counting.by_key("readback").get(key) is None


def test_links_between_records_of_a_ref_are_checked(store: Store) -> None:
    roots = steps(store, 4)
    record = store.refs.record("main", 2)
    store.backend.delete("refs/main/0000000000000002")
    assert found(scrub(store)) == {"refs/main/0000000000000002": Kind.MISSING}
    forged = replace(record, root=roots[3])
    store.backend.create("refs/main/0000000000000002", forged.encode())
    assert found(scrub(store)) == {"refs/main/0000000000000002": Kind.CORRUPT}


def test_a_disk_that_fails_in_one_place_is_read_on(store: Store) -> None:
    steps(store, 2)
    keys = sorted(stat.key for stat in store.backend.list("objects/"))
    faulty = FaultyBackend(store.backend)
    faulty.fail("readback", BackendError("key", "EIO"), prefix=keys[0])
    done = scrub(Store(faulty))
    assert found(done) == {keys[0]: Kind.UNREADABLE}
    assert done.exit_code == 7
    assert done.read_keys == len(stored(store))


def test_a_network_that_fails_ends_it_and_what_was_read_is_noted() -> None:
    backend = made(Distant())
    store = Store(backend)
    steps(store, 12)
    faulty = FaultyBackend(backend)
    seen = 0

    def fail(_key: str) -> None:
        nonlocal seen
        seen += 1
        if seen > 3:
            raise BackendError("key", "no route to host")

    faulty.before("readback", fail, prefix="objects/")
    with pytest.raises(BackendError, match="in a row"):
        scrub(Store(faulty))
    assert sum(len(note.keys) for note in notes(store)) >= 1
