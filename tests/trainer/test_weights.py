"""A shard reads its own tensors out of a file and nothing else, bit for bit."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptError, MalformedError, MismatchError, NotFoundError
from trainer.compute import weights
from trainer.compute.config import PRESETS, partition
from trainer.compute.model import Shard
from trainer.compute.weights import StoredTensor
from trainer.preparation import prepare

OWNERS = partition(PRESETS["demo"], (2,))


@pytest.fixture
def start() -> Path:
    return prepare.ASSETS / "demo-start.safetensors"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    tensors = {
        "b": StoredTensor("BF16", (2, 2), bytes(range(8))),
        "a": StoredTensor("F32", (1,), struct.pack("<f", 1.5)),
    }
    path = tmp_path / "small.safetensors"
    path.write_bytes(weights.encode(tensors))
    return path


def test_only_the_header_and_the_owned_ranges_are_read(start: Path) -> None:
    header = 8 + int.from_bytes(start.read_bytes()[:8], "little")
    total = 0
    for owner in OWNERS:
        shard = Shard(PRESETS["demo"], owner.first, owner.last, owner.head)
        read = weights.load(shard, start, owner.tensors)
        assert read == header + 2 * owner.parameters
        total += read
    assert total == start.stat().st_size + header


def test_bf16_is_widened_exactly(start: Path) -> None:
    theirs = safetensors.torch.load_file(start)
    for owner in OWNERS:
        shard = Shard(PRESETS["demo"], owner.first, owner.last, owner.head)
        weights.load(shard, start, owner.tensors)
        for name, parameter in shard.named_parameters():
            assert parameter.dtype == torch.float32
            assert parameter.requires_grad
            assert torch.equal(parameter, theirs[name].float())
        assert weights.rounded(shard) == {
            name: tensor
            for name, tensor in weights.decode(start.read_bytes(), "").items()
            if name in dict(owner.tensors)
        }


def test_the_safetensors_library_reads_what_is_written(small: Path) -> None:
    with safetensors.safe_open(small, "pt") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert file.get_tensor("a").tolist() == [1.5]
        assert file.get_tensor("b").view(torch.uint8).flatten().tolist() == list(range(8))


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "y": torch.tensor(2.5), "z": torch.empty(0, 4)}
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    found = weights.read(path, ["z", "x", "y"]).tensors
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        "x": ("BF16", (2, 3)),
        "y": ("F32", ()),
        "z": ("F32", (0, 4)),
    }
    assert found["y"].data == struct.pack("<f", 2.5)


def test_nothing_is_changed_when_names_or_shapes_do_not_fit(start: Path) -> None:
    shard = Shard(PRESETS["demo"], 2, 4, False)
    before = {name: parameter.clone() for name, parameter in shard.named_parameters()}
    wrong = tuple((name, (*shape[:-1], shape[-1] + 1)) for name, shape in OWNERS[1].tensors)
    with pytest.raises(MismatchError, match=r"model\.layers\.2\.input_layernorm\.weight has shape \[128\] in the file"):
        weights.load(shard, start, wrong)
    with pytest.raises(MismatchError, match=r"model\.layers\.3\.mlp\.down_proj\.weight is not owned"):
        weights.load(shard, start, OWNERS[1].tensors[:-1])
    assert all(torch.equal(p, before[n]) or p.isnan().all() for n, p in shard.named_parameters())


def test_a_missing_file_or_tensor_is_named(small: Path) -> None:
    with pytest.raises(NotFoundError, match=r"absent\.safetensors"):
        weights.read(small.with_name("absent.safetensors"), [])
    with pytest.raises(NotFoundError, match="tensor c"):
        weights.read(small, ["a", "c"])


def test_a_cut_file_is_corrupt_and_a_longer_one_too(small: Path) -> None:
    data = small.read_bytes()
    for damaged in (data[:-1], data + b"\0"):
        small.write_bytes(damaged)
        with pytest.raises(CorruptError, match="its header describes"):
            weights.read(small, ["a"])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 7]},
        {"dtype": "BF16", "shape": [-2, -2], "data_offsets": [0, 8]},
        {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]},
        {"dtype": "BF16", "shape": [2, "2"], "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": 4, "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": [2, 2]},
        [],
    ],
)
def test_a_lying_header_is_malformed(tmp_path: Path, entry: object) -> None:
    text = json.dumps({"t": entry}).encode()
    path = tmp_path / "lie.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises((MalformedError, CorruptError), match=r"lie\.safetensors"):
        weights.read(path, ["t"])


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_by_an_error_of_ours(data: bytes) -> None:
    with suppress(MalformedError, CorruptError):
        weights.decode(data, "any")
