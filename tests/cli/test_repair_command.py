"""ckpt repair: what it prints, its exit codes, and that the commands that meet damage name it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptstore
from ckptstore.format.keys import document_key, ref_key
from tests.cli.conftest import Ckpt, Stores
from tests.support.damages import clear, write


@pytest.fixture
def far(stores: Stores, tmp_path: Path) -> Path:
    """A store that has both checkpoints."""
    store = ckptstore.open(tmp_path / "far", create=True)
    for root in (stores.second, stores.wide):
        ckptstore.push(stores.open(), store, root)
    return tmp_path / "far"


def a_chunk(stores: Stores) -> str:
    return next(iter(stores.open().closure(stores.wide).objects))


def test_what_was_healed_is_printed_key_by_key(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    key = a_chunk(stores)
    write(stores.file(key), b"")
    done = ckpt("repair", "wide", "--from", far, "--store", stores.url)
    assert (done.code, done.err) == (0, "")
    first, last = done.lines()
    assert first.startswith(f"healed truncated: checkpoint {stores.wide.short} ")
    assert first.endswith(f"{ckptstore.open(far).url} [{key}]")
    assert last.startswith(f"checkpoint {stores.wide}: whole; 1 key healed, ")
    assert ckpt("verify", "wide", "--store", stores.url).code == 0


def test_the_same_as_records(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    key, gone = a_chunk(stores), document_key(stores.open().checkpoint(stores.wide).shards[1])
    clear(stores.file(key))
    healed, repaired = ckpt("repair", "wide", "--from", far, "--json", "--store", stores.url).records()
    assert (healed["type"], healed["was"], healed["key"]) == ("healed", "missing", key)
    assert (repaired["type"], repaired["ok"], repaired["healed_keys"], repaired["exit_code"]) == (
        "repaired",
        True,
        1,
        0,
    )
    assert repaired["receipt"]["operation"] == "repair"
    clear(stores.file(gone))
    finding, repaired = ckpt("repair", "wide", "--json", "--store", stores.url).records()
    assert (finding["type"], finding["kind"], finding["shard"], finding["key"]) == ("finding", "missing", 1, gone)
    assert (repaired["ok"], repaired["exit_code"]) == (False, 4)


@pytest.mark.parametrize(("damage", "code"), [("gone", 4), ("emptied", 3)])
def test_what_is_still_wrong_decides_the_exit_code(ckpt: Ckpt, stores: Stores, damage: str, code: int) -> None:
    key = a_chunk(stores)
    clear(stores.file(key))
    if damage == "emptied":
        stores.file(key).touch()
    done = ckpt("repair", "wide", "--store", stores.url)
    assert done.code == code
    assert done.lines()[0].startswith("still ")
    assert key in done.lines()[0]


def test_a_dry_run_says_what_would_be_done(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    key = a_chunk(stores)
    write(stores.file(key), b"")
    done = ckpt("repair", "wide", "--from", far, "--dry-run", "--store", stores.url)
    assert done.code == 0
    assert done.lines()[0].startswith("would heal truncated: ")
    assert "would be whole; 1 key to heal" in done.lines()[1]
    assert stores.file(key).read_bytes() == b""
    assert ckpt("repair", "wide", "--dry-run", "--store", stores.url).code == 3


def test_remotes_are_asked_by_themselves(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    assert ckpt("remote", "add", "vault", far, "--store", stores.url).code == 0
    clear(stores.file(a_chunk(stores)))
    assert ckpt("repair", "wide", "--no-remotes", "--store", stores.url).code == 4
    done = ckpt("repair", "wide", "--store", stores.url)
    assert done.code == 0
    assert "remote vault" in done.out


def test_a_source_that_is_not_there_is_told_and_the_next_one_is_asked(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    clear(stores.file(a_chunk(stores)))
    done = ckpt("repair", "wide", "--from", "/nowhere", "--from", far, "--store", stores.url)
    assert done.code == 0
    (line,) = done.err.splitlines()
    assert "/nowhere" in line


def test_a_prefix_is_looked_up_in_the_sources_where_the_document_is_gone(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    clear(stores.file(document_key(stores.wide)))
    prefix = stores.wide.hex[:12]
    assert ckpt("repair", prefix, "--store", stores.url).code == 4
    assert ckpt("repair", prefix, "--from", far, "--store", stores.url).code == 0
    assert ckpt("verify", "wide", "--store", stores.url).code == 0


def test_a_ref_is_repaired_with_its_log(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    shutil.copytree(stores.path, tmp_path / "backup")
    write(stores.file(ref_key("main", 1)), b"nothing")
    write(stores.file(ref_key("main", 2)), b"nothing")
    told = ckpt("show", "main", "--store", stores.url)
    assert (told.code, "ckpt repair main" in told.err) == (3, True)
    done = ckpt("repair", "main", "--store", stores.url)
    assert (done.code, "name the root itself" in done.err) == (3, True)
    done = ckpt("repair", "main", "--from", tmp_path / "backup", "--store", stores.url)
    assert done.code == 0
    assert len([line for line in done.lines() if "ref main generation" in line]) == 2
    assert ckpt("verify", "main", "--store", stores.url).code == 0


def test_a_store_that_cannot_be_opened_says_what_to_do_and_that_helps(ckpt: Ckpt, stores: Stores) -> None:
    write(stores.file("ckptstore.json"), b"nothing")
    told = ckpt("log", "--store", stores.url)
    assert (told.code, "ckpt repair --header" in told.err) == (9, True)
    assert "would write ckptstore.json" in ckpt("repair", "--header", "--dry-run", "--store", stores.url).out
    assert "wrote ckptstore.json anew" in ckpt("repair", "--header", "--store", stores.url).out
    assert ckpt("verify", "main", "--store", stores.url).code == 0
    (record,) = ckpt("repair", "--header", "--json", "--store", stores.url).records()
    assert (record["type"], record["healed"]) == ("header", [])


@pytest.mark.parametrize("words", [[], ["main", "--header"], ["--header", "--from", "x"], ["main", "--shard", "x"]])
def test_what_cannot_be_meant_is_refused(ckpt: Ckpt, stores: Stores, words: list[str]) -> None:
    assert ckpt("repair", *words, "--store", stores.url).code == 2


def test_the_store_itself_is_no_source(ckpt: Ckpt, stores: Stores) -> None:
    assert ckpt("repair", "main", "--from", stores.url, "--store", stores.url).code == 2


def test_verify_names_the_repair(ckpt: Ckpt, stores: Stores) -> None:
    write(stores.file(a_chunk(stores)), b"")
    done = ckpt("verify", "wide", "--store", stores.url)
    assert (done.code, done.err) == (3, f"ckpt repair {stores.wide} may bring it back from another copy\n")


@pytest.mark.parametrize(
    "words", [["restore", "wide", "out"], ["export", "wide", "out.safetensors"], ["push", "wide", "{far}"]]
)
def test_commands_that_meet_damage_name_the_repair(
    ckpt: Ckpt, stores: Stores, tmp_path: Path, words: list[str]
) -> None:
    ckptstore.open(tmp_path / "new", create=True)
    key = next(key for key, need in stores.open().closure(stores.wide).objects.items() if need.slots)
    write(stores.file(key), b"")
    done = ckpt(*(word.format(far=tmp_path / "new") for word in words), "--store", stores.url)
    assert done.code == 3
    assert "ckpt repair" in done.err
