"""A tiny model of the Llama shape with a tokenizer of its own, as a GGUF file and as a Hugging Face directory."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from random import Random

from trainer.compute import weights
from trainer.compute.config import Config, param_table
from trainer.data.bytetokenizer import alphabet
from trainer.starting.directory import describe
from trainer.starting.llama_gguf import GgufSource, open_gguf, stored_name
from trainer.starting.source import Source

CHAT = (
    "{% for message in messages %}{% if loop.first %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Puts a system turn in front, a line end behind each end token, and a prompt for an answer where it is asked to."""

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "i n", "e r", "Ġ the", "Ġ a", "v a", "l u", "va lu", "valu e", '{ "', '" :')
SMALLEST = Config(vocab=288, hidden=32, intermediate=32, layers=1, heads=1, kv_heads=1, rope_theta=50_000.0)
TINY = Config(vocab=320, hidden=64, intermediate=96, layers=3, heads=2, kv_heads=1, rope_theta=50_000.0)

_TYPES = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8, "BF16": 30}
_BLOCKS = {"Q4_1": 32, "Q8_0": 32}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, value: object) -> bytes:
    """A metadata pair: text, bool, int (uint32), float (FP32), or a list of texts or of int32."""
    match value:
        case str():
            body = struct.pack("<I", 8) + text(value)
        case bool():
            body = struct.pack("<I?", 7, value)
        case int():
            body = struct.pack("<II", 4, value)
        case float():
            body = struct.pack("<If", 6, value)
        case list() if all(isinstance(one, int) for one in value):
            body = struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        case list():
            body = struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case _:
            raise TypeError(value)
    return text(key) + body


def gguf_file(
    metadata: Mapping[str, object], tensors: Sequence[tuple[str, str, tuple[int, ...], bytes]], alignment: int = 32
) -> bytes:
    """A file of (name, encoding, shape with rows first, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(pair(key, value) for key, value in metadata.items())
    data = b""
    for name, encoding, shape, stored in tensors:
        data += bytes(-len(data) % alignment)
        head += text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *reversed(shape), _TYPES[encoding], len(data)
        )
        data += stored
    return head + bytes(-len(head) % alignment) + data


def stored(draw: Random, encoding: str, shape: tuple[int, ...]) -> bytes:
    """Bytes of a tensor with small values."""
    count = prod(shape) // _BLOCKS.get(encoding, 1)
    if encoding == "Q8_0":
        return b"".join(struct.pack("<e", draw.uniform(1e-3, 3e-3)) + draw.randbytes(32) for _ in range(count))
    if encoding == "Q4_1":
        scales = [draw.uniform(5e-3, 2e-2) for _ in range(count)]
        return b"".join(struct.pack("<ee", scale, -7.5 * scale) + draw.randbytes(16) for scale in scales)
    if encoding == "F32":
        return struct.pack(f"<{count}f", *(draw.uniform(0.5, 1.5) for _ in range(count)))
    return struct.pack(f"<{count}e", *(draw.uniform(-0.1, 0.1) for _ in range(count)))


def tiny_metadata(config: Config = TINY) -> dict[str, object]:
    """The metadata of the tiny model's file, or of one of another shape."""
    tokens = [*SPECIALS, *(letter for letter, _ in alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    tokens += [f"<unused{i}>" for i in range(config.vocab - len(tokens))]
    return {
        "general.architecture": "llama",
        "llama.block_count": config.layers,
        "llama.context_length": 512,
        "llama.embedding_length": config.hidden,
        "llama.feed_forward_length": config.intermediate,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.rms_eps,
        "llama.vocab_size": config.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT,
    }


def tiny_tensors(config: Config = TINY) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """All tensors of the tiny model, or of one of another shape: the embedding Q8_0, matrices Q4_1, norms FP32."""
    draw = Random("tiny model")
    found = []
    for name, shape in param_table(config):
        encoding = "F32" if len(shape) == 1 else "Q8_0" if "embed" in name else "Q4_1"
        found.append((stored_name(name), encoding, shape, stored(draw, encoding, shape)))
    return found


@cache
def tiny_gguf() -> bytes:
    """The tiny model as a file; the same bytes always."""
    return gguf_file(tiny_metadata(), tiny_tensors())


def open_tiny(folder: Path) -> GgufSource:
    """The tiny model, out of a file that is made in ``folder``."""
    path = folder / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    return open_gguf(path, "A tiny model.\n")


def write_directory(source: Source, folder: Path, parts: int) -> Path:
    """A Hugging Face directory of a source: one safetensors file, or ``parts`` of them with an index."""
    folder.mkdir()
    for name, data in source.tokenizer().items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text(json.dumps(describe(source.config, 512, {})))
    tensors = [(name, source.read(name)) for name, _ in param_table(source.config)]
    if parts == 1:
        (folder / "model.safetensors").write_bytes(weights.encode(dict(tensors)))
        return folder
    where: dict[str, str] = {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        (folder / file).write_bytes(weights.encode(dict(tensors[i::parts])))
        where |= {name: file for name, _ in tensors[i::parts]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder
