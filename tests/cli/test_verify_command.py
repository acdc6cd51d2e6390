"""ckpt verify: one line for each finding, with the exact place, and an exit code that says how bad it is."""

from __future__ import annotations

from pathlib import Path

import ckptstore
from ckptstore.format.keys import document_key
from tests.cli.conftest import PROGRAM, Ckpt, Stores
from tests.cli.test_moving import damage
from tests.support.backends import run_without_privilege


def test_a_sound_checkpoint_is_0_and_leaves_a_receipt(ckpt: Ckpt, stores: Stores) -> None:
    (record,) = ckpt("verify", "wide", "--json", "--store", stores.url).records()
    store = stores.open()
    assert record["ok"] is True
    assert record["bytes_read"] == sum(size for _, size in store.closure(stores.wide).sizes())
    assert record["receipt"] is True
    assert [receipt.operation for receipt in store.receipts(stores.wide)] == ["verify"]
    assert "nothing is wrong" in ckpt("verify", "wide", "--store", stores.url).out


def test_every_finding_is_one_line_with_its_place(ckpt: Ckpt, stores: Stores) -> None:
    need = next(need for need in stores.open().closure(stores.wide).objects.values() if not need.slots)
    pack = next(key for key, need in stores.open().closure(stores.wide).objects.items() if need.slots)
    damage(stores.file(pack))
    stores.file(f"objects/{need.digest.hex[:2]}/{need.digest.hex}").unlink()
    done = ckpt("verify", "wide", "--json", "--store", stores.url)
    assert done.code == 3
    *findings, summary = done.records()
    assert summary["findings"] == len(findings)
    assert summary["receipt"] is False
    assert {finding["kind"] for finding in findings} == {"corrupt", "missing"}
    corrupt = next(finding for finding in findings if finding["kind"] == "corrupt" and finding["tensor"])
    assert corrupt["key"] == pack
    assert corrupt["checkpoint"] == str(stores.wide)
    assert corrupt["expected"].startswith("b3:")
    assert corrupt["actual"].startswith("b3:")
    assert len(ckpt("verify", "wide", "--store", stores.url).lines()) == len(findings) + 1


def test_several_roots_are_all_verified_and_the_worst_decides(ckpt: Ckpt, stores: Stores) -> None:
    page = stores.open().closure(stores.wide).shards[1].shard.pages[0].digest
    stores.file(document_key(page)).unlink()
    done = ckpt("verify", "wide", "main", "--json", "--store", stores.url)
    assert done.code == 4
    verdicts = [record["ok"] for record in done.records() if record["type"] == "verified"]
    assert verdicts == [False, True]


def test_all_is_what_refs_name_and_pins_keep(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    far = tmp_path / "far"
    ckpt("push", "wide", far, "--shard", 1, "--create", "--store", stores.url)
    ckpt("push", "main", far, "--store", stores.url)
    done = ckpt("verify", "--all", "--json", "--store", far)
    assert done.code == 0
    assert [(record["root"], record["shards"]) for record in done.records()] == [
        (str(stores.second), None),
        (str(stores.wide), [1]),
    ]
    assert [receipt.operation for receipt in ckptstore.open(far).receipts(stores.wide)] == ["push", "verify"]
    assert ckpt("verify", "--all", "main", "--store", far).code == 2
    assert ckpt("verify", "--store", far).code == 2


def test_all_tells_a_head_that_cannot_be_read_and_verifies_the_others(ckpt: Ckpt, stores: Stores) -> None:
    damage(stores.file("refs/main/0000000000000002"))
    done = ckpt("verify", "--all", "--json", "--store", stores.url)
    assert done.code == 3
    assert "ref main" in done.error()["what"]
    assert [record["root"] for record in done.records()] == [str(stores.wide)]


def test_all_of_a_store_with_nothing_in_it_is_0(ckpt: Ckpt, tmp_path: Path) -> None:
    ckpt("init", tmp_path / "empty")
    done = ckpt("verify", "--all", "--store", tmp_path / "empty")
    assert (done.code, done.out) == (0, "")
    assert "names a checkpoint" in done.err


def test_a_lost_ancestor_is_a_finding_and_a_retired_one_is_not(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    ckpt("push", "main", tmp_path / "far", "--create", "--store", stores.url)
    (record,) = ckpt("verify", "main", "--json", "--store", tmp_path / "far").records()
    assert [ancestor["status"] for ancestor in record["ancestors"]] == ["retired"]
    stores.file(document_key(stores.first)).unlink()
    assert ckpt("verify", "main", "--store", stores.url).code == 4


def test_a_damaged_ref_record_is_found_when_the_ref_is_verified(ckpt: Ckpt, stores: Stores) -> None:
    damage(stores.file("refs/main/0000000000000001"))
    assert ckpt("verify", "main", "--store", stores.url).code == 3
    assert ckpt("verify", stores.second, "--store", stores.url).code == 0


def test_a_store_that_cannot_be_written_can_be_looked_at(stores: Stores) -> None:
    for path in sorted(stores.path.rglob("*"), reverse=True):
        path.chmod(0o444 if path.is_file() else 0o555)
    stores.path.chmod(0o555)
    try:
        for arguments in (["verify", "main"], ["log"], ["show", "main"], ["ls", "wide"], ["diff", "main", "wide"]):
            done = run_without_privilege(PROGRAM, "--store", stores.url, *arguments)
            assert done.returncode == (1 if arguments[0] == "diff" else 0), done.stderr
            assert done.stdout
        done = run_without_privilege(PROGRAM, "--store", stores.url, "verify", "main")
        assert "no receipt is kept" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert run_without_privilege(PROGRAM, "--store", stores.url, "ref", "move", "main", "wide").returncode == 7
    finally:
        stores.path.chmod(0o755)
        for path in stores.path.rglob("*"):
            if path.is_dir():
                path.chmod(0o755)


def test_a_ref_asks_for_the_whole_whatever_is_pinned(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    far = tmp_path / "far"
    ckpt("push", "wide", far, "--shard", 1, "--create", "--store", stores.url)
    ckpt("push", "wide", far, "--store", stores.url)
    (record,) = ckpt("verify", "wide", "--json", "--store", far).records()
    assert (record["shards"], record["ok"]) == (None, True)


def test_a_pin_that_cannot_be_read_is_not_passed_over(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    far = tmp_path / "far"
    ckpt("push", "wide", far, "--shard", 1, "--create", "--store", stores.url)
    (pin,) = (far / "pins" / stores.wide.hex).iterdir()
    pin.chmod(0o644)
    pin.write_bytes(pin.read_bytes().replace(b"[1]", b"[-]"))
    done = ckpt("verify", stores.wide, "--store", far)
    assert done.code == 3
    assert pin.name in done.err
