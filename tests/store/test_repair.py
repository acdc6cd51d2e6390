"""Repair gets back what is damaged or missing, from whoever has it, and believes nobody (B066).

Public sources: treeverse/dvc#7268, #5502, #10498.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import Digest
from ckptstore.backends.counting import CountingBackend
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import BackendError, CorruptError, NotFoundError, RefusedError, UsageError
from ckptstore.findings import Kind
from ckptstore.format import values
from ckptstore.format.keys import document_key, pin_prefix, ref_key, retired_key
from ckptstore.format.records import Pin, RefRecord
from ckptstore.repairs.header import repair_header
from ckptstore.repairs.outcome import Repair
from ckptstore.repairs.reflog import OWN_CHECK
from ckptstore.repairs.repair import LIVE, repair
from ckptstore.store import Store
from tests.support.backends import quarantined_files, run_without_privilege
from tests.support.damages import World, build, clear, opened, shard_states, write
from tests.support.distant import Distant
from tests.support.faulty import FaultyBackend
from tests.support.invariants import broken, inodes, settled
from tests.support.training import commit_state


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(built: World, tmp_path: Path) -> World:
    return opened(built, tmp_path)


def sizes(store: Store, root: Digest) -> dict[str, int]:
    return dict(store.closure(root).sizes())


def flip(path: Path, at: int = 0) -> bytes:
    """Turn over a bit; returns the bad bytes."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    write(path, bytes(data))
    return bytes(data)


def damage_all(store: Store, keys: list[str]) -> None:
    for key in keys:
        data = store.backend.get(key)
        store.backend.replace(key, data[:-1] + bytes([data[-1] ^ 1]))


def kinds(done: Repair) -> set[Kind]:
    return {finding.kind for finding in done.findings}


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


# -- where it comes from ----------------------------------------------------------------------------------------------


def test_sources_are_asked_in_their_order_and_a_liar_is_found_out(world: World) -> None:
    """What one gives that has not the right digest is never stored; the next one is asked."""
    key = world.kinds()["chunk"][0]
    clear(world.file(key))
    liar = FaultyBackend(world.open("far").backend)
    liar.flip_bit(key, 12)
    done = repair(world.open(), world.second, [Store(liar), world.open("copy")])
    assert [item.source for item in done.healed] == [world.open("copy").url]
    assert done.notes == (f"{liar.url}: 1 of the keys asked for is damaged there, too",)
    assert world.open().verify(world.second).ok
    clear(world.file(key))
    assert not repair(world.open(), world.second, [Store(liar)]).ok
    assert not world.file(key).exists()


def test_a_source_that_cannot_be_reached_is_told_once_and_not_asked_again(world: World) -> None:
    for key in sizes(world.open(), world.second):
        clear(world.file(key))
    away = FaultyBackend(Distant())
    asked: list[str] = []

    def fail(key: str) -> None:
        asked.append(key)
        raise BackendError(f"reading key {key}", "no route to host")

    for operation in ("get", "readback", "list", "stat"):
        away.before(operation, fail)
    done = repair(world.open(), world.second, [Store(away), world.open("far")])
    assert done.ok
    assert len(done.notes) == 1
    assert "no route to host" in done.notes[0]
    assert len(asked) == 1


def test_two_partial_sources_make_a_whole(world: World, tmp_path: Path) -> None:
    parts = [ckptstore.open(tmp_path / f"part{shard}", create=True) for shard in (0, 1)]
    for shard, part in enumerate(parts):
        ckptstore.pull(world.open("far"), part, world.second, shards=[shard])
    for key in sizes(world.open(), world.second):
        clear(world.file(key))
    done = repair(world.open(), world.second, parts)
    assert done.ok
    assert {item.source for item in done.healed} == {part.url for part in parts}


def test_remotes_are_asked_after_the_sources_and_only_if_they_may(world: World, tmp_path: Path) -> None:
    store = world.open()
    ckptstore.add_remote(store, "gone", str(tmp_path / "nowhere"), check=False)
    ckptstore.add_remote(store, "vault", str(world.far))
    key = world.kinds()["pack"][0]
    clear(world.file(key))
    assert not repair(world.open(), world.second, remotes=False).ok
    done = repair(world.open(), world.second)
    assert done.ok
    assert [item.source for item in done.healed] == ["remote vault"]
    assert len(done.notes) == 1
    assert done.notes[0].startswith("remote gone: ")


def test_damaged_remotes_do_not_stop_what_sources_can_give(world: World) -> None:
    (world.near / "config.toml").write_text("[remotes\n")
    clear(world.file(world.kinds()["pack"][0]))
    done = repair(world.open(), world.second, [world.open("far")])
    assert done.ok
    assert "config.toml" in done.notes[0]


