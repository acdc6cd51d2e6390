"""A Llama-shaped model in a GGUF file as starting weights: its names, its order of rows, its vocabulary."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from ckptstore.errors import MalformedError, UsageError
from ckptstore.format.digest import Digest
from trainer.compute.config import EMBEDDING, FINAL_NORM, UNTIED_HEAD, Config, param_table
from trainer.compute.weights import StoredTensor
from trainer.data.template import TEMPLATE
from trainer.starting.gguf import Gguf, read_header

ARCHITECTURE = "llama"
SPECIAL = 3  # type of a token that is never made of text ("control")

_ENDS = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", UNTIED_HEAD: "output.weight"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Pre-tokenizers by the name in a file, as the tokenizers library describes them. All are followed by bytes.
_PRE_TOKENIZERS = {"smollm": [{"type": "Digits", "individual_digits": True}], "gpt-2": []}
_MOST_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A :class:`~trainer.starting.source.Source` of a GGUF file. Every tensor is given as FP32."""

    file: Gguf
    config: Config
    notice: str

    @property
    def known(self) -> Digest | None:
        """None: they go by the digest of their tensors."""
        return None

    def tokenizer(self) -> dict[str, bytes]:
        """The byte-level BPE of the file as the tokenizers library reads it, and its chat template.

        Raises:
            MalformedError: the file has no such tokenizer, or one that contradicts itself.
        """
        return _tokenizer_files(self.file)

    def dtype(self, name: str) -> str:
        """``F32``."""
        return "F32"

    def read(self, name: str) -> StoredTensor:
        """The tensor as FP32; rows of queries and keys stand in the order of the public checkpoints.

        Raises:
            NotFoundError: it is not there.
            CorruptError: a value is infinite or NaN.
        """
        from trainer.starting.dequantise import dequantise  # NumPy, which no other process needs

        stored = stored_name(name)
        data = self.file.read(stored)
        place = self.file.places[stored]
        values = dequantise(stored, place.encoding.name, data, place.shape)
        heads = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            # Such files interleave the two halves of each head's rotary pairs.
            pairs = values.reshape(heads, 2, -1) if values.ndim == 1 else values.reshape(heads, -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(place.shape)
        return StoredTensor("F32", place.shape, values.astype("<f4", copy=False).tobytes())


def open_gguf(path: Path, notice: str) -> GgufSource:
    """The model in a file, of which the header alone is read now.

    Raises:
        NotFoundError: there is no such file.
        MalformedError: it holds no model of this shape: what is missing, or what this decoder does not have, is named.
        CorruptError: the file ends before its data does.
        BackendError: it cannot be read.
    """
    file = read_header(path)
    what = f"weights {path.name}"
    if file.text("general.architecture") != ARCHITECTURE:
        why = f"it is of architecture {file.text('general.architecture')!r:.40}, and only {ARCHITECTURE} is read"
        raise MalformedError(what, why)
    config = _config(file, what)
    expected = {stored_name(name): shape for name, shape in param_table(config)}
    other = sorted(file.places.keys() - expected.keys())
    absent = sorted(expected.keys() - file.places.keys())
    if other or absent:
        why = f"tensors that this decoder lacks: {other[:4]}" if other else f"tensors are missing: {absent[:4]}"
        raise MalformedError(what, why)
    for name, shape in expected.items():
        if file.places[name].shape != shape:
            found = list(file.places[name].shape)
            raise MalformedError(what, f"tensor {name} has shape {found}, its metadata say {list(shape)}")
    return GgufSource(file, config, notice)


def stored_name(name: str) -> str:
    """What such a file calls the tensor that the public checkpoints call ``name``."""
    if name in _ENDS:
        return _ENDS[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.weight"


def _config(file: Gguf, what: str) -> Config:
    def key(name: str) -> str:
        return f"{ARCHITECTURE}.{name}"

    if file.metadata.get(key("rope.scaling.type"), "none") != "none":
        raise MalformedError(what, "its rotary positions are scaled, which this decoder does not do")
    if _ENDS[EMBEDDING] not in file.places:
        raise MalformedError(what, f"tensor {_ENDS[EMBEDDING]} is missing")
    heads = file.whole(key("attention.head_count"))
    try:
        config = Config(
            vocab=file.places[_ENDS[EMBEDDING]].shape[0],
            hidden=file.whole(key("embedding_length")),
            intermediate=file.whole(key("feed_forward_length")),
            layers=file.whole(key("block_count")),
            heads=heads,
            kv_heads=file.whole(key("attention.head_count_kv"))
            if key("attention.head_count_kv") in file.metadata
            else heads,
            rope_theta=_decimal(file.number(key("rope.freq_base"))) if key("rope.freq_base") in file.metadata else 1e4,
            rms_eps=_decimal(file.number(key("attention.layer_norm_rms_epsilon"))),
            tied=_ENDS[UNTIED_HEAD] not in file.places,
        )
    except UsageError as error:
        raise MalformedError(what, f"its metadata do not fit together: {error}") from None
    for name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if file.metadata.get(key(name), config.head_dim) != config.head_dim:
            why = f"{name} is {file.metadata[key(name)]!r:.40}, and heads have {config.head_dim} dimensions"
            raise MalformedError(what, why)
    return config


def _decimal(number: float) -> float:
    """The shortest decimal that rounds to the FP32 ``number``: what the file was made from."""
    for digits in range(1, 10):
        candidate = float(f"{number:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", number):
            return candidate
    return number


def _tokenizer_files(file: Gguf) -> dict[str, bytes]:
    what = f"tokenizer of {file.path.name}"
    if file.text("tokenizer.ggml.model") != "gpt2":
        raise MalformedError(
            what, f"of kind {file.text('tokenizer.ggml.model')!r:.40}, and only byte-level BPE is read"
        )
    before = file.text("tokenizer.ggml.pre") if "tokenizer.ggml.pre" in file.metadata else "gpt-2"
    if before not in _PRE_TOKENIZERS:
        raise MalformedError(
            what, f"it divides texts as {before!r:.40} does, and only {', '.join(_PRE_TOKENIZERS)} are known"
        )
    tokens, kinds = file.texts("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    if type(kinds) is not tuple or len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise MalformedError(what, "its tokens are not distinct, or their types are not as many")
    specials = {token: text for token, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == SPECIAL}
    named: dict[str, str] = {}
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if f"tokenizer.ggml.{key}_token_id" in file.metadata:
            token = file.whole(f"tokenizer.ggml.{key}_token_id")
            if token not in specials:
                raise MalformedError(what, f"{role} {token} is no special token")
            named[role] = specials[token]
    return {
        TEMPLATE: file.text("tokenizer.chat_template").encode(),
        "special_tokens_map.json": _encode(named),
        "tokenizer.json": _encode(_description(file, what, tokens, specials, _PRE_TOKENIZERS[before])),
        "tokenizer_config.json": _encode(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": file.whole(f"{ARCHITECTURE}.context_length"),
                "clean_up_tokenization_spaces": False,
                **named,
            }
        ),
    }


def _description(
    file: Gguf, what: str, tokens: tuple[str, ...], specials: dict[int, str], before: list[dict[str, object]]
) -> dict[str, object]:
    """The contents of ``tokenizer.json``."""
    merges = [merge.split(" ") for merge in file.texts("tokenizer.ggml.merges")]
    known = set(tokens)
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= known:
            raise MalformedError(what, f"merge {' '.join(merge)!r:.80} does not join two of its tokens to a third")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": text, **flags} for token, text in specials.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*before, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": merges,
        },
    }


def _encode(value: object) -> bytes:
    """JSON in the order given: the order of a vocabulary is that of its ids."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
