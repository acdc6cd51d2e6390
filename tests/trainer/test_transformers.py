"""The transformers library opens an export and computes the same. Skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tinymodel import TINY, open_tiny, write_directory
from trainer.compute import weights
from trainer.compute.config import Config, param_table, partition
from trainer.compute.model import Shard
from trainer.data import tokenizer
from trainer.starting.directory import open_directory
from trainer.starting.source import write_shard

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 2e-5
"""In logits of FP32: the two add in another order."""


def whole_model(directory: Path, scratch: Path) -> tuple[Shard, Config]:
    """Our decoder with the weights of a directory."""
    source = open_directory(directory)
    (owner,) = partition(source.config, ())
    write_shard(source, owner, scratch / "whole.safetensors")
    model = Shard(source.config, 0, source.config.layers, True)
    weights.load(model, scratch / "whole.safetensors", param_table(source.config))
    return model, source.config


def logits_differ_by(directory: Path, ids: list[list[int]], scratch: Path) -> float:
    """The largest difference of a logit, and on the way: both have the same parameters."""
    library = pytest.importorskip("transformers", reason="the transformers library is not installed")
    theirs = library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    ours, _ = whole_model(directory, scratch)
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, named[name])
    tokens = torch.tensor(ids)
    with torch.no_grad():
        return float((theirs(tokens).logits - ours.logits(ours.body(ours.embed(tokens)))).abs().max())


@pytest.mark.parametrize("parts", [1, 3])
def test_a_directory_gives_the_logits_of_the_library(tmp_path: Path, parts: int) -> None:
    directory = write_directory(open_tiny(tmp_path), tmp_path / "model", parts)
    ids = [[(7 * i + j) % TINY.vocab for i in range(33)] for j in range(3)]
    assert logits_differ_by(directory, ids, tmp_path) <= TOLERANCE


def test_the_library_renders_and_divides_as_the_trainer_does(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers", reason="the transformers library is not installed")
    directory = write_directory(open_tiny(tmp_path), tmp_path / "model", 1)
    theirs = library.AutoTokenizer.from_pretrained(directory)
    ours = tokenizer.from_files(open_directory(directory).tokenizer())
    turns = ["What is the value?", '{"value":42}', "And now?"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tuple(theirs(rendered, add_special_tokens=False).input_ids) == ours.prompt(turns)
    assert theirs.eos_token_id == ours.end


def test_gradients_are_those_of_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers", reason="the transformers library is not installed")
    directory = write_directory(open_tiny(tmp_path), tmp_path / "model", 1)
    theirs = library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    ours, config = whole_model(directory, tmp_path)
    tokens = torch.tensor([[(11 * i + j) % config.vocab for i in range(24)] for j in range(2)])
    theirs(tokens, labels=tokens).loss.backward()
    ours.token_losses(ours.body(ours.embed(tokens)), tokens).mean().backward()
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = named[name].grad
        assert parameter.grad is not None
        assert (parameter.grad - expected).norm() <= 1e-5 * expected.norm(), name