def test_a_store_is_no_source_of_itself(world: World) -> None:
    with pytest.raises(UsageError, match="is to be repaired"):
        repair(world.open(), world.second, [world.open()])


def test_a_read_only_source_will_do(world: World) -> None:
    class Reading:
        def __init__(self, backend: MemoryBackend | DirectoryBackend) -> None:
            for name in ("url", "traits", "get", "readback", "stat", "present", "list"):
                setattr(self, name, getattr(backend, name))

    key = world.kinds()["chunk"][0]
    clear(world.file(key))
    source = Store(Reading(DirectoryBackend(world.far)))  # type: ignore[arg-type]
    assert repair(world.open(), world.second, [source]).ok


# -- from a live state ------------------------------------------------------------------------------------------------


def live() -> ckptstore.TrainingState:
    """Shard 0 as it was saved last."""
    return shard_states(2.0)[0]


def test_a_live_state_gives_its_tensors_chunk_by_chunk(world: World) -> None:
    closure = world.open().closure(world.second, [0], files=False)
    keys = list(closure.objects)
    assert any(need.slots for need in closure.objects.values())
    for key in keys:
        clear(world.file(key))
    done = repair(world.open(), world.second, state=live())
    assert done.ok
    assert {item.key for item in done.healed} == set(keys)
    assert all(LIVE in item.source for item in done.healed)
    assert world.open().verify(world.second).ok


def test_a_live_state_that_is_the_saved_one_gives_pages_too(world: World) -> None:
    view = world.open().closure(world.second).shards[0]
    keys = [document_key(page.digest) for page in view.shard.pages]
    for key in keys:
        clear(world.file(key))
    assert repair(world.open(), world.second, state=live()).ok
    fresh = world.open()
    shard = document_key(view.digest)
    fresh.restore(world.second, state := shard_states(5.0)[0], shard=0)  # now its generators are the stored ones
    clear(world.file(shard))
    assert repair(world.open(), world.second, state=state).ok
    assert world.open().verify(world.second).ok


def test_a_live_state_that_has_moved_on_gives_only_what_is_the_same(world: World) -> None:
    """Proven by digest: the weight has changed, the norm has not."""
    closure = world.open().closure(world.second, [0], files=False)
    pack = next(key for key, need in closure.objects.items() if need.slots)
    chunk = next(key for key, need in closure.objects.items() if not need.slots)
    for key in (pack, chunk):
        clear(world.file(key))
    moved = shard_states(3.0)[0]
    before = [tensor.clone() for _, tensor in moved.tensors().values()]
    done = repair(world.open(), world.second, state=moved)
    assert [item.key for item in done.healed] == [pack]
    assert {finding.key for finding in done.findings} == {chunk}
    assert all(map(torch.equal, before, [tensor for _, tensor in moved.tensors().values()]))


def test_a_live_state_helps_a_store_behind_a_network(world: World) -> None:
    """Documents are fetched in advance there, before it is known where they belong."""
    store = distant(world)
    view = store.closure(world.second).shards[0]
    for key in (document_key(view.shard.pages[0].digest), next(iter(store.closure(world.second, [0]).objects))):
        store.backend.delete(key)
    done = repair(Store(store.backend), world.second, state=live())
    assert done.ok
    assert all(str(item.place) for item in done.healed)


# -- packs ------------------------------------------------------------------------------------------------------------


def pack_of(world: World, store: Store) -> tuple[str, list[tuple[int, int]]]:
    """A pack with several chunks that is only in the second checkpoint, and where its chunks lie."""
    key = world.kinds()["pack"][0]
    slots = store.closure(world.second).objects[key].slots
    assert len(slots) > 1
    return key, sorted((offset, length) for offset, length, _ in slots)


def test_two_damaged_copies_of_a_pack_make_a_good_one(world: World) -> None:
    key, slots = pack_of(world, world.open())
    flip(world.file(key), slots[0][0])
    flip(world.far / key, slots[-1][0])
    done = repair(world.open(), world.second, [world.open("far")])
    assert done.ok
    assert "what is left of it here" in done.healed[0].source
    assert world.open().verify(world.second).ok


def test_a_cut_pack_gives_the_chunks_that_it_still_has(world: World) -> None:
    key, slots = pack_of(world, world.open())
    write(world.file(key), world.file(key).read_bytes()[: slots[-1][0] + 1])
    write(world.far / key, b"\0" * slots[0][1] + (world.far / key).read_bytes()[slots[0][1] :])
    assert repair(world.open(), world.second, [world.open("far")]).ok


