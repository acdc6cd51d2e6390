"""Repair gets back what is damaged or missing, from whoever has it, and believes nobody (B066).

Public sources: treeverse/dvc#7268, #5502, #10498.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.backends.counting import CountingBackend
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.errors import BackendError, CorruptError, NotFoundError
from ckptstore.findings import Kind
from ckptstore.format import values
from ckptstore.format.keys import document_key
from ckptstore.repairs.repair import repair
from ckptstore.store import Store
from tests.support.backends import quarantined_files, run_without_privilege
from tests.support.damages import World, clear, damage_all, distant, flip, kinds, shard_states, sizes, write
from tests.support.faulty import FaultyBackend
from tests.support.invariants import broken, inodes, settled
from tests.support.training import commit_state

# -- what heals -------------------------------------------------------------------------------------------------------


def test_every_key_of_a_checkpoint_comes_back_from_another_store(world: World) -> None:
    """F-170. Half of them damaged, half of them gone; documents say what else is needed, so they heal first."""
    keys = sizes(world.open(), world.second)
    bad = {}
    for number, key in enumerate(sorted(keys)):
        if number % 2:
            bad[key] = flip(world.file(key), keys[key] // 2)
        else:
            clear(world.file(key))
    done = repair(world.open(), world.second, [world.open("far")])
    assert (done.ok, done.exit_code) == (True, 0)
    assert {item.key for item in done.healed} == set(keys)
    assert {item.key: item.was for item in done.healed} == {
        key: Kind.CORRUPT if key in bad else Kind.MISSING for key in keys
    }
    assert {item.source for item in done.healed} == {world.open("far").url}
    assert world.open().verify("main").ok
    backend = world.open().backend
    assert isinstance(backend, DirectoryBackend)
    assert {key: quarantined_files(backend, key) for key in bad} == {key: [data] for key, data in bad.items()}
    assert broken(world.near) == []


def test_a_store_of_which_only_the_root_is_known_is_filled_from_nothing(world: World, tmp_path: Path) -> None:
    """F-172. What of its history is not there is missed, and not given up."""
    new = ckptstore.open(tmp_path / "new", create=True)
    assert not repair(new, world.second).ok
    done = repair(new, world.second, [world.open("far")])
    assert len(done.healed) == len(sizes(world.open("far"), world.second)) + 1  # and the ancestor's document
    assert kinds(done) == {Kind.ANCESTOR}  # whose closure nobody has given up
    assert not list(new.backend.list("retired/"))
    assert "ckpt repair" in done.findings[0].message
    assert repair(new, world.first, [world.open()]).ok
    assert repair(new, world.second).ok
    assert new.verify(world.second).ok


def test_nothing_that_is_good_is_transferred_or_replaced(world: World) -> None:
    store = world.open()
    key = world.kinds()["chunk"][0]
    flip(world.file(key))
    before = inodes(world.near)
    near, far = CountingBackend(store.backend), CountingBackend(world.open("far").backend)
    assert repair(Store(near), world.second, [Store(far)]).ok
    assert set(far.by_key("get", "readback")) == {key}
    assert set(near.by_key("replace")) == {key}
    assert near.total("create", prefix="objects/").bytes == near.total("create", prefix="documents/").bytes == 0
    assert {k for k, inode in inodes(world.near).items() if before[k] != inode} == {key}


def test_a_repair_of_what_is_whole_reads_it_and_says_so(world: World) -> None:
    done = repair(world.open(), world.second)
    keys = sizes(world.open(), world.second)
    assert (done.ok, done.healed, done.notes) == (True, (), ())
    assert done.bytes_read == sum(keys.values())
    assert done.documents + done.objects == len(keys)


def test_a_repair_leaves_a_receipt_of_what_came_from_where(world: World) -> None:
    """F-106."""
    key = world.kinds()["page"][0]
    clear(world.file(key))
    store = world.open()
    done = repair(store, world.second, [world.open("far")])
    assert done.receipt in store.receipts(world.second)
    assert done.receipt is not None
    assert (done.receipt.operation, done.receipt.exceptions) == ("repair", ())
    assert done.receipt.closure == store.verify(world.second).closure
    told = values.plain_from_json(done.receipt.details)
    assert isinstance(told, dict)
    assert told["healed"] == [[key, "missing", world.open("far").url]]
    assert ckptstore.ledger(store, [world.second]).findings == ()


def test_a_receipt_of_a_repair_that_left_something_covers_nothing(world: World) -> None:
    key = world.kinds()["chunk"][0]
    clear(world.file(key))
    done = repair(world.open(), world.second)
    assert done.exit_code == 4
    assert done.receipt is not None
    assert done.receipt.closure is None
    assert key in "".join(done.receipt.exceptions)


def test_documents_of_ancestors_come_back(world: World) -> None:
    flip(world.file(document_key(world.first)))
    done = repair(world.open(), world.second, [world.open("far")])
    assert done.ok
    assert [item.key for item in done.healed] == [document_key(world.first)]
    assert world.open().verify("main").ok


def test_a_partial_store_is_repaired_as_far_as_it_is_pinned(world: World, tmp_path: Path) -> None:
    """F-145."""
    part = ckptstore.open(tmp_path / "part", create=True)
    ckptstore.pull(world.open("far"), part, world.second, shards=[1])
    keys = sizes(world.open(), world.second)
    mine = {stat.key for stat in part.backend.list("") if stat.key in keys}
    key = document_key(world.open().checkpoint(world.second).shards[1])
    flip(tmp_path / "part" / key)
    done = repair(ckptstore.open(part.url), world.second, [world.open("far")])
    assert (done.ok, [item.key for item in done.healed]) == (True, [key])
    assert {stat.key for stat in part.backend.list("") if stat.key in keys} == mine


# -- what is not touched ----------------------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing_and_says_what_a_repair_would_do(world: World) -> None:
    for kind in ("checkpoint", "page", "chunk", "pack", "tree", "receipt", "pin", "retirement", "ref, earlier"):
        flip(world.file(KEYS[kind](world)))
    before = {path: path.lstat().st_mtime_ns for path in world.near.rglob("*")}
    planned = repair(world.open(), "main", [world.open("far"), world.open("copy")], dry_run=True)
    assert {path: path.lstat().st_mtime_ns for path in world.near.rglob("*")} == before
    assert (planned.ok, planned.receipt) == (True, None)
    done = repair(world.open(), "main", [world.open("far"), world.open("copy")])
    assert {(item.key, item.was, item.source) for item in planned.healed} == {
        (item.key, item.was, item.source) for item in done.healed
    }


KEYS: dict[str, Callable[[World], str]] = {
    kind: (lambda world, kind=kind: _sound(world).kinds()[kind][0])  # type: ignore[misc]
    for kind in ("checkpoint", "page", "chunk", "pack", "tree", "receipt", "pin", "retirement", "ref, earlier")
}


def _sound(world: World) -> World:
    """The same keys as its store, in the copy that nobody damaged."""

    class Sound(World):
        def open(self, name: str = "near") -> Store:
            return super().open("copy" if name == "near" else name)

    return Sound(world.path, world.first, world.second, world.receipt)


def test_what_no_copy_can_make_right_stays_a_finding(world: World) -> None:
    """A checkpoint that contradicts itself does so in every copy."""
    store = world.open()
    checkpoint = store.checkpoint(world.second)
    forged = replace(checkpoint, state_root=checkpoint.rng_root)
    root = store.objects.put_document(forged.encode())
    done = repair(store, root, [world.open("far")])
    assert (kinds(done), done.exit_code, done.healed) == ({Kind.INCONSISTENT}, 3, ())


def test_a_device_that_changes_what_is_written_is_found_out(world: World) -> None:
    key = world.kinds()["chunk"][0]
    clear(world.file(key))
    bad = FaultyBackend(world.open().backend)
    bad.flip_bit(key)
    done = repair(Store(bad), world.second, [world.open("far")])
    assert done.exit_code == 3
    assert "good bytes were written, and these came back" in done.findings[0].message
    assert done.healed == ()


@pytest.mark.parametrize(("number", "heals"), [(errno.EIO, True), (errno.EACCES, False)])
def test_bytes_that_the_medium_lost_are_replaced_and_bytes_that_are_only_out_of_reach_are_not(
    world: World, number: int, heals: bool
) -> None:
    key = world.kinds()["chunk"][0]
    faulty = FaultyBackend(world.open().backend)

    def fail(_key: str) -> None:
        if not replaced:
            raise BackendError(f"reading key {key}", os.strerror(number)) from OSError(number, os.strerror(number))

    replaced: list[str] = []
    for operation in ("get", "readback"):
        faulty.before(operation, fail, prefix=key)
    faulty.after("replace", replaced.append, prefix=key)
    done = repair(Store(faulty), world.second, [world.open("far")])
    assert (done.ok, bool(replaced)) == (heals, heals)
    if not heals:
        assert done.exit_code == 7
        assert "it was left as it is" in done.findings[0].message


@pytest.mark.parametrize(
    ("first", "step"),
    [(2, 6), (5, 6), *(pytest.param(first, 6, marks=pytest.mark.deep) for first in (1, 3, 4, 6))],
)
def test_a_repair_that_ends_anywhere_is_continued_and_leaves_no_document_before_what_it_needs(
    world: World, tmp_path: Path, first: int, step: int
) -> None:
    """F-122. Cut off at one write after the other, before it takes effect or after, while a store is filled from
    nothing."""
    for number in range(first, 200, step):
        place = tmp_path / f"new {number}"
        faulty = FaultyBackend(ckptstore.open(place, create=True).backend)
        faulty.fail("create", KeyboardInterrupt(), nth=(number + 1) // 2, took_effect=number % 2 == 0)
        try:
            repair(Store(faulty), world.first, [world.open("copy")])
        except KeyboardInterrupt:
            assert broken(place) == []
            assert repair(ckptstore.open(place), world.first, [world.open("copy")]).ok
            assert ckptstore.open(place).verify(world.first).ok
        else:
            break
        shutil.rmtree(place)
    assert number > 2 * len(sizes(world.open(), world.first))


def test_a_repair_holds_a_lease_and_a_dry_run_none(world: World) -> None:
    """F-140."""
    flip(world.file(world.kinds()["chunk"][0]))
    near = CountingBackend(world.open().backend)
    repair(Store(near), world.second, [world.open("far")], dry_run=True)
    assert near.total("create", "replace", "delete").calls == 0
    faulty = FaultyBackend(near)
    held: list[int] = []
    faulty.before("replace", lambda _: held.append(len(list(near.list("leases/")))))
    assert repair(Store(faulty), world.second, [world.open("far")]).ok
    assert held == [2]  # and one that somebody left behind
    assert len(list(near.list("leases/"))) == 1


UNPRIVILEGED = """
import sys
import ckptstore
from ckptstore.repairs.repair import repair
near, far, root = sys.argv[1:]
done = repair(ckptstore.open(near), ckptstore.Digest.parse(root), [ckptstore.open(far)])
print(done.exit_code, {finding.kind.value for finding in done.findings}, len(done.healed))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="drops what makes root pass over modes")
def test_a_file_that_may_not_be_read_is_left_as_it_is(world: World) -> None:
    path = world.file(world.kinds()["chunk"][0])
    path.chmod(0)
    before = path.stat()
    done = run_without_privilege(UNPRIVILEGED, str(world.near), str(world.far), world.second.hex)
    assert (done.stdout, done.stderr) == ("7 {'unreadable'} 0\n", "")
    assert path.stat() == before


