"""The byte tokenizer: 256 bytes and four special tokens, kept as a tokenizer directory of the usual files.

``tokenizer.json`` has the layout that the ``tokenizers`` library reads (a byte-level BPE without merges).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore.errors import MalformedError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from trainer.data.conversation import Conversations, Encoded
from trainer.data.template import TEMPLATE, compile_template

BOS, SEP, EOS, PAD = 256, 257, 258, 259
VOCABULARY = 260
SPECIALS = {BOS: "<|bos|>", SEP: "<|sep|>", EOS: "<|eos|>", PAD: "<|pad|>"}

_SPECIAL_IDS = {text: token for token, text in SPECIALS.items()}
_SPECIALS_MAP: dict[str, Json] = {
    "bos_token": SPECIALS[BOS],
    "sep_token": SPECIALS[SEP],
    "eos_token": SPECIALS[EOS],
    "pad_token": SPECIALS[PAD],
}
ADDED: list[Json] = [
    {
        "id": token,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    for token, text in SPECIALS.items()
]
"""The special tokens as ``tokenizer.json`` lists them."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """A :class:`~trainer.data.tokenizer.Tokenizer` of bytes."""

    identity: Digest
    _conversations: Conversations = field(repr=False, compare=False)

    @property
    def end(self) -> int:
        """EOS."""
        return EOS

    @property
    def pad(self) -> int:
        """PAD."""
        return PAD

    @property
    def vocabulary(self) -> int:
        """260."""
        return VOCABULARY

    def special(self, role: str) -> int | None:
        """BOS, SEP, EOS or PAD."""
        name = _SPECIALS_MAP.get(role)
        return _SPECIAL_IDS[name] if isinstance(name, str) else None

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text: its UTF-8 bytes, and one id for each special token in it."""
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``: bytes as UTF-8, a broken sequence as U+FFFD, special tokens by their names."""
        parts: list[bytes] = []
        for token in ids:
            if not 0 <= token < VOCABULARY:
                raise MalformedError(f"token {token}", f"not in [0, {VOCABULARY})")
            parts.append(SPECIALS[token].encode() if token in SPECIALS else bytes([token]))
        return b"".join(parts).decode("utf-8", errors="replace")

    def prompt(self, turns: Sequence[str]) -> tuple[int, ...]:
        """As :meth:`Conversations.prompt`."""
        return self._conversations.prompt(turns)

    def document(self, turns: Sequence[str]) -> Encoded:
        """As :meth:`Conversations.document`."""
        return self._conversations.document(turns)


def encode(text: str) -> list[int]:
    """Ids of a text: its UTF-8 bytes, and one id for each special token in it."""
    ids: list[int] = []
    while text:
        starts = {text.find(special): special for special in _SPECIAL_IDS if special in text}
        if not starts:
            return ids + list(text.encode())
        start = min(starts)
        ids += [*text[:start].encode(), _SPECIAL_IDS[starts[start]]]
        text = text[start + len(starts[start]) :]
    return ids


def files(template: bytes) -> dict[str, bytes]:
    """The files of the tokenizer directory by name; the same bytes always."""
    byte_level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": ADDED,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(alphabet()), "merges": []},
    }
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **_SPECIALS_MAP}
    return {
        TEMPLATE: template,
        "special_tokens_map.json": canonical.encode(_SPECIALS_MAP),
        "tokenizer.json": canonical.encode(tokenizer),
        "tokenizer_config.json": canonical.encode(config),
    }


def byte_tokenizer(described: Mapping[str, object], template: bytes, identity: Digest) -> ByteTokenizer:
    """The tokenizer of a directory whose special tokens are those of this one.

    Args:
        described: what its JSON files say, by name.
        template: its chat template.
        identity: of all its files.

    Raises:
        MalformedError: the files do not describe this byte tokenizer, or the template does not compile.
    """
    for name, data in files(template).items():
        if name != TEMPLATE and described.get(name) != canonical.decode(data, len(data)):
            raise MalformedError(f"tokenizer file {name}", "does not describe the byte tokenizer of this release")
    conversations = Conversations(compile_template(template, _SPECIALS_MAP), encode, tuple(_SPECIAL_IDS), EOS)
    return ByteTokenizer(identity, conversations)


def alphabet() -> list[tuple[str, int]]:
    """Byte-level BPE spells each byte as one visible character: itself where it is printable, else from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [(chr(byte if byte in printable else 256 + others.index(byte)), byte) for byte in range(256)]