def test_chunks_of_a_pack_come_from_packs_of_other_checkpoints(world: World) -> None:
    """The weight of the second checkpoint is new; what did not change lies in a pack of the first as well."""
    key, slots = pack_of(world, world.open())
    need = world.open().closure(world.second).objects[key]
    first = world.open().closure(world.first)
    shared = {chunk for other in first.objects.values() for _, _, chunk in other.slots}
    spoiled = next(offset for offset, _, chunk in need.slots if chunk in shared)
    flip(world.file(key), spoiled)
    done = repair(world.open(), world.second)
    assert done.ok
    assert "other packs here" in done.healed[0].source
    flip(world.file(key), next(offset for offset, _, chunk in need.slots if chunk not in shared))
    assert not repair(world.open(), world.second).ok
    assert slots


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


def distant(world: World) -> Store:
    """The store, at the other end of a network."""
    backend = Distant()
    store = world.open()
    for stat in store.backend.list(""):
        if not stat.key.startswith("features/"):
            backend.create(stat.key, store.backend.get(stat.key))
    return Store(backend)


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


# -- records ----------------------------------------------------------------------------------------------------------


def log_of(world: World, generations: int = 5) -> Store:
    """The store with a ref of so many generations; its copy has them too."""
    store = world.open()
    for generation in range(generations):
        store.move_ref("log", [world.first, world.second][generation % 2], store.head("log"))
    clear(world.copy)
    shutil.copytree(world.near, world.copy)
    return store


LOST = [[2], [2, 3], [1, 2, 3, 4], [5], [4, 5], [1, 2, 3, 4, 5], [1, 3, 5]]


@pytest.mark.parametrize(
    ("lost", "how"),
    # That the newest is gone is nothing that one could see.
    [(lost, how) for how in ("text", "gone", "pipe") for lost in LOST if how != "gone" or 5 not in lost],
    ids=str,
)
def test_records_of_a_ref_come_back_from_a_copy_of_the_store(world: World, lost: list[int], how: str) -> None:
    """F-171. A record is known by the one after it; the newest by its own check and the one before."""
    store = log_of(world)
    good = {generation: store.backend.get(ref_key("log", generation)) for generation in range(1, 6)}
    for generation in lost:
        path = world.file(ref_key("log", generation))
        clear(path)
        if how == "text":
            path.write_text("nothing")
        elif how == "pipe":
            os.mkfifo(path)
    done = repair(world.open(), "log", [world.open("far"), world.open("copy")])
    assert done.ok, done.findings
    assert {item.key for item in done.healed} == {ref_key("log", generation) for generation in lost}
    assert {g: store.backend.get(ref_key("log", g)) for g in good} == good
    assert world.open().verify("log").ok


def test_one_flipped_bit_of_a_record_is_turned_back_without_any_copy(world: World) -> None:
    """Its own check proves it."""
    data = world.file(ref_key("main", 2)).read_bytes()
    for at in range(0, len(data), 61):
        flip(world.file(ref_key("main", 2)), at)
        done = repair(world.open(), "main")
        assert [(item.key, item.source) for item in done.healed] == [(ref_key("main", 2), OWN_CHECK)]
        assert world.file(ref_key("main", 2)).read_bytes() == data


def test_a_newest_record_of_which_copies_say_different_things_is_not_chosen(world: World, tmp_path: Path) -> None:
    """Each of them went on by itself from the record before."""
    write(world.file(ref_key("main", 2)), b"nothing")
    shutil.copytree(world.copy, tmp_path / "fork")
    backend = DirectoryBackend(tmp_path / "fork")
    first = RefRecord.parse(backend.get(ref_key("main", 1)))
    other = RefRecord(2, Digest.of(first.encode()), world.first, secrets.token_hex(16))
    backend.replace(ref_key("main", 2), other.encode())
    with pytest.raises(CorruptError, match="name the root itself"):
        repair(world.open(), "main", [world.open("copy"), Store(backend)])
    assert world.file(ref_key("main", 2)).read_bytes() == b"nothing"


def test_a_record_of_another_store_takes_no_place(world: World) -> None:
    """A store that was pushed to has a log of its own; its head is only told."""
    write(world.file(ref_key("main", 2)), b"nothing")
    with pytest.raises(CorruptError, match=f"has {world.second} as its main"):
        repair(world.open(), "main", [world.open("far")])
    assert repair(world.open(), world.second).ok  # the root itself needs no ref


def test_a_record_that_does_not_follow_the_one_before_is_put_right(world: World) -> None:
    """Good by itself: the newest of another ref."""
    for key in (ref_key("main", 2), ref_key("main", 1)):
        good = world.file(key).read_bytes()
        write(world.file(key), world.file(key.replace("main", "other")).read_bytes())
        assert not world.open().verify("main").ok
        done = repair(world.open(), "main", [world.open("copy")])
        assert done.ok, done.findings
        assert world.file(key).read_bytes() == good