def test_what_was_healed_before_an_interruption_is_not_healed_again(world: World) -> None:
    keys = [key for key in sizes(world.open(), world.second) if key.startswith("objects/")]
    for key in keys:
        flip(world.file(key))
    faulty = FaultyBackend(world.open().backend)
    faulty.fail("replace", KeyboardInterrupt(), nth=3)
    with pytest.raises(KeyboardInterrupt):
        repair(Store(faulty), world.second, [world.open("far")])
    done = repair(world.open(), world.second, [world.open("far")])
    assert done.ok
    assert 0 < len(done.healed) <= len(keys) - 2
    backend = world.open().backend
    assert isinstance(backend, DirectoryBackend)
    assert [len(quarantined_files(backend, key)) for key in keys] == [1] * len(keys)


def test_a_link_in_the_place_of_a_folder_stops_nothing_else(world: World, tmp_path: Path) -> None:
    """Nothing is written by way of it; the rest heals."""
    key, other = list(world.open().closure(world.second).objects)[:2]
    folder = world.file(key).parent
    assert folder != world.file(other).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    clear(world.file(other))
    done = repair(world.open(), world.second, [world.open("far")])
    assert other in {item.key for item in done.healed}
    assert done.exit_code == 3
    assert all("move it out of the store" in finding.message for finding in done.findings if finding.key == key)


