"""A Llama-shaped Hugging Face directory as starting weights: config.json, safetensors whole or sharded, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.errors import CkptStoreError, MalformedError, NotFoundError, UsageError
from ckptstore.format.digest import Digest
from trainer.compute import weights
from trainer.compute.config import Config, param_table
from trainer.compute.weights import Place, StoredTensor
from trainer.data.template import TEMPLATE
from trainer.data.tokenizer import REQUIRED
from trainer.errors import of_system

CONFIG = "config.json"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG, SPECIALS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"

JSON_LIMIT = 64 * 2**20  # bytes; the longest is the description of a tokenizer
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A :class:`~trainer.starting.source.Source` of such a directory. BF16 stays, FP16 is widened, FP32 stays."""

    directory: Path
    config: Config
    files: Mapping[str, str]
    """By tensor the file that holds it."""

    @property
    def notice(self) -> str:
        """Where the weights come from. The directory's name is left out: another one would be another preparation."""
        return "Weights and tokenizer are those of a Hugging Face directory.\n"

    @property
    def known(self) -> Digest | None:
        """None: they go by the digest of their tensors."""
        return None

    def tokenizer(self) -> dict[str, bytes]:
        """The tokenizer's files. What a directory keeps within tokenizer_config.json is given as a file of its own.

        Raises:
            NotFoundError: the directory has no tokenizer.json, or no chat template.
            MalformedError: a file is not JSON of its kind.
        """
        described = _read_json(self.directory / TOKENIZER_CONFIG, "copy the tokenizer's files")
        found = {
            TOKENIZER: _bytes(self.directory / TOKENIZER, "a tokenizer in the form of tokenizer.json is needed"),
            TOKENIZER_CONFIG: _bytes(self.directory / TOKENIZER_CONFIG, "copy the tokenizer's files"),
        }
        named = {role: described[role] for role in _NAMED if described.get(role) is not None}
        for name, value in ((SPECIALS, json.dumps(named).encode() + b"\n"), (TEMPLATE, _inline_template(described))):
            path = self.directory / name
            if path.exists():
                found[name] = _bytes(path, "")
            elif value is not None:
                found[name] = value
        if TEMPLATE not in found:
            hint = "documents are rendered by it: use an instruction-tuned model, or write one"
            raise NotFoundError(f"chat template of {self.directory}", f"no {TEMPLATE}", hint)
        assert found.keys() == set(REQUIRED)
        return found

    def dtype(self, name: str) -> str:
        """``BF16`` if the tensor is stored so, else ``F32``. NotFoundError if it is not there."""
        return "BF16" if self._place(name).dtype == "BF16" else "F32"

    def read(self, name: str) -> StoredTensor:
        """The tensor, read as its byte range.

        Raises:
            NotFoundError: it is not there.
            MalformedError, CorruptError: its file is no safetensors file, or a value is infinite or NaN.
        """
        from trainer.starting.dequantise import dequantise  # NumPy, which no other process needs

        tensor = weights.read(self.directory / self._file(name), [name]).tensors[name]
        values = dequantise(name, tensor.dtype, tensor.data, tensor.shape)
        if tensor.dtype == "BF16":
            return tensor
        return StoredTensor("F32", tensor.shape, values.astype("<f4", copy=False).tobytes())

    def _place(self, name: str) -> Place:
        found = weights.places(self.directory / self._file(name))
        if name not in found:
            raise NotFoundError(f"tensor {name}", f"{INDEX} says it is in {self.files[name]}, and it is not")
        return found[name]

    def _file(self, name: str) -> str:
        if name not in self.files:
            raise NotFoundError(f"tensor {name}", f"not in {self.directory}", "fetch the directory again")
        return self.files[name]


def open_directory(directory: Path) -> DirectorySource:
    """The model in a directory; its configuration, its index and the headers of its files are read now.

    Raises:
        NotFoundError: a file or a tensor that the configuration asks for is absent.
        MalformedError: the configuration is not one of this decoder, or a file contradicts it.
        CorruptError: a file ends before its data does.
    """
    if not directory.is_dir():
        hint = f"give a folder with {CONFIG} and {WHOLE}"
        raise NotFoundError(f"starting weights {directory}", "there is no such folder", hint)
    config = config_of(_read_json(directory / CONFIG, f"give a folder with {CONFIG} and {WHOLE}"))
    files = _tensors(directory)
    table = param_table(config)
    headers: dict[str, dict[str, Place]] = {}
    for name, shape in table:
        if name not in files:
            raise NotFoundError(f"tensor {name}", f"not in {directory}", "fetch the directory again")
        header = headers.setdefault(files[name], {}) or weights.places(directory / files[name])
        headers[files[name]] = header
        if name not in header:
            raise NotFoundError(f"tensor {name}", f"{INDEX} says it is in {files[name]}, and it is not")
        if header[name].shape != shape:
            why = f"has shape {list(header[name].shape)} in {files[name]}, {CONFIG} says {list(shape)}"
            raise MalformedError(f"tensor {name}", why)
    biases = sorted(name for name in files if name.endswith(".bias"))
    if biases:
        raise MalformedError(f"weights in {directory}", f"it has biases, which this decoder lacks: {biases[:4]}")
    return DirectorySource(directory, config, {name: files[name] for name, _ in table})


