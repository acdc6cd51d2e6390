"""Records that come back: of refs, pins, retirements and receipts, and what a store is opened by."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.errors import CorruptError, NotFoundError, RefusedError
from ckptstore.findings import Kind
from ckptstore.format.keys import pin_prefix, ref_key, retired_key
from ckptstore.format.records import Pin, RefRecord
from ckptstore.repairs.header import repair_header
from ckptstore.repairs.reflog import OWN_CHECK
from ckptstore.repairs.repair import repair
from ckptstore.store import Store
from tests.support.backends import quarantined_files
from tests.support.damages import World, clear, flip, kinds, write

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