def test_a_repair_while_others_save_and_repair_harms_nobody(world: World) -> None:
    key = world.kinds()["chunk"][0]
    bad = flip(world.file(key))
    near = FaultyBackend(world.open().backend)
    near.before("replace", lambda _: repair(world.open(), world.second, [world.open("far")]), nth=1, prefix=key)
    assert repair(Store(near), world.second, [world.open("far")]).ok
    assert world.open().verify("main").ok
    backend = world.open().backend
    assert isinstance(backend, DirectoryBackend)
    assert bad in quarantined_files(backend, key)


# -- over a network ---------------------------------------------------------------------------------------------------


def test_a_store_behind_a_network_is_repaired_from_a_directory_and_the_other_way_round(world: World) -> None:
    far = distant(world)
    keys = list(sizes(far, world.second))
    damage_all(far, keys)
    done = repair(Store(far.backend), world.second, [world.open("far")])
    assert done.ok
    assert {item.key for item in done.healed} == set(keys)
    assert far.verify(world.second).ok
    for key in keys:
        flip(world.file(key))
    assert repair(world.open(), world.second, [far]).ok


def test_old_bytes_that_a_copy_shows_after_a_repair_are_given_time(world: World) -> None:
    store = distant(world)
    key = world.kinds()["chunk"][0]
    damage_all(store, [key])
    faulty = FaultyBackend(store.backend)
    bad = store.backend.get(key)
    stale = {"left": 0}

    class Lagging(FaultyBackend):
        def readback(self, wanted: str, length: int | None = None):  # type: ignore[no-untyped-def]
            data, method = super().readback(wanted, length)
            if wanted == key and stale["left"]:
                stale["left"] -= 1
                return bad, method
            return data, method

    lagging = Lagging(faulty)
    lagging.after("replace", lambda _: stale.update(left=4), prefix=key)
    assert repair(Store(lagging), world.second, [world.open("far")]).ok


