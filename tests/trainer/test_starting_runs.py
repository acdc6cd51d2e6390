"""A run that starts from somebody's model: prepared, one update by two workers, committed, exported. Any launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest, ShardReceipt, Store
from tests.support.tinymodel import TINY, open_tiny, write_directory
from trainer.compute.config import halves, param_table
from trainer.compute.numerics import env_for
from trainer.data.tokenizer import Tokenizer, from_files
from trainer.export import export_model
from trainer.preparation.prepare import read_plan
from trainer.starting.directory import DirectorySource, open_directory
from trainer.workers import events, orders
from trainer.workers.worker import events_path

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]


def trainer(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env_for("native"), **variables}
    command = [sys.executable, "-m", "trainer", *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def one_update(start: Path, folder: Path, port: int) -> tuple[Store, Digest]:
    """Prepare a run from ``start`` and make its first update by two workers that a file gives orders."""
    said = finish(trainer("prepare", "--start", str(start), "--compute", "float32", "--out", str(folder)))
    identity = said.split()[-1]
    plan = read_plan(folder / "plan")
    assert (plan.config, plan.cuts) == (TINY, halves(TINY))
    store = ckptstore.open(folder / "store")
    attempt = store.begin("main")
    told = [orders.Start(), orders.Train(1, 1), orders.Save(str(attempt), 1, "store"), orders.Close()]
    (folder / "orders").write_bytes(b"".join(map(orders.encode, told)))
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = ["worker", "--host", str(folder), "--identity", identity, "--orders", str(folder / "orders")]
    for worker in [trainer(*arguments, RANK=str(rank), **common) for rank in (0, 1)]:
        finish(worker)
    receipts = []
    for shard in (0, 1):
        (saved,) = (event for event in events.read(events_path(folder, 0, shard)) if event.name == "saved")
        receipts.append(ShardReceipt.parse(saved["receipt"].encode()))
    return store, store.commit(attempt, receipts)


@pytest.fixture
def rendered(tmp_path: Path) -> Tokenizer:
    pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    return from_files(open_tiny(tmp_path).tokenizer())


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_somebodys_model_is_trained_by_shards_and_given_back(tmp_path: Path, rendered: Tokenizer, kind: str) -> None:
    source = open_tiny(tmp_path)
    start = source.file.path if kind == "gguf" else write_directory(source, tmp_path / "start", 3)
    store, root = one_update(start, tmp_path / "run", free_port())
    exported: DirectorySource = open_directory(export_model(store, root, tmp_path / "model").directory)
    assert exported.config == TINY
    assert from_files(exported.tokenizer()).identity == rendered.identity
    described = json.loads((tmp_path / "model" / "config.json").read_bytes())
    assert (described["eos_token_id"], described["max_position_embeddings"]) == (rendered.end, 512)
    changed = [name for name, _ in param_table(TINY) if exported.read(name) != source.read(name)]
    assert changed == [name for name, _ in param_table(TINY)]  # each tensor was trained, and none is another's


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
