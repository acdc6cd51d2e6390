"""Export and import: weights leave and come back as safetensors with every bit, and nothing is lost silently."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ckptstore
from ckptstore import Digest, Tie
from ckptstore.errors import CorruptError, MalformedError, NotFoundError, RefusedError, UsageError
from ckptstore.format.page import BUFFER, WEIGHT, Role, TensorEntry
from ckptstore.live.tensors import TORCH_DTYPES
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend
from tests.support.training import commit_state

LACKING = ("c32", "c128")


class Tied(nn.Module):
    """A tied head, a norm with buffers, a tensor of several chunks, an empty one and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(3000, 64)
        self.out = nn.Linear(64, 3000, bias=False)
        self.out.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.long = nn.Parameter(torch.randn(2 * 2**20 + 5, 2))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(-0.0))


def save(store: Store, ref: str, *models: nn.Module, ties: tuple[Tie, ...] = ()) -> Digest:
    return commit_state(store, ref, [ckptstore.TrainingState(model=model) for model in models], 1, ties=list(ties))


def tensors(store: Store, root: Digest) -> dict[tuple[str, Role], TensorEntry]:
    views = store.closure(root).shards.values()
    return {(entry.path, entry.role): entry for view in views for entry in view.tensors()}


def parameters(**named: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in named.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def test_export_and_import_give_back_every_tensor_and_the_state_root(store: Store, tmp_path: Path) -> None:
    root = save(store, "main", Tied())
    done = ckptstore.export_weights(store, root, tmp_path / "x.safetensors")
    assert done.aliases == {"out.weight": "embed.weight"}
    imported = ckptstore.import_weights(store, tmp_path / "x.safetensors", "again", step=1)
    assert {key: entry.digest for key, entry in tensors(store, root).items()} == {
        key: entry.digest for key, entry in tensors(store, imported.root).items()
    }
    assert store.checkpoint(imported.root).state_root == store.checkpoint(root).state_root
    assert store.head("again") == imported.root
    assert store.verify("again").ok


def test_each_shard_can_be_exported_by_itself(store: Store, tmp_path: Path) -> None:
    """From a store that has no other shard, too."""
    parts = [parameters(a=torch.ones(3)), parameters(b=torch.zeros(2, 2), c=torch.tensor(7))]
    root = save(store, "main", *parts)
    partial = ckptstore.open(tmp_path / "partial", create=True)
    ckptstore.pull(store, partial, root, shards=[1], files=False)
    for source, shard, names in ((store, 0, {"a"}), (store, 1, {"b", "c"}), (partial, 1, {"b", "c"})):
        path = tmp_path / f"{source is partial}-{shard}.safetensors"
        assert ckptstore.export_weights(source, root, path, shards=[shard]).tensors == len(names)
        assert load_file(path).keys() == names
    assert (tmp_path / "True-1.safetensors").read_bytes() == (tmp_path / "False-1.safetensors").read_bytes()
    with pytest.raises(ckptstore.CkptStoreError):
        ckptstore.export_weights(partial, root, tmp_path / "other.safetensors", shards=[0])


def test_an_exported_file_is_read_by_the_library_as_it_was(store: Store, tmp_path: Path) -> None:
    model = Tied()
    root = save(store, "main", model)
    ckptstore.export_weights(store, root, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    live = model.state_dict()
    del live["out.weight"]
    assert loaded.keys() == live.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == live[name].dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), live[name].detach().reshape(-1).view(torch.uint8))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    stated = json.loads(metadata["ckptstore"])
    assert stated["aliases"] == {"out.weight": "embed.weight"}
    assert stated["buffers"] == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    assert (stated["root"], stated["step"]) == (str(root), 1)