# -- writers ----------------------------------------------------------------------------------------------------------

SPOILS: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path),
    "emptied": lambda path: write(path, b""),
    "pipe": lambda path: (clear(path), os.mkfifo(path)),
    "folder": lambda path: (clear(path), path.mkdir()),
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how in ("flipped", "pipe") else pytest.mark.deep) for how in SPOILS]
)
def test_no_writer_takes_a_damaged_key_for_one_that_is_there(world: World, tmp_path: Path, how: str) -> None:
    """F-121. The same training saved again, its files stored again, pushed and pulled: every object and document that
    they write goes to the quarantine and is written again from good bytes."""
    again, copied = tmp_path / "again", tmp_path / "copied"
    build_again = ckptstore.open(again, create=True)
    ckptstore.push(world.open(), build_again, world.second)
    ckptstore.pull(world.open(), ckptstore.open(copied, create=True), world.second)
    keys = sizes(world.open(), world.second)

    def spoil(path: Path) -> None:
        for key in keys:
            SPOILS[how](path / key)

    spoil(again)
    assert ckptstore.push(world.open(), ckptstore.open(again), world.second).repaired_keys == len(keys)
    spoil(copied)
    assert ckptstore.pull(world.open(), ckptstore.open(copied), world.second).repaired_keys == len(keys)
    for place in (again, copied):
        assert ckptstore.open(place).verify(world.second).ok
    spoil(again)
    rebuilt = ckptstore.open(again)
    store_again(world, rebuilt)
    assert set(settled(rebuilt)) >= set(keys)
    assert rebuilt.verify(world.second).ok
    backend = rebuilt.backend
    assert isinstance(backend, DirectoryBackend)
    assert all(list((again / "quarantine").glob(f"{key.replace('/', '+')}.*")) for key in keys)