def test_a_planted_record_of_the_last_generation_costs_no_time(world: World) -> None:
    planted = RefRecord(10**15, Digest.of(b"x"), world.second, "ab" * 16)
    world.open().backend.create(ref_key("main", 10**15), planted.encode())
    done = repair(world.open(), "main", [world.open("copy")])
    assert kinds(done) == {Kind.MISSING}
    assert len(done.findings) == 1


def test_a_pin_comes_back_from_a_copy_else_for_what_is_here(world: World, tmp_path: Path) -> None:
    """F-111."""
    key = next(stat.key for stat in world.open().backend.list(pin_prefix(world.second)))
    good = world.file(key).read_bytes()
    flip(world.file(key))
    with pytest.raises(CorruptError, match="ckpt repair"):
        world.open().scope(world.second)
    assert repair(world.open(), world.second, [world.open("copy")]).ok
    assert world.file(key).read_bytes() == good
    flip(world.file(key))
    assert repair(world.open(), world.second).ok
    assert Pin.parse(world.file(key).read_bytes()).shards is None
    part = ckptstore.open(tmp_path / "part", create=True)
    ckptstore.pull(world.open("far"), part, world.second, shards=[1])
    (stat,) = part.backend.list(pin_prefix(world.second))
    clear(tmp_path / "part" / stat.key)
    (tmp_path / "part" / stat.key).mkdir()
    assert repair(ckptstore.open(part.url), world.second).ok
    assert Pin.parse(part.backend.get(stat.key)).shards == (1,)


def test_retirements_of_ancestors_are_written_anew(world: World) -> None:
    path = world.file(retired_key(world.first))
    path.unlink()
    path.symlink_to("nowhere")
    assert repair(world.open(), world.second).ok
    assert path.is_file()
    assert not path.is_symlink()


def test_a_damaged_receipt_comes_from_a_copy_or_is_put_aside(world: World) -> None:
    store = world.open()
    (key,) = [s.key for s in store.backend.list(f"receipts/{world.second.hex}/") if s.key.endswith(world.receipt.hex)]
    good = world.file(key).read_bytes()
    bad = flip(world.file(key))
    repair(world.open(), world.second, [world.open("copy")])
    assert world.file(key).read_bytes() == good
    flip(world.file(key))
    assert repair(world.open(), world.second).ok
    assert not world.file(key).exists()
    backend = world.open().backend
    assert isinstance(backend, DirectoryBackend)
    assert bad in quarantined_files(backend, key)


# -- what keeps a store from being opened -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["text", "gone", "pipe", "flipped"])
def test_a_header_is_written_anew_with_the_id_that_receipts_give(world: World, how: str) -> None:
    path = world.near / "ckptstore.json"
    receipt = world.open().verify(world.second).receipt(world.open().url)
    world.open().add_receipt(receipt)
    good = path.read_bytes()
    clear(path)
    if how == "text":
        path.write_text("nothing")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "flipped":
        path.write_bytes(good[:-1] + b"|")
    with pytest.raises(ckptstore.CkptStoreError) as failed:
        world.open()
    assert "ckpt repair --header" in failed.value.hint
    planned = repair_header(world.near, dry_run=True)
    done = repair_header(world.near)
    assert planned == done
    assert [key for key, _ in done.healed] == ["ckptstore.json"]
    assert path.read_bytes() == good
    assert world.open().verify("main").ok
    assert repair_header(world.near).healed == ()


def test_a_header_of_which_nothing_tells_has_a_new_id(world: World, tmp_path: Path) -> None:
    shutil.rmtree(world.near / "receipts")
    old = world.open().id
    write(world.near / "ckptstore.json", b"")
    assert "verify anew" in repair_header(world.near).healed[0][1]
    assert world.open().id != old
    assert world.open().verify("main").ok
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefusedError, match="neither a header"):
        repair_header(tmp_path / "empty")
    with pytest.raises(NotFoundError):
        repair_header(tmp_path / "nowhere")


def test_a_header_of_another_format_is_not_ours_to_write(world: World) -> None:
    path = world.near / "ckptstore.json"
    write(path, path.read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(ckptstore.CkptStoreError) as failed:
        repair_header(world.near)
    assert failed.value.code == "unsupported-version"


def test_a_feature_is_written_anew(world: World) -> None:
    path = world.near / "features" / "single-writer"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptError, match="ckpt repair --header"):
        world.open()
    assert [key for key, _ in repair_header(world.near).healed] == ["features/single-writer"]
    assert world.open().single_writer


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
