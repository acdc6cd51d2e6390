"""ckpt pin: keeps checkpoints, lists what is pinned, and lets go again."""

from __future__ import annotations

from tests.cli.conftest import Ckpt, Stores


def test_a_pin_is_made_listed_and_removed(ckpt: Ckpt, stores: Stores) -> None:
    made = ckpt("pin", stores.first.hex[:8], "--reason", "paper", "--store", stores.url)
    assert (made.code, made.lines()) == (0, [f"pinned {stores.first}: all (paper)"])
    (record,) = ckpt("pin", "--list", "--json", "--store", stores.url).records()
    assert (record["root"], record["shards"], record["reason"]) == (str(stores.first), None, "paper")
    assert (record["type"], record["until"]) == ("pin", None)
    assert stores.file(record["key"]).is_file()
    assert stores.first.short in ckpt("pin", "--list", stores.first, "--store", stores.url).out
    removed = ckpt("pin", "--remove", stores.first.hex[:8], "--store", stores.url)
    assert (removed.code, removed.lines()) == (0, [f"unpinned {stores.first}: all (paper)"])
    assert not stores.file(record["key"]).exists()
    nothing = ckpt("pin", "--list", "--store", stores.url)
    assert (nothing.code, nothing.out) == (0, "")
    assert "nothing is pinned" in nothing.err
    assert ckpt("pin", "--remove", stores.first, "--store", stores.url).code == 4


def test_some_shards_can_be_pinned_and_a_ref_will_do_as_a_name(ckpt: Ckpt, stores: Stores) -> None:
    (record,) = ckpt("pin", "wide", "--shards", "1,0", "--json", "--store", stores.url).records()
    assert (record["type"], record["root"], record["shards"]) == ("pinned", str(stores.wide), [0, 1])
    (other,) = ckpt("pin", "wide", "--shard", 1, "--json", "--store", stores.url).records()
    assert other["shards"] == [1]
    assert len(ckpt("pin", "--list", "wide", "--json", "--store", stores.url).records()) == 2


def test_what_is_pinned_survives_a_collection(ckpt: Ckpt, stores: Stores) -> None:
    for root in (stores.first, stores.second):
        assert ckpt("verify", root, "--store", stores.url).code == 0
    ckpt("pin", stores.first, "--store", stores.url)
    assert ckpt("gc", "--keep-last", 1, "--delete", "--yes", "--store", stores.url).code == 0
    assert ckpt("verify", stores.first, "--store", stores.url).code == 0
    ckpt("pin", "--remove", stores.first, "--store", stores.url)
    assert ckpt("gc", "--keep-last", 1, "--delete", "--yes", "--store", stores.url).code == 0
    assert ckpt("verify", stores.first, "--store", stores.url).code == 4


def test_until_needs_object_lock_and_is_refused_in_a_directory(ckpt: Ckpt, stores: Stores) -> None:
    done = ckpt("pin", "main", "--until", "2099-01-01", "--store", stores.url)
    assert done.code == 5
    assert "object lock" in done.err
    assert ckpt("pin", "--list", "--store", stores.url).out == ""


def test_what_cannot_be_meant_is_refused(ckpt: Ckpt, stores: Stores) -> None:
    for options in (
        (),
        ("main", "--list", "--remove"),
        ("--remove",),
        ("main", "--list", "--reason", "x"),
        ("main", "--remove", "--shards", "1"),
        ("main", "--shards", "one"),
        ("main", "--shards", "-1"),
        ("main", "--shards", "7"),
        ("main", "--until", "tomorrow"),
        ("main", "--until", "2001-01-01"),
        ("main", "--reason", ""),
    ):
        done = ckpt("pin", *options, "--store", stores.url)
        assert (done.code, len(done.err.splitlines())) == (2, 1), options
    assert ckpt("pin", "nothing", "--store", stores.url).code == 4
    assert ckpt("pin", "--list", "--store", stores.url).out == ""