def store_again(world: World, store: Store) -> None:
    """What was saved as the second checkpoint, saved once more into another store."""
    checkpoint = world.open().checkpoint(world.second)
    assert checkpoint.run is not None
    folders = world.path
    for name, tree in zip(("plan", "files"), trees(world), strict=True):
        shutil.rmtree(folders / f"{name} again", ignore_errors=True)
        world.open().get_tree(tree, folders / f"{name} again")
    plan, files = (store.put_tree(folders / f"{name} again") for name in ("plan", "files"))
    run = store.put_preparation(plan, files, files)
    assert run == checkpoint.run
    store.refs.move("main", checkpoint.parent, None) if store.head("main") is None else None
    attempt = store.begin("main")
    world.open().restore(world.second, state := shard_states(0.0)[0], shard=0)
    receipts = []
    for index, other in enumerate([state, shard_states(0.0)[1]]):
        world.open().restore(world.second, other, shard=index)
        receipts.append(store.save_shard(other, attempt, step=2, index=index, count=2, run=run, files=files))
    assert store.commit(attempt, receipts) == world.second


def trees(world: World) -> tuple[Digest, Digest]:
    store = world.open()
    checkpoint = store.checkpoint(world.second)
    assert checkpoint.run is not None
    preparation = store.preparation(checkpoint.run)
    return preparation.plan, preparation.inputs


def test_what_a_repair_cannot_heal_is_written_again_by_the_next_save_of_the_same_process(tmp_path: Path) -> None:
    """F-121. It wrote those bytes itself, and knows now that they are not there any more."""
    store = ckptstore.open(tmp_path / "near", create=True)
    first = commit_state(store, "main", shard_states(1.0), 1)
    keys = [key for key in sizes(store, first) if key.startswith("objects/")]
    for key in keys:
        flip(tmp_path / "near" / key)
    assert {finding.key for finding in repair(store, first).findings} == set(keys)
    commit_state(store, "main", shard_states(1.0), 2)
    assert ckptstore.open(store.url).verify(first).ok


def test_the_next_step_is_named_where_damage_is_met(world: World, tmp_path: Path) -> None:
    key = world.kinds()["chunk"][0]
    flip(world.file(key))
    with pytest.raises(CorruptError, match=f"ckpt repair {world.second.short}"):
        ckptstore.push(world.open(), ckptstore.open(tmp_path / "new", create=True), world.second)
    with pytest.raises(CorruptError, match=f"ckpt repair {world.second.short}"):
        world.open().restore(world.second, shard_states()[0], shard=0)
    clear(world.file(document_key(world.second)))
    with pytest.raises(NotFoundError, match=f"ckpt repair {world.second}"):
        world.open().closure(world.second)
