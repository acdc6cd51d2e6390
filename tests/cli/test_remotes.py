"""remote, push and pull by name, push --all, durability: what the operator of several stores does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest, Receipt
from ckptstore.format import values
from ckptstore.format.records import closure_digest
from ckptstore.readbacks.actors import store_id, this_actor
from ckptstore.store import Store
from tests.cli.conftest import Ckpt, Stores
from tests.cli.test_moving import damage


@pytest.fixture
def far(tmp_path: Path, ckpt: Ckpt, stores: Stores) -> Store:
    """An empty store that the other one knows as far."""
    store = ckptstore.open(tmp_path / "far", create=True)
    assert ckpt("remote", "add", "far", tmp_path / "far", "--store", stores.url).code == 0
    return store


def verified(store: Store, root: Digest, ago: timedelta = timedelta()) -> Receipt:
    """A receipt of a verification of ``store`` that reached the medium."""
    sizes = store.closure(root).sizes()
    return Receipt(
        operation="verify",
        subject=root,
        closure=closure_digest(sizes),
        documents=sum(key.startswith("documents/") for key, _ in sizes),
        objects=sum(key.startswith("objects/") for key, _ in sizes),
        bytes_read=sum(size for _, size in sizes),
        method="direct",
        time=(datetime.now(UTC) - ago).strftime("%Y-%m-%dT%H:%M:%SZ"),
        where=store.url,
        details=values.to_json({"by": this_actor(), "max_age_seconds": 0, "store": store_id(store.backend)}),
    )


# -- remotes ----------------------------------------------------------------------------------------------------------


def test_remotes_are_added_listed_and_removed(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    assert ckpt("remote", "list", "--store", stores.url).lines() == []
    done = ckpt("remote", "add", "bucket", "s3://bucket/prefix", "--no-check", "--store", stores.url)
    assert done.lines() == ["remote bucket is s3://bucket/prefix"]
    ckpt("remote", "add", "later", "../later", "--no-check", "--store", stores.url)
    assert ckpt("remote", "list", "--store", stores.url).lines() == [
        "bucket  s3://bucket/prefix",
        f"later   {tmp_path / 'later'}",
    ]
    assert ckpt("remote", "list", "--json", "--store", stores.url).records() == [
        {"type": "remote", "name": "bucket", "url": "s3://bucket/prefix"},
        {"type": "remote", "name": "later", "url": str(tmp_path / "later")},
    ]
    assert ckpt("remote", "remove", "bucket", "--store", stores.url).code == 0
    assert ckpt("remote", "remove", "bucket", "--store", stores.url).code == 4
    assert "bucket" not in ckpt("remote", "list", "--store", stores.url).out


def test_what_cannot_be_a_remote_is_told_in_one_line(ckpt: Ckpt, stores: Stores, far: Store) -> None:
    for arguments, code in (
        (("add", "far", "/elsewhere", "--no-check"), 5),
        (("add", "me", stores.url), 5),
        (("add", "nowhere", "/nowhere"), 4),
        (("add", "Upper", far.url), 2),
        (("add", "secret", "s3://key:hunter2@bucket/prefix"), 2),
    ):
        done = ckpt("remote", *arguments, "--store", stores.url)
        assert done.code == code
        assert len(done.err.splitlines()) == 1
        assert "hunter2" not in done.err
    assert len(ckpt("remote", "list", "--store", stores.url).lines()) == 1


def test_a_damaged_configuration_is_told_with_its_line(ckpt: Ckpt, stores: Stores) -> None:
    stores.file("config.toml").write_text("[remotes.far]\nurl = \n")
    for arguments in (("remote", "list"), ("push", "main", "--all"), ("push", "main", "far"), ("durability",)):
        done = ckpt(*arguments, "--store", stores.url)
        assert done.code == 9
        assert "config.toml, line 2: " in done.err
        assert len(done.err.splitlines()) == 1
    assert ckpt("verify", "main", "--store", stores.url).code == 0


# -- push and pull by name --------------------------------------------------------------------------------------------


def test_push_and_pull_take_the_name_of_a_remote(ckpt: Ckpt, stores: Stores, far: Store, tmp_path: Path) -> None:
    assert f"push {stores.second} to {far.url}" in ckpt("push", "main", "far", "--store", stores.url).out
    assert far.head("main") == stores.second
    assert "0 keys" in ckpt("push", "main", "--store", stores.url).out  # the only one
    (tmp_path / "near").mkdir()
    ckpt("init", tmp_path / "near")
    ckpt("remote", "add", "far", far.url, "--store", tmp_path / "near")
    assert ckpt("pull", "main", "far", "--store", tmp_path / "near").code == 0
    assert ckpt("pull", "main", "--store", tmp_path / "near").code == 0
    assert ckptstore.open(tmp_path / "near").head("main") == stores.second


def test_without_one_remote_it_has_to_be_said_which(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    done = ckpt("push", "main", "--store", stores.url)
    assert (done.code, "knows 0 remotes" in done.err) == (2, True)
    for name in ("one", "two"):
        ckpt("remote", "add", name, f"/srv/{name}", "--no-check", "--store", stores.url)
    done = ckpt("pull", "main", "--store", stores.url)
    assert (done.code, "one, two" in done.err) == (2, True)
    assert ckpt("push", "main", "three", "--store", stores.url).code == 4
    assert ckpt("push", "main", "one", "--all", "--store", stores.url).code == 2


def test_push_all_tries_every_remote_and_ends_with_the_worst(
    ckpt: Ckpt, stores: Stores, far: Store, tmp_path: Path
) -> None:
    zoo = ckptstore.open(tmp_path / "zoo", create=True)
    ckpt("remote", "add", "zoo", zoo.url, "--store", stores.url)
    ckpt("remote", "add", "gone", tmp_path / "gone", "--no-check", "--store", stores.url)
    ckpt("push", "wide", far.url, "--ref", "main", "--store", stores.url)  # far's main names something else
    done = ckpt("push", "main", "--all", "--store", stores.url)
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["ckpt", "ckpt"]
    assert "push to far: ref main" in done.err
    assert "push to gone: store" in done.err
    assert done.code == 4
    assert f"push {stores.second} to {zoo.url}" in done.out
    assert zoo.head("main") == stores.second
    ckpt("remote", "remove", "gone", "--store", stores.url)
    assert ckpt("push", "main", "--all", "--store", stores.url).code == 6
    done = ckpt("push", "main", "--all", "--no-ref", "--json", "--store", stores.url)
    assert (done.code, [record["target"] for record in done.records()]) == (0, [far.url, zoo.url])


def test_push_all_without_remotes_is_no_success(ckpt: Ckpt, stores: Stores) -> None:
    assert ckpt("push", "main", "--all", "--store", stores.url).code == 4


def test_a_push_that_has_no_time_left_says_so(ckpt: Ckpt, stores: Stores, far: Store) -> None:
    done = ckpt("push", "main", "far", "--within", "0.001s", "--store", stores.url)
    assert done.code == 7
    assert "not done within the deadline of 0.001 s" in done.err
    assert far.head("main") is None
    assert ckpt("push", "main", "far", "--within", "10m", "--store", stores.url).code == 0


@pytest.mark.parametrize("text", ["", "-1", "soon", "1w", "1e3", "7 d", "nan"])
def test_what_is_no_duration_is_refused(ckpt: Ckpt, stores: Stores, far: Store, text: str) -> None:
    done = ckpt("push", "main", "far", "--max-age", text, "--store", stores.url)
    assert done.code == 2
    assert "3600, 90m, 12h or 7d" in done.err


# -- durability -------------------------------------------------------------------------------------------------------


def test_durability_counts_the_copies_that_were_read_back(ckpt: Ckpt, stores: Stores, far: Store) -> None:
    store = stores.open()
    keys = len(store.closure(stores.wide).sizes())
    ckpt("push", "wide", "far", "--store", stores.url)
    store.add_receipt(verified(far, stores.wide))
    done = ckpt("durability", "wide", "--store", stores.url)
    header, line = done.lines()
    assert header.split() == ["root", "step", "refs", "copies", "oldest", "readback", "where"]
    assert line.startswith(f"{stores.wide.short}  step 7  wide")
    assert line.endswith(f"this store 0 of {keys}; far")
    store.add_receipt(verified(store, stores.wide))
    (record,) = ckpt("durability", "wide", "--json", "--store", stores.url).records()
    assert (record["root"], record["copies"], record["keys"]) == (str(stores.wide), 2, keys)
    assert [(holder["name"], holder["verified_keys"]) for holder in record["holders"]] == [
        ("this store", keys),
        ("far", keys),
    ]
    assert {json.loads(line)["refs"][0] for line in ckpt("durability", "--json", "--store", stores.url).lines()} == {
        "main",
        "wide",
    }


def test_min_copies_decides_the_exit_code(ckpt: Ckpt, stores: Stores, far: Store) -> None:
    store = stores.open()
    asked = ("durability", "wide", "--store", stores.url)
    done = ckpt(*asked, "--min-copies", 1)
    assert done.code == 5
    assert "have fewer than 1 verified copy" in done.err
    store.add_receipt(verified(store, stores.wide, timedelta(days=3)))
    assert ckpt(*asked, "--min-copies", 1).code == 0
    assert ckpt(*asked, "--min-copies", 1, "--max-age", "7d").code == 0
    done = ckpt(*asked, "--min-copies", 1, "--max-age", "12h", "--json")
    assert (done.code, done.error()["error"], done.records()[0]["copies"]) == (5, "refused", 0)
    assert ckpt(*asked, "--min-copies", 2).code == 5
    store.add_receipt(verified(replace_url(far, stores), stores.wide))
    assert ckpt(*asked, "--min-copies", 2).code == 0
    assert ckpt("durability", "--min-copies", 2, "--store", stores.url).code == 5  # main has one at most


def replace_url(far: Store, stores: Stores) -> Store:
    """The far store with the checkpoint in it."""
    ckptstore.push(stores.open(), far, stores.wide)
    return far


def test_every_key_is_listed_with_who_read_it_and_how(ckpt: Ckpt, stores: Stores) -> None:
    store = stores.open()
    receipt = verified(store, stores.wide)
    digest = store.add_receipt(receipt)
    done = ckpt("durability", "wide", "--objects", "--store", stores.url)
    key, size = max(store.closure(stores.wide).sizes())
    (line,) = [line for line in done.lines() if line.startswith(key)]
    told = f"this store {receipt.time} verify direct by {this_actor()}"
    assert line.split(maxsplit=3) == [key, f"{size:,}", "1", told]
    records = ckpt("durability", "wide", "--objects", "--json", "--store", stores.url).records()
    assert {record["key"] for record in records[1:]} == {key for key, _ in store.closure(stores.wide).sizes()}
    (copy,) = records[1]["at"]
    assert (copy["read_at"], copy["by"], copy["receipt"]) == (receipt.time, this_actor(), str(digest))


def test_forged_receipts_and_wrong_clocks_are_shown(ckpt: Ckpt, stores: Stores) -> None:
    store = stores.open()
    store.add_receipt(replace(verified(store, stores.wide), closure=Digest.of(b"another")))
    done = ckpt("durability", "wide", "--store", stores.url)
    assert "it is about another closure" in done.err
    assert done.code == 0
    store.add_receipt(verified(store, stores.wide, timedelta(days=-30)))
    done = ckpt("durability", "wide", "--objects", "--min-copies", 1, "--store", stores.url)
    assert (done.code, "(in the future)" in done.out) == (0, True)
    assert ckpt("durability", "wide", "--min-copies", 1, "--max-age", "99d", "--store", stores.url).code == 5


def test_refresh_asks_the_remotes_and_keeps_what_they_say(
    ckpt: Ckpt, stores: Stores, far: Store, tmp_path: Path
) -> None:
    ckptstore.push(stores.open(), far, stores.wide)
    far.add_receipt(verified(far, stores.wide))
    asked = ("durability", "wide", "--min-copies", 1, "--store", stores.url)
    assert ckpt(*asked, "--refresh").code == 0
    shutil.move(tmp_path / "far", tmp_path / "away")
    assert ckpt(*asked).code == 0
    done = ckpt(*asked, "--refresh")
    assert done.code == 4
    assert "remote far: store" in done.err
    shutil.move(tmp_path / "away", tmp_path / "far")
    far.backend.delete(max(stores.open().closure(stores.wide).objects))
    assert ckpt(*asked, "--refresh").code == 5
    done = ckpt("durability", "wide", "--objects", "--refresh", "--store", stores.url)
    assert done.out.count("(absent)") == 1


def test_durability_of_nothing_is_no_success_where_copies_are_asked_for(ckpt: Ckpt, tmp_path: Path) -> None:
    ckpt("init", tmp_path / "empty")
    assert ckpt("durability", "--store", tmp_path / "empty").code == 0
    assert ckpt("durability", "--min-copies", 1, "--store", tmp_path / "empty").code == 4


def test_a_checkpoint_that_is_damaged_here_is_told_and_the_others_are_counted(ckpt: Ckpt, stores: Stores) -> None:
    damage(stores.file(f"documents/{stores.wide.hex[:2]}/{stores.wide.hex}"))
    done = ckpt("durability", "--json", "--store", stores.url)
    assert done.code == 3
    assert [record["refs"] for record in done.records()] == [["main"]]


def test_a_partial_store_is_counted_as_far_as_it_is_pinned(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    part = tmp_path / "part"
    ckpt("pull", "wide", stores.url, "--shard", 1, "--no-files", "--store", part, "--create")
    assert ckpt("durability", stores.wide, "--store", part).code == 4
    done = ckpt("durability", stores.wide, "--no-files", "--json", "--store", part)
    assert done.code == 0
    assert done.records()[0]["keys"] == len(ckptstore.open(part).closure(stores.wide, [1], files=False).sizes())


def test_verify_says_who_read_which_store(ckpt: Ckpt, stores: Stores) -> None:
    ckpt("verify", "main", "--store", stores.url)
    (receipt,) = stores.open().receipts(stores.second)[-1:]
    details = values.from_json(receipt.details)
    assert details == {"by": this_actor(), "max_age_seconds": 0, "store": store_id(stores.open().backend)}
