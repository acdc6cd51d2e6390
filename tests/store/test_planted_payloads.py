"""Planted pickles are bytes like any others: nothing on a read path runs them (fault B047)."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import evidence
from ckptstore.errors import CkptStoreError
from ckptstore.format.keys import document_key


class Payload:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (eval, (f"open({str(self.sentinel)!r}, 'w').close()",))  # what an attacker would plant


def test_no_read_path_runs_a_planted_pickle(tmp_path: Path) -> None:
    """B047 (NVIDIA-NeMo/Automodel#3240): as a weight, a file of a tree, a document, a member."""
    sentinel = tmp_path / "sentinel"
    payload = pickle.dumps(Payload(sentinel))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "training_args.bin").write_bytes(payload)
    store = ckptstore.open(tmp_path / "store", create=True)
    files = store.put_tree(tmp_path / "files")
    weight = torch.frombuffer(bytearray(payload.ljust(400, b"\0")), dtype=torch.uint8)
    model = nn.Module()
    model.register_buffer("weight", weight)
    attempt = store.begin("main")
    receipt = store.save_shard(ckptstore.TrainingState(model=model), attempt, step=1, files=files)
    root = store.commit(attempt, [receipt])
    assert store.verify(root).ok
    fresh = nn.Module()
    fresh.register_buffer("weight", torch.zeros_like(weight))
    store.restore(root, ckptstore.TrainingState(model=fresh))
    store.get_tree(files, tmp_path / "out")
    evidence.pack({"rng.pkl": payload, "files/args.bin": tmp_path / "files" / "training_args.bin"}, tmp_path / "e.tar")
    evidence.verify(tmp_path / "e.tar")
    evidence.unpack(tmp_path / "e.tar", tmp_path / "unpacked")
    for key in (
        next(iter(store.closure(root).objects)),
        document_key(store.checkpoint(root).shards[0]),
        document_key(root),
    ):
        store.backend.replace(key, payload)
        broken = ckptstore.open(tmp_path / "store")
        assert not broken.verify(root).ok
        with pytest.raises(CkptStoreError):
            broken.restore(root, ckptstore.TrainingState(model=fresh))
        with pytest.raises(CkptStoreError):
            ckptstore.push(broken, ckptstore.open("memory:planted", create=True), root)
    assert not sentinel.exists()
    pickle.loads(payload)  # noqa: S301 - the payload does work
    assert sentinel.exists()
