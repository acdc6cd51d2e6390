"""Planted pickles are bytes like any others: nothing on a read path runs them (fault B047)."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import evidence
from ckptstore.errors import CkptStoreError
from ckptstore.export import import_weights
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, feature_key, lease_key, pin_key, retired_key
from ckptstore.format.records import Feature, Lease, Pin, Receipt, Retired
from ckptstore.leases import now
from ckptstore.transfers.prices import Prices
from ckptstore_cli.main import run as ckpt
from tests.support.training import seed_everything
from trainer.compute import weights
from trainer.data import bytetokenizer, tokenizer
from trainer.preparation.plan import Plan
from trainer.workers import orders
from trainer.workers.events import Event


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


# What is planted in place of each file, and the call that would run it


def _pickled(payload: object) -> bytes:
    return pickle.dumps(payload)


def _saved(payload: object, *, zipped: bool) -> bytes:
    out = io.BytesIO()
    torch.save({"model": payload}, out, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


def _torch(payload: object) -> bytes:
    return _saved(payload, zipped=True)


def _old_torch(payload: object) -> bytes:
    return _saved(payload, zipped=False)


def _array(payload: object) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([payload], dtype=object), allow_pickle=True)
    return out.getvalue()


def _arrays(payload: object) -> bytes:
    out = io.BytesIO()
    np.savez(out, weights=np.array([payload], dtype=object))
    return out.getvalue()


def _zipped(payload: object) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload))
    return out.getvalue()


def _yaml(payload: Payload) -> bytes:
    return f"!!python/object/apply:eval [\"open({str(payload.sentinel)!r}, 'w').close()\"]\n".encode()


def _python(payload: Payload) -> bytes:
    return f"open({str(payload.sentinel)!r}, 'w').close()\n".encode()


def _load_torch(data: bytes) -> object:
    return torch.load(io.BytesIO(data), weights_only=False)


def _load_numpy(data: bytes) -> object:
    found: Any = np.load(io.BytesIO(data), allow_pickle=True)
    return found["weights"] if isinstance(found, np.lib.npyio.NpzFile) else found


def _load_zip(data: bytes) -> object:
    return pickle.loads(zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl"))  # noqa: S301


FORMS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], object]]] = {
    "pickle": (_pickled, lambda data: pickle.loads(data)),  # noqa: S301
    "torch": (_torch, _load_torch),
    "torch before zip": (_old_torch, _load_torch),
    "npy": (_array, _load_numpy),
    "npz": (_arrays, _load_numpy),
    "zip": (_zipped, _load_zip),
    "python": (_python, lambda data: exec(data)),  # noqa: S102
    "yaml": (_yaml, lambda data: _unsafe_yaml(data)),
}


def _unsafe_yaml(data: bytes) -> object:
    import yaml

    return yaml.load(data, Loader=yaml.UnsafeLoader)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A store with a key of every kind and all that lies beside its keys."""
    seed_everything()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")
    store = ckptstore.open(tmp_path / "store", create=True)
    other = ckptstore.open(tmp_path / "other", create=True)
    files = store.put_tree(tmp_path / "files")
    model = nn.Linear(300, 300)
    state = ckptstore.TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))
    attempt = store.begin("main")
    receipt = store.save_shard(state, attempt, step=1, files=files)
    root = store.commit(attempt, [receipt])
    ckptstore.add_remote(store, "other", str(tmp_path / "other"))
    ckptstore.push(store, other, root, ref="main")
    nonce = "0" * 32
    store.add_receipt(Receipt("metrics", root, None, 0, 0, 0, "none", now(), "here"))
    for key, data in (
        (pin_key(root, nonce), Pin(None, "kept").encode()),
        (lease_key(nonce), Lease("host", "process", now()).encode()),
        (retired_key(Digest.of(b"old")), Retired("old").encode()),
        (feature_key("single-writer"), Feature("one").encode()),
    ):
        assert store.backend.create(key, data)  # type: ignore[attr-defined]
    store.verify(root)
    return tmp_path


def _use_everything(path: Path, out: Path) -> None:
    """Every read path over the store, whatever each of them says."""
    for words in (
        ["log", "main"],
        ["show", "main"],
        ["ls", "main"],
        ["verify", "main"],
        ["diff", "main", "main"],
        ["ref", "list"],
        ["remote", "list"],
        ["durability", "main"],
        ["restore", "main", str(out / "restored")],
        ["export", "main", str(out / "weights.safetensors")],
        ["evidence", "pack", str(out / "evidence.tar"), "main"],
        ["push", "main", "memory:planted-forms"],
        ["catalogue", "rebuild"],
    ):
        ckpt(["--store", str(path), *words])
    with suppress(CkptStoreError):
        store = ckptstore.open(path)
        with suppress(CkptStoreError), store.catalogue() as catalogue:
            catalogue.rows()
        fresh = nn.Linear(300, 300)
        state = ckptstore.TrainingState(model=fresh, optimizer=torch.optim.SGD(fresh.parameters(), momentum=0.9))
        head = store.head("main")
        if head is not None:
            store.restore(head, state)


QUICK = ("pickle", "torch", "npz")


@pytest.mark.parametrize("form", [pytest.param(f, marks=[] if f in QUICK else [pytest.mark.deep]) for f in FORMS])
def test_nothing_runs_that_is_planted_in_place_of_a_file(
    form: str, world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B047: in place of one file of each kind in a store, one after the other, and of what a trainer reads."""
    sentinel = tmp_path / "sentinel"
    make, load = FORMS[form]
    payload = make(Payload(sentinel))
    path = world / "store"
    kinds: dict[str, Path] = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            kind = file.relative_to(path).parts[0]
            if kind == "documents":
                kind = str(json.loads(file.read_bytes())["kind"])
            kinds.setdefault(kind, file)
    assert {"objects", "page", "shard", "checkpoint", "tree", "refs", "receipts", "pins", "leases"} <= kinds.keys()
    assert {"retired", "features", "ckptstore.json", "config.toml", "catalogue.sqlite"} <= kinds.keys()
    for kind, file in kinds.items():
        good = file.read_bytes()
        file.unlink()
        file.write_bytes(payload)
        (tmp_path / kind).mkdir()
        _use_everything(path, tmp_path / kind)
        file.write_bytes(good)
        assert not sentinel.exists(), f"in place of {file}"
    _read_by_themselves(payload, tmp_path)
    capfd.readouterr()
    assert not sentinel.exists()
    load(payload)
    assert sentinel.exists(), "what was planted does not even work"


def _read_by_themselves(payload: bytes, tmp_path: Path) -> None:
    file = tmp_path / "planted.safetensors"
    file.write_bytes(payload)
    store = ckptstore.open("memory:planted-import", create=True)
    readers: list[Callable[[], object]] = [
        lambda: evidence.verify(file),
        lambda: evidence.unpack(file, tmp_path / "unpacked"),
        lambda: import_weights(store, file, ref="main"),
        lambda: weights.decode(payload, "planted"),
        lambda: Plan.parse(payload),
        lambda: Event.parse(payload),
        lambda: orders.parse(payload),
        lambda: Prices.parse(payload.decode(errors="replace")),
        lambda: tokenizer.from_files({**bytetokenizer.files(b""), "tokenizer.json": payload}),
    ]
    for read in readers:
        with pytest.raises(CkptStoreError):
            read()
