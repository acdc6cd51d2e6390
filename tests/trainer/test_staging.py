"""Staging a host: by content, with nothing of others, and refused by name when a file is missing (fault B089)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest, Store
from ckptstore.backends.counting import CountingBackend
from ckptstore.errors import CorruptError
from ckptstore.format.keys import object_key
from trainer.lifecycle.staging import stage
from trainer.preparation import planning, prepare, staged
from trainer.workers.hosts import Host

TEMPLATE = "inputs/tokenizer/chat_template.jinja"


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Digest]]:
    """A store with the trees of a prepared run, and their digests by folder."""
    folder = tmp_path_factory.mktemp("frozen")
    made = prepare.prepare(planning.profile("demo"), folder / "prepared", compute="float32")
    store = ckptstore.open(folder / "store", create=True)
    directories = {"plan": made.plan_dir, "inputs": made.inputs_dir, "sources": made.sources_dir}
    return folder / "store", {name: store.put_tree(path) for name, path in directories.items()}


@pytest.fixture
def store(frozen: tuple[Path, Mapping[str, Digest]]) -> Store:
    return ckptstore.open(frozen[0])


@pytest.fixture
def trees(frozen: tuple[Path, Mapping[str, Digest]]) -> Mapping[str, Digest]:
    return frozen[1]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path, "host-2")


def test_a_host_gets_the_files_of_its_shard_and_not_those_of_others(
    store: Store, trees: Mapping[str, Digest], host: Host
) -> None:
    counting = CountingBackend(store.backend)
    done = stage(Store(counting), trees, host, 1)
    assert done.refused == ""
    assert done.bytes == done.checked_bytes > 1_000_000
    assert done.files == sum(path.is_file() for path in host.directory.rglob("*"))
    assert done.withheld == ("inputs/weights/shard-0.safetensors",)
    assert (host.directory / "inputs/weights/shard-1.safetensors").exists()
    assert not (host.directory / "inputs/weights/shard-0.safetensors").exists()
    foreign = {file.path: file for file in store.tree(trees["inputs"]).files}["weights/shard-0.safetensors"]
    read = counting.by_key("get", "readback")
    assert not [chunk for chunk in foreign.chunks if object_key(chunk) in read]


def test_a_forgotten_file_is_refused_by_name_and_the_correction_copies_only_that(
    store: Store, trees: Mapping[str, Digest], host: Host
) -> None:
    refused = stage(store, trees, host, 1, forget=[TEMPLATE])
    assert f"{TEMPLATE} (chat template) is missing" in refused.refused
    assert (refused.checked_bytes, refused.attempt) == (0, 1)
    corrected = stage(store, trees, host, 1, attempt=2)
    assert (corrected.refused, corrected.attempt, corrected.files) == ("", 2, 1)
    assert corrected.bytes == (host.directory / TEMPLATE).stat().st_size
    assert corrected.checked_bytes == refused.bytes + corrected.bytes


def test_a_file_of_another_shard_or_of_nobody_is_refused(store: Store, trees: Mapping[str, Digest], host: Host) -> None:
    stage(store, trees, host, 1)
    (host.directory / "inputs/weights/shard-0.safetensors").write_bytes(b"x")
    (host.directory / "sources/trainer/sitecustomize.py").write_bytes(b"x")
    text = stage(store, trees, host, 1, attempt=2).refused
    assert "inputs/weights/shard-0.safetensors" in text
    assert "sources/trainer/sitecustomize.py" in text


def test_a_staged_file_that_was_changed_is_refused(store: Store, trees: Mapping[str, Digest], host: Host) -> None:
    stage(store, trees, host, 0)
    path = host.directory / staged.PLAN / staged.PLAN_FILE
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"demo", b"omed", 1))
    assert "plan/plan.json (plan) has other bytes" in stage(store, trees, host, 0, attempt=2).refused


def test_bytes_that_the_store_has_lost_stop_a_staging(
    frozen: tuple[Path, Mapping[str, Digest]], trees: Mapping[str, Digest], host: Host, tmp_path: Path
) -> None:
    shutil.copytree(frozen[0], tmp_path / "damaged")
    damaged = ckptstore.open(tmp_path / "damaged")
    file = next(one for one in damaged.tree(trees["inputs"]).files if one.path == "tokenizer/chat_template.jinja")
    path = tmp_path / "damaged" / object_key(file.chunks[0])
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"chat_template\.jinja"):
        stage(damaged, trees, host, 1)