def test_two_exports_of_a_root_have_the_same_bytes(store: Store, tmp_path: Path) -> None:
    root = save(store, "main", Tied())
    for name in "abcdef":
        ckptstore.export_weights(store, root, tmp_path / name)
    assert len({(tmp_path / name).read_bytes() for name in "abcdef"}) == 1


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES.keys() - set(LACKING)))
def test_every_dtype_that_safetensors_has_keeps_its_bits(store: Store, tmp_path: Path, dtype: str) -> None:
    data = bytearray(os.urandom(96) if dtype != "bool" else bytes([0, 1]) * 48)
    tensor = torch.frombuffer(data, dtype=torch.uint8).view(TORCH_DTYPES[dtype])
    root = save(store, "main", parameters(p=tensor))
    ckptstore.export_weights(store, root, tmp_path / "x")
    imported = ckptstore.import_weights(store, tmp_path / "x", "again")
    assert tensors(store, root)["p", WEIGHT].digest == tensors(store, imported.root)["p", WEIGHT].digest
    assert bytes(load_file(tmp_path / "x")["p"].view(torch.uint8).numpy()) == bytes(data)


@pytest.mark.parametrize("dtype", LACKING)
def test_a_dtype_that_safetensors_lacks_is_refused_by_name(store: Store, tmp_path: Path, dtype: str) -> None:
    root = save(store, "main", parameters(good=torch.ones(3), odd=torch.ones(3, dtype=TORCH_DTYPES[dtype])))
    with pytest.raises(RefusedError, match=rf"'odd' \({dtype}\)"):
        ckptstore.export_weights(store, root, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_all_shards_are_joined_and_ties_across_them_are_aliases(store: Store, tmp_path: Path) -> None:
    ties = (Tie("head.weight", "embed.weight"),)
    left = nn.ModuleDict({"embed": nn.Embedding(40, 400)})
    root = save(store, "main", left, nn.ModuleDict({"norm": nn.LayerNorm(400)}), ties=ties)
    done = ckptstore.export_weights(store, root, tmp_path / "x")
    assert (done.tensors, done.aliases) == (3, {"head.weight": "embed.weight"})
    imported = ckptstore.import_weights(store, tmp_path / "x", "again")
    assert store.checkpoint(imported.root).state_root == store.checkpoint(root).state_root


def test_an_export_of_corrupt_bytes_names_the_place_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    root = save(store, "main", Tied())
    faulty = FaultyBackend(store.backend)
    faulty.flip_bit(next(key for key, need in store.closure(root).objects.items() if need.length == 16 * 2**20), 77)
    with pytest.raises(CorruptError, match=r"'long' chunk 0"):
        ckptstore.export_weights(Store(faulty), root, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_an_export_overwrites_nothing(store: Store, tmp_path: Path) -> None:
    root = save(store, "main", Tied())
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(RefusedError, match="exists already"):
        ckptstore.export_weights(store, root, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"mine"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RefusedError, match="exists already"):
        ckptstore.export_weights(store, root, tmp_path / "dangling")
    with pytest.raises(NotFoundError, match="no such folder"):
        ckptstore.export_weights(store, root, tmp_path / "no" / "x")


def test_what_has_no_weights_is_not_exported(store: Store, tmp_path: Path) -> None:
    root = save(store, "main", nn.ReLU())
    with pytest.raises(RefusedError, match="no weights"):
        ckptstore.export_weights(store, root, tmp_path / "x")


def test_a_tensor_with_a_reserved_name_is_refused(store: Store, tmp_path: Path) -> None:
    root = save(store, "main", parameters(__metadata__=torch.ones(3)))
    with pytest.raises(RefusedError, match="keeps this name"):
        ckptstore.export_weights(store, root, tmp_path / "x")


def test_a_file_of_another_tool_becomes_weights_alone(store: Store, tmp_path: Path) -> None:
    save_file({"a": torch.arange(300.0), "b": torch.ones(2, 2)}, tmp_path / "x", metadata={"format": "pt", "by": "me"})
    imported = ckptstore.import_weights(store, tmp_path / "x", "new", step=5)
    assert set(tensors(store, imported.root)) == {("a", WEIGHT), ("b", WEIGHT)}
    checkpoint = store.checkpoint(imported.root)
    assert (checkpoint.step, checkpoint.parent, checkpoint.run) == (5, None, None)
    shard = store.closure(imported.root).shards[0].shard
    assert (shard.rng, shard.optimizers) == ((), ())


def test_the_same_file_gives_the_same_root(store: Store, tmp_path: Path) -> None:
    save_file({"a": torch.arange(300.0)}, tmp_path / "x")
    roots = {ckptstore.import_weights(store, tmp_path / "x", ref, step=3).root for ref in ("one", "two")}
    assert len(roots) == 1


def test_an_import_takes_no_ref_away(store: Store, tmp_path: Path) -> None:
    save_file({"a": torch.arange(300.0)}, tmp_path / "x")
    root = save(store, "main", Tied())
    with pytest.raises(RefusedError, match="import to a new ref"):
        ckptstore.import_weights(store, tmp_path / "x", "main")
    assert store.head("main") == root
    with pytest.raises(UsageError):
        ckptstore.import_weights(store, tmp_path / "x", "Not a ref")
    with pytest.raises(UsageError):
        ckptstore.import_weights(store, tmp_path / "x", "new", step=-1)


def header(body: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(body).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"not safetensors at all",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"short"),
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(17)),
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}}, bytes(20)),
        header({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}, bytes(16)),
        header({"a": {"dtype": "Q9", "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
        header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, bytes(16)),
    ],
)
def test_what_is_no_safetensors_file_is_malformed(store: Store, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(MalformedError):
        ckptstore.import_weights(store, tmp_path / "x", "new")
    assert store.head("new") is None


@pytest.mark.parametrize(
    "stated",
    [
        "not json",
        "{}",
        '{"aliases":{"b":"missing"},"buffers":[],"root":"b3:ROOT","step":1}',
        '{"aliases":{"a":"a"},"buffers":[],"root":"b3:ROOT","step":1}',
        '{"aliases":[],"buffers":[],"root":"b3:ROOT","step":1}',
        '{"aliases":{},"buffers":[1],"root":"b3:ROOT","step":1}',
    ],
)
def test_metadata_that_pretends_to_be_ours_is_malformed(store: Store, tmp_path: Path, stated: str) -> None:
    save_file({"a": torch.arange(300.0)}, tmp_path / "x", metadata={"ckptstore": stated.replace("ROOT", "0" * 64)})
    with pytest.raises(MalformedError):
        ckptstore.import_weights(store, tmp_path / "x", "new")
    assert store.head("new") is None


def test_an_import_of_what_is_no_regular_file_does_not_wait(store: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError, match="regular file"):
        ckptstore.import_weights(store, tmp_path / "pipe", "new")
    with pytest.raises(NotFoundError):
        ckptstore.import_weights(store, tmp_path / "nothing", "new")
    save_file({}, tmp_path / "empty")
    with pytest.raises(RefusedError, match="no tensors"):
        ckptstore.import_weights(store, tmp_path / "empty", "new")


def test_a_file_that_changes_while_it_is_imported_moves_no_ref(store: Store, tmp_path: Path) -> None:
    save_file({"a": torch.arange(2.0**20)}, tmp_path / "x")

    def touch(_key: str) -> None:
        with open(tmp_path / "x", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
        os.utime(tmp_path / "x", ns=(1, 1))

    faulty = FaultyBackend(store.backend)
    faulty.before("create", touch, prefix="objects/", nth=1)
    with pytest.raises(RefusedError, match="changed while it was read"):
        ckptstore.import_weights(Store(faulty), tmp_path / "x", "new")
    assert store.head("new") is None


def test_buffers_stay_buffers(store: Store, tmp_path: Path) -> None:
    root = save(store, "main", Tied())
    ckptstore.export_weights(store, root, tmp_path / "x")
    imported = ckptstore.import_weights(store, tmp_path / "x", "again")
    roles = dict(tensors(store, imported.root).keys())
    assert roles["norm.running_mean"] == BUFFER
    assert roles["norm.weight"] == WEIGHT
