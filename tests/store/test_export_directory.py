"""Extract: a checkpoint as a directory that holds all of it, readable without this library; whole, or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptstore
from ckptstore import Digest, evidence
from ckptstore.errors import CorruptError, RefusedError
from ckptstore.format import values
from ckptstore.format.page import HyperEntry, ValueEntry
from ckptstore.live.tensors import TORCH_DTYPES
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend
from tests.support.training import commit_state, make_training


class Strange(nn.Module):
    """A complex parameter that safetensors lacks, a tied one, and extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(300, 2))
        self.again = self.weight
        self.wave = nn.Parameter(torch.randn(300, dtype=torch.complex128))

    def get_extra_state(self) -> Any:
        return {"seen": 3, "rate": 0.1}

    def set_extra_state(self, state: Any) -> None:
        pass


def read_back(directory: Path) -> dict[tuple[tuple[str, ...], str], torch.Tensor]:
    """Every tensor of an extracted shard, with what is public about the layout alone."""
    described = json.loads((directory / "shard.json").read_text())
    found = {}
    for name, role in described["files"].items():
        for path, tensor in load_file(directory / name).items():
            found["buffer" if role == ["weight"] and path in described["buffers"] else tuple(role), path] = tensor
    for item in described["raw"]:
        data = bytearray((directory / item["file"]).read_bytes())
        flat = torch.frombuffer(data, dtype=torch.uint8).view(TORCH_DTYPES[item["dtype"]])
        found[tuple(item["role"]), item["path"]] = flat.reshape(item["shape"])
    return {(("buffer",) if role == "buffer" else role, path): tensor for (role, path), tensor in found.items()}


@pytest.fixture
def root(store: Store) -> Digest:
    training = make_training()
    training.step()
    plain = ckptstore.TrainingState(model=training.model, optimizer=training.optimizer)
    return commit_state(store, "main", [plain, ckptstore.TrainingState(model={"odd": Strange()})], 1)


def test_every_entry_of_every_shard_is_in_the_directory(store: Store, root: Digest, tmp_path: Path) -> None:
    done = ckptstore.extract_checkpoint(store, root, tmp_path / "out")
    assert done.shards == (0, 1)
    for index, view in store.closure(root).shards.items():
        folder = tmp_path / "out" / f"shard-{index}"
        found = read_back(folder)
        assert {(entry.role, entry.path) for entry in view.tensors()} == found.keys()
        for entry in view.tensors():
            assert list(found[entry.role, entry.path].shape) == list(entry.shape)
        described = json.loads((folder / "shard.json").read_text())
        stored = [e for e in view.entries if isinstance(e, ValueEntry)]
        assert [(e.path, list(e.role), e.value) for e in stored] == [
            (item["path"], item["role"], item["value"]) for item in described["values"]
        ]
        members = {
            (optimizer["name"], path)
            for optimizer in described["optimizers"]
            for group in optimizer["groups"]
            for path in group["members"]
        }
        assert members == {(e.role[1], e.path) for e in view.entries if isinstance(e, HyperEntry)}
        assert described["rng"] == {entry.name: entry.value for entry in view.shard.rng}
        assert described["aliases"] == {alias.path: alias.owner for alias in view.shard.aliases}


def test_values_keep_their_types_and_bits(store: Store, root: Digest, tmp_path: Path) -> None:
    ckptstore.extract_checkpoint(store, root, tmp_path / "out")
    described = json.loads((tmp_path / "out" / "shard-1" / "shard.json").read_text())
    assert values.from_json(described["values"][0]["value"]) == {"seen": 3, "rate": 0.1}
    (raw,) = described["raw"]
    assert (raw["path"], raw["dtype"], raw["shape"]) == ("odd.wave", "c128", [300])
    checkpoint = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    assert checkpoint.pop("root") == str(root)
    assert checkpoint == json.loads(store.checkpoint(root).encode())


def test_one_shard_can_be_extracted_alone(store: Store, root: Digest, tmp_path: Path) -> None:
    done = ckptstore.extract_checkpoint(store, root, tmp_path / "out", [1])
    assert done.shards == (1,)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint.json", "shard-1"]


def test_an_empty_directory_is_taken_and_a_full_one_is_not(store: Store, root: Digest, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ckptstore.extract_checkpoint(store, root, tmp_path / "empty")
    with pytest.raises(RefusedError, match="not empty"):
        ckptstore.extract_checkpoint(store, root, tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RefusedError, match="no directory"):
        ckptstore.extract_checkpoint(store, root, tmp_path / "file")


def test_after_a_corrupt_chunk_there_is_no_directory(store: Store, root: Digest, tmp_path: Path) -> None:
    faulty = FaultyBackend(store.backend)
    for key in store.closure(root).objects:
        faulty.flip_bit(key, 5)
    with pytest.raises(CorruptError):
        ckptstore.extract_checkpoint(Store(faulty), root, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_no_role_becomes_a_path(store: Store, tmp_path: Path) -> None:
    """Roles come from whoever wrote the store."""
    training = make_training()
    training.step()
    training.optimizer.state[training.optimizer.param_groups[0]["params"][0]]["../../x/EXP"] = torch.ones(3)
    training.optimizer.state[training.optimizer.param_groups[0]["params"][0]]["../../x/exp"] = torch.ones(3)
    root = commit_state(store, "main", [training.state()], 1)
    ckptstore.extract_checkpoint(store, root, tmp_path / "out")
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.parts[0] == "out" and len(path.parts) <= 3 for path in files)
    names = [path.name.casefold() for path in files if path.suffix == ".safetensors"]
    assert len(names) == len(set(names))
    assert sum("exp~2" in name or "exp." in name for name in names) >= 1


def test_nothing_that_writes_files_writes_into_a_store(tmp_path: Path) -> None:
    """A foreign file there would stop every collection, and be damage to a scrub."""
    place = tmp_path / "store"
    store = ckptstore.open(place, create=True)
    root = commit_state(store, "main", [make_training().state()], 0)
    source = tmp_path / "files"
    source.mkdir()
    (source / "a").write_text("a")
    tree = store.put_tree(source)
    evidence.pack({"a": b"a"}, tmp_path / "a.tar")
    (tmp_path / "link").symlink_to(place / "objects")
    before = sorted(place.rglob("*"))
    for folder in (place, place / "objects", place / "new" / "deep", tmp_path / "link"):
        for write in (
            lambda target: ckptstore.extract_checkpoint(store, root, target),
            lambda target: ckptstore.export_weights(store, root, target / "x.safetensors"),
            lambda target: store.get_tree(tree, target),
            lambda target: evidence.pack({"a": b"a"}, target / "x.tar"),
            lambda target: evidence.unpack(tmp_path / "a.tar", target / "x"),
        ):
            with pytest.raises(RefusedError, match=f"it lies in the store {place}"):
                write(folder)
    assert sorted(place.rglob("*")) == before
