"""The byte tokenizer: 256 bytes and four special tokens, kept as a tokenizer directory of the usual files.

``tokenizer.json`` has the layout that the ``tokenizers`` library reads (a byte-level BPE without merges). Every
document, in training as in generation, is rendered by the directory's ``chat_template.jinja``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest

BOS, SEP, EOS, PAD = 256, 257, 258, 259
VOCABULARY = 260
SPECIALS = {BOS: "<|bos|>", SEP: "<|sep|>", EOS: "<|eos|>", PAD: "<|pad|>"}

TEMPLATE = "chat_template.jinja"
REQUIRED = (TEMPLATE, "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")

_ROLES = ("user", "assistant")
_SPECIAL_IDS = {text: token for token, text in SPECIALS.items()}
_SPECIALS_MAP: dict[str, Json] = {
    "bos_token": SPECIALS[BOS],
    "sep_token": SPECIALS[SEP],
    "eos_token": SPECIALS[EOS],
    "pad_token": SPECIALS[PAD],
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A rendered document: token ids, and for each whether it is learned (1, an answer or its EOS) or given (0)."""

    ids: tuple[int, ...]
    learned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """A loaded tokenizer directory; ``identity`` is the BLAKE3 of the canonical listing of its files."""

    identity: Digest
    _render: Callable[[list[dict[str, str]]], str] = field(repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text: its UTF-8 bytes, and one id for each special token in it."""
        ids: list[int] = []
        while text:
            starts = {text.find(special): special for special in _SPECIAL_IDS if special in text}
            if not starts:
                return ids + list(text.encode())
            start = min(starts)
            ids += [*text[:start].encode(), _SPECIAL_IDS[starts[start]]]
            text = text[start + len(starts[start]) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``: bytes as UTF-8, a broken sequence as U+FFFD, special tokens by their names."""
        parts: list[bytes] = []
        for token in ids:
            if not 0 <= token < VOCABULARY:
                raise MalformedError(f"token {token}", f"not in [0, {VOCABULARY})")
            parts.append(SPECIALS[token].encode() if token in SPECIALS else bytes([token]))
        return b"".join(parts).decode("utf-8", errors="replace")

    def prompt(self, turns: Sequence[str]) -> tuple[int, ...]:
        """Ids up to where the next answer starts; ``turns`` alternate and end with a user turn."""
        if len(turns) % 2 != 1:
            raise MalformedError("prompt", f"{len(turns)} turns do not end with a user turn")
        return tuple(self.encode(self._text(turns)))

    def document(self, turns: Sequence[str]) -> Encoded:
        """The whole conversation, in which each answer with its EOS is learned; ``turns`` alternate, the user first.

        Raises:
            RefusedError: a turn holds a special token's text, or the template does not render a conversation as the
                continuation of its own beginning, so that what is learned could not be told from what is given.
        """
        ids: tuple[int, ...] = ()
        learned: list[int] = []
        for count in range(1, len(turns) + 1):
            longer = tuple(self.encode(self._text(turns[:count])))
            if longer[: len(ids)] != ids:
                raise RefusedError(TEMPLATE, f"turn {count} changes what was rendered before it")
            learned += [1 - count % 2] * (len(longer) - len(ids))
            ids = longer
        return Encoded(ids, tuple(learned))

    def _text(self, turns: Sequence[str]) -> str:
        for turn in turns:
            found = [special for special in _SPECIAL_IDS if special in turn]
            if found:
                raise RefusedError(f"turn {turn!r:.60}", f"holds the special token {found[0]}", "leave it out")
        return self._render([{"role": _ROLES[i % 2], "content": turn} for i, turn in enumerate(turns)])


def files(template: bytes) -> dict[str, bytes]:
    """The files of the tokenizer directory by name; the same bytes always."""
    added: list[Json] = [
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
    byte_level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(_alphabet()), "merges": []},
    }
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **_SPECIALS_MAP}
    return {
        TEMPLATE: template,
        "special_tokens_map.json": canonical.encode(_SPECIALS_MAP),
        "tokenizer.json": canonical.encode(tokenizer),
        "tokenizer_config.json": canonical.encode(config),
    }


def load(directory: Path) -> ByteTokenizer:
    """The tokenizer of a directory. Raises as :func:`from_files`."""
    present = sorted(path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else []
    return from_files({path.relative_to(directory).as_posix(): path.read_bytes() for path in present})


def from_files(contents: Mapping[str, bytes]) -> ByteTokenizer:
    """The tokenizer of a directory's files, by path in it.

    Raises:
        RefusedError: a required file is absent; all that are absent are named.
        MalformedError: the files do not describe this byte tokenizer, or the template does not compile.
    """
    absent = [name for name in REQUIRED if name not in contents]
    if absent:
        hint = "copy it from the prepared inputs; every file of the tokenizer directory belongs to it"
        raise RefusedError("tokenizer directory", f"{', '.join(absent)} missing", hint)
    expected = files(contents[TEMPLATE])
    for name in REQUIRED:
        if _json(name, contents[name]) != _json(name, expected[name]):
            raise MalformedError(f"tokenizer file {name}", "does not describe the byte tokenizer of this release")
    return ByteTokenizer(identity(contents), _compile(contents[TEMPLATE]))


def identity(contents: Mapping[str, bytes]) -> Digest:
    """BLAKE3 of the canonical listing of a tokenizer directory: each file's path, size and digest, sorted by path."""
    listing: list[Json] = [[name, len(data), str(Digest.of(data))] for name, data in sorted(contents.items())]
    return Digest.of(canonical.encode(listing))


def _alphabet() -> list[tuple[str, int]]:
    """Byte-level BPE spells each byte as one visible character: itself where it is printable, else from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [(chr(byte if byte in printable else 256 + others.index(byte)), byte) for byte in range(256)]


def _json(name: str, data: bytes) -> object:
    if name == TEMPLATE:
        return data
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedError(f"tokenizer file {name}", "not JSON") from None


def _compile(template: bytes) -> Callable[[list[dict[str, str]]], str]:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    class Environment(ImmutableSandboxedEnvironment):
        """Without arithmetic that makes much of little: a template joins texts."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: object, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and type(left) is int and type(right) is int and right:
                return left % right
            raise TemplateError(f"a template cannot use {operator}")

    environment = Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.globals["raise_exception"] = refuse
    try:
        compiled = environment.from_string(template.decode())
    except Exception as error:  # a template is compiled as a program, and can be wrong in all the ways of one
        raise MalformedError(TEMPLATE, f"{type(error).__name__}: {error!s:.300}") from None

    def render(messages: list[dict[str, str]]) -> str:
        try:
            text = compiled.render(messages=messages, add_generation_prompt=True, **_SPECIALS_MAP)
            text.encode()
            return text
        except Exception as error:  # as above, while it runs
            raise RefusedError(TEMPLATE, f"{type(error).__name__}: {error!s:.300}") from None

    return render
