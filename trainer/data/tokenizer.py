"""Tokenizer directories: the usual files, one identity over all of them, and the tokenizer that they describe.

Every document, in training as in generation, is rendered by the directory's ``chat_template.jinja``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from trainer.data.bpetokenizer import bpe_tokenizer
from trainer.data.bytetokenizer import ADDED, byte_tokenizer
from trainer.data.conversation import Encoded
from trainer.data.template import TEMPLATE

REQUIRED = (TEMPLATE, "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")


class Tokenizer(Protocol):
    """A loaded tokenizer directory."""

    @property
    def identity(self) -> Digest:
        """BLAKE3 of the canonical listing of the directory's files."""

    @property
    def end(self) -> int:
        """The id by which an answer ends."""

    @property
    def pad(self) -> int:
        """The id that fills up rows."""

    @property
    def vocabulary(self) -> int:
        """Ids are below it."""

    def special(self, role: str) -> int | None:
        """The id of the token that the files name for a role such as ``bos_token``; None if they name none."""

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text, in which the text of a special token stands for it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens by their names. MalformedError for an id beyond the vocabulary."""

    def prompt(self, turns: Sequence[str]) -> tuple[int, ...]:
        """Ids up to where the next answer starts; ``turns`` alternate and end with a user turn."""

    def document(self, turns: Sequence[str]) -> Encoded:
        """The whole conversation; as :meth:`trainer.data.conversation.Conversations.document`."""


def load(directory: Path) -> Tokenizer:
    """The tokenizer of a directory. Raises as :func:`from_files`."""
    present = sorted(path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else []
    return from_files({path.relative_to(directory).as_posix(): path.read_bytes() for path in present})


def from_files(contents: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of a directory's files, by path in it: the one of bytes if it has its special tokens.

    Raises:
        RefusedError: a required file is absent; all that are absent are named.
        MalformedError: the files do not describe a tokenizer, or the template does not compile.
        NotFoundError: the tokenizer is one of a trained vocabulary, and the tokenizers library is not installed.
    """
    absent = [name for name in REQUIRED if name not in contents]
    if absent:
        hint = "copy it from the prepared inputs; every file of the tokenizer directory belongs to it"
        raise RefusedError("tokenizer directory", f"{', '.join(absent)} missing", hint)
    described = {name: _json(name, contents[name]) for name in REQUIRED if name != TEMPLATE}
    template, known = contents[TEMPLATE], identity(contents)
    tokenizer = described["tokenizer.json"]
    if isinstance(tokenizer, dict) and tokenizer.get("added_tokens") == ADDED:
        return byte_tokenizer(described, template, known)
    return bpe_tokenizer(contents["tokenizer.json"], described, template, known)


def identity(contents: Mapping[str, bytes]) -> Digest:
    """BLAKE3 of the canonical listing of a tokenizer directory: each file's path, size and digest, sorted by path."""
    listing: list[Json] = [[name, len(data), str(Digest.of(data))] for name, data in sorted(contents.items())]
    return Digest.of(canonical.encode(listing))


def _json(name: str, data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedError(f"tokenizer file {name}", "not JSON") from None
