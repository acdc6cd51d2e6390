"""push, pull, restore, export, import, evidence: things that leave a store and come into one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import ckptstore
from tests.cli.conftest import BACKWARDS, Ckpt, Stores


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def test_push_moves_the_same_ref_and_prints_figures(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    (done,) = ckpt("push", "main", far, "--create", "--json", "--store", stores.url).records()
    store = stores.open()
    sizes = dict(store.closure(stores.second).sizes())
    assert (done["sent_keys"], done["sent_bytes"]) == (len(sizes), sum(sizes.values()))
    assert done["receipt"]["bytes_read"] == sum(sizes.values())
    assert done["ref"] == "main"
    assert ckptstore.open(far).head("main") == stores.second
    again = ckpt("push", "main", far, "--store", stores.url)
    assert "sent 0 keys, 0 bytes" in again.out
    assert f"{len(sizes)} present" in again.out


def test_push_of_a_root_moves_no_ref_and_no_ref_means_none(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    ckpt("push", stores.second, far, "--create", "--store", stores.url)
    ckpt("push", "wide", far, "--no-ref", "--store", stores.url)
    assert ckptstore.open(far).refs.names() == []
    ckpt("push", stores.second, far, "--ref", "kept", "--store", stores.url)
    assert ckptstore.open(far).head("kept") == stores.second
    assert ckpt("push", "main", far, "--ref", "x", "--no-ref", "--store", stores.url).code == 2


def test_push_makes_no_store_unless_told_to(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    assert ckpt("push", "main", far, "--store", stores.url).code == 4
    assert not far.exists()


def test_push_repairs_what_is_damaged_there(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    ckpt("push", "main", far, "--create", "--store", stores.url)
    key = next(iter(stores.open().closure(stores.second).objects))
    damage(far / key)
    assert ckpt("verify", "main", "--store", far).code == 3
    assert "1 repaired" in ckpt("push", "main", far, "--store", stores.url).out
    assert ckpt("verify", "main", "--store", far).code == 0


def test_push_does_not_take_a_ref_from_another_lineage(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    ckpt("push", "main", far, "--create", "--store", stores.url)
    done = ckpt("push", "wide", far, "--ref", "main", "--json", "--store", stores.url)
    assert done.code == 6
    assert done.error()["error"] == "conflict"
    assert ckptstore.open(far).head("main") == stores.second


def test_pull_brings_a_checkpoint_and_its_ref_into_a_new_store(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    assert ckpt("pull", "main", stores.url, "--store", far).code == 4
    (done,) = ckpt("pull", "main", stores.url, "--store", far, "--create", "--json").records()
    assert done["type"] == "pull"
    assert ckptstore.open(far).head("main") == stores.second
    assert ckpt("verify", "main", "--store", far).code == 0


def test_pull_of_corrupt_bytes_hands_nothing_out(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    key = next(iter(stores.open().closure(stores.second).objects))
    damage(stores.file(key))
    done = ckpt("pull", "main", stores.url, "--store", far, "--create")
    assert done.code == 3
    assert key in done.err
    assert list(ckptstore.open(far).checkpoints()) == []


def test_a_partial_store_is_verified_as_far_as_it_is_pinned(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    pulled = ckpt("pull", "wide", stores.url, "--shard", 1, "--store", far, "--create", "--json")
    assert (pulled.records()[0]["shards"], pulled.records()[0]["ref"]) == ([1], None)
    done = ckpt("verify", stores.wide, "--store", far)
    assert done.code == 0
    assert "pinned to shard 1" in done.err
    (record,) = ckpt("verify", stores.wide, "--json", "--store", far).records()
    assert record["shards"] == [1]
    assert ckpt("verify", stores.wide, "--shard", 0, "--store", far).code == 4
    assert {row["shard"] for row in ckpt("ls", stores.wide, "--json", "--store", far).records()} == {1, ""}


def test_a_shard_can_be_pulled_and_verified_without_files(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    arguments = ["pull", "wide", stores.url, "--no-files", "--store", far, "--create"]
    assert ckpt(*arguments).code == 2
    assert ckpt(*arguments, "--shard", 1).code == 0
    assert ckpt("verify", stores.wide, "--store", far).code == 4
    assert ckpt("verify", stores.wide, "--no-files", "--store", far).code == 0
    assert ckpt("restore", stores.wide, far.with_name("out"), "--store", far).code == 0
    assert ckptstore.open(far).readbacks(stores.wide) == []


def test_a_shard_can_go_on_from_a_partial_store(ckpt: Ckpt, stores: Stores, far: Path, tmp_path: Path) -> None:
    ckpt("pull", "wide", stores.url, "--shard", 1, "--store", far, "--create")
    third = tmp_path / "third"
    assert ckpt("push", stores.wide, third, "--create", "--store", far).code == 0
    assert ckpt("verify", stores.wide, "--store", third).code == 0
    assert ckptstore.open(third).scope(stores.wide) == (1,)


def test_restore_writes_a_directory_that_other_tools_read(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    target = tmp_path / "restored"
    (done,) = ckpt("restore", "main", target, "--json", "--store", stores.url).records()
    assert done["shards"] == [0]
    assert done["files"] == sum(path.is_file() for path in target.rglob("*"))
    weights = load_file(target / "shard-0" / "model.safetensors")
    assert weights["0.weight"].shape == (80, 8)
    assert load_file(target / "shard-0" / "optim.optimizer.exp_avg.safetensors")["0.weight"].shape == (80, 8)
    checkpoint = json.loads((target / "checkpoint.json").read_text())
    assert (checkpoint["root"], checkpoint["step"]) == (str(stores.second), 2)
    shard = json.loads((target / "shard-0" / "shard.json").read_text())
    assert sorted(shard["rng"]) == ["numpy", "python", "torch.cpu"]
    assert shard["optimizers"][0]["groups"][0]["members"] == [
        "0.bias",
        "0.weight",
        "1.bias",
        "1.weight",
        "4.bias",
        "4.weight",
    ]


def test_restore_overwrites_nothing(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    assert ckpt("restore", "main", tmp_path / "full", "--store", stores.url).code == 5
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_restore_writes_the_files_of_the_checkpoint(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    assert ckpt("restore", "wide", tmp_path / "all", "--store", stores.url).code == 0
    assert (tmp_path / "all" / "files" / "plan.json").read_bytes() == b'{"updates":2}'
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == [
        "checkpoint.json",
        "files",
        "shard-0",
        "shard-1",
    ]
    assert ckpt("restore", "wide", tmp_path / "one", "--shard", 1, "--store", stores.url).code == 0
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["checkpoint.json", "shard-1"]


def test_export_and_import_keep_every_tensor_digest(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    (done,) = ckpt("export", "wide", file, "--json", "--store", stores.url).records()
    assert done["aliases"] == {"head.weight": "embed.weight"}
    assert done["bytes"] == file.stat().st_size
    assert f"{BACKWARDS}.weight" in load_file(file)
    (made,) = ckpt("import", file, "--ref", "again", "--step", 7, "--json", "--store", stores.url).records()
    before = ckpt("ls", "wide", "--role", "weight", "--json", "--store", stores.url).records()
    after = ckpt("ls", "again", "--role", "weight", "--json", "--store", stores.url).records()
    assert {row["path"]: row["digest"] for row in before} == {row["path"]: row["digest"] for row in after}
    assert made["tensors"] == len(after)
    assert ckpt("show", "again", "--json", "--store", stores.url).records()[0]["step"] == 7
    assert ckpt("verify", "again", "--store", stores.url).code == 0


def test_export_overwrites_nothing_and_import_takes_no_ref(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"mine")
    assert ckpt("export", "main", file, "--store", stores.url).code == 5
    assert file.read_bytes() == b"mine"
    assert ckpt("import", file, "--ref", "new", "--store", stores.url).code == 9
    file.unlink()
    ckpt("export", "main", file, "--store", stores.url)
    assert ckpt("import", file, "--ref", "main", "--store", stores.url).code == 5
    assert stores.open().head("main") == stores.second


def test_evidence_is_packed_and_verified_without_the_store(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    archive = tmp_path / "evidence.tar"
    packed = ckpt("evidence", "pack", "main", "wide", "-o", archive, "--json", "--store", stores.url).records()[0]
    stores.path.rename(tmp_path / "gone")
    (verified,) = ckpt("evidence", "verify", archive, "--json").records()
    assert verified | {"type": "packed"} == packed
    damage(archive)
    broken = ckpt("evidence", "verify", archive)
    assert broken.code == 3
    assert broken.out


def damage(path: Path) -> None:
    """Turn over one bit in the middle of a file."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