def config_of(described: Mapping[str, Any]) -> Config:
    """The shape that a ``config.json`` describes.

    Raises:
        MalformedError: it is not of the Llama family, or has what this decoder does not: biases, another activation,
            scaled rotary positions, heads of another size.
    """
    if described.get("model_type") != "llama":
        raise MalformedError(CONFIG, f"model_type {described.get('model_type')!r:.40} is not llama")
    if described.get("hidden_act", "silu") != "silu":
        raise MalformedError(CONFIG, f"activation {described['hidden_act']!r:.40} is not silu")
    if described.get("attention_bias") or described.get("mlp_bias"):
        raise MalformedError(CONFIG, "it has biases, which this decoder lacks")
    rotary = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if not isinstance(rotary, dict) or rotary.get("rope_type", rotary.get("type", "default")) != "default":
        raise MalformedError(CONFIG, "its rotary positions are scaled, which this decoder does not do")
    heads = _whole(described, "num_attention_heads")
    theta = rotary.get("rope_theta", described.get("rope_theta", 10_000.0))
    eps = described.get("rms_norm_eps", 1e-6)
    if type(theta) not in (int, float) or type(eps) not in (int, float) or not (theta > 0 and eps > 0):
        raise MalformedError(CONFIG, "rope_theta and rms_norm_eps have to be positive numbers")
    try:
        config = Config(
            vocab=_whole(described, "vocab_size"),
            hidden=_whole(described, "hidden_size"),
            intermediate=_whole(described, "intermediate_size"),
            layers=_whole(described, "num_hidden_layers"),
            heads=heads,
            kv_heads=_whole(described, "num_key_value_heads", heads),
            rope_theta=float(theta),
            rms_eps=float(eps),
            tied=described.get("tie_word_embeddings", False) is True,
        )
    except (UsageError, OverflowError) as error:
        raise MalformedError(CONFIG, f"{error}") from None
    if described.get("head_dim") not in (None, config.head_dim):
        why = (
            f"heads of {described['head_dim']!r:.40} dimensions, and {config.hidden} over {heads} are {config.head_dim}"
        )
        raise MalformedError(CONFIG, why)
    return config


def describe(config: Config, positions: int, named: Mapping[str, int]) -> dict[str, Any]:
    """The ``config.json`` of a shape: what :func:`config_of` reads, and the transformers library with it.

    Args:
        config: the shape.
        positions: the longest text that the model is meant for, in tokens.
        named: ids of special tokens, by the names that such a file has for them (``eos_token_id``).
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": positions,
        "torch_dtype": "float32",
        **named,
    }


def _whole(described: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = described.get(name, default)
    if type(value) is not int or not 0 < value < 2**31:
        raise MalformedError(CONFIG, f"{name} is {value!r:.40}, and no positive integer")
    return value


def _tensors(directory: Path) -> dict[str, str]:
    """By tensor the file that holds it."""
    if not (directory / INDEX).exists():
        return dict.fromkeys(weights.places(directory / WHOLE), WHOLE)
    mapped = _read_json(directory / INDEX, "").get("weight_map")
    if type(mapped) is not dict or not mapped:
        raise MalformedError(INDEX, "it has no weight_map")
    for name, file in mapped.items():
        if type(file) is not str or Path(file).name != file or not file.endswith(".safetensors"):
            raise MalformedError(
                INDEX, f"tensor {name:.120} is in {file!r:.80}, which is no safetensors file beside it"
            )
    return mapped


def _inline_template(described: Mapping[str, Any]) -> bytes | None:
    template = described.get("chat_template")
    return template.encode(errors="replace") if type(template) is str else None


def _bytes(path: Path, hint: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(JSON_LIMIT + 1)
    except FileNotFoundError:
        raise NotFoundError(f"file {path}", "there is no such file", hint) from None
    except OSError as error:
        raise of_system(error, f"reading {path}") from None
    if len(data) > JSON_LIMIT:
        raise MalformedError(f"file {path}", f"longer than {JSON_LIMIT} bytes")
    return data


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    try:
        value = json.loads(_bytes(path, hint))
    except CkptStoreError:
        raise
    except (ValueError, RecursionError):
        raise MalformedError(f"file {path}", "not JSON") from None
    if type(value) is not dict:
        raise MalformedError(f"file {path}", "no JSON object")
    return value
