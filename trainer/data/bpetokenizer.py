"""Trained vocabularies, by the ``tokenizers`` library from a ``tokenizer.json``, which says how texts are divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ckptstore.errors import CkptStoreError, MalformedError, NotFoundError
from ckptstore.format.digest import Digest
from trainer.data.conversation import Conversations, Encoded
from trainer.data.template import compile_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

T = TypeVar("T")

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class BpeTokenizer:
    """A :class:`~trainer.data.tokenizer.Tokenizer` of a trained vocabulary, of which ``vocabulary`` is the size."""

    identity: Digest
    end: int
    pad: int
    vocabulary: int
    _named: Mapping[str, int] = field(repr=False, compare=False)
    _library: Library = field(repr=False, compare=False)
    _conversations: Conversations = field(repr=False, compare=False)

    def special(self, role: str) -> int | None:
        """The id of the token that the files name for ``role``; None if they name none."""
        return self._named.get(role)

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text, in which the texts of added tokens stand for these; nothing is put around it."""
        return _encode(self._library, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens by their names. MalformedError for an id that is not in the vocabulary."""
        if any(not 0 <= token < self.vocabulary for token in ids):
            raise MalformedError("tokens", f"not all in [0, {self.vocabulary})")
        text: str = _guarded("tokens", lambda: self._library.decode(list(ids), skip_special_tokens=False))
        return text

    def prompt(self, turns: Sequence[str]) -> tuple[int, ...]:
        """As :meth:`Conversations.prompt`."""
        return self._conversations.prompt(turns)

    def document(self, turns: Sequence[str]) -> Encoded:
        """As :meth:`Conversations.document`."""
        return self._conversations.document(turns)


def bpe_tokenizer(
    tokenizer_json: bytes, described: Mapping[str, object], template: bytes, identity: Digest
) -> BpeTokenizer:
    """The tokenizer of a directory.

    Args:
        tokenizer_json: of the directory.
        described: what its two smaller JSON files say, of which ``special_tokens_map.json`` goes before.
        template: its chat template.
        identity: of all its files.

    Raises:
        NotFoundError: the tokenizers library is not installed.
        MalformedError: the library refuses the file, no end token is named, a named one is not in the vocabulary, or
            the template does not compile.
    """
    library = _load(tokenizer_json)
    named = _named_tokens(described)
    found = {role: library.token_to_id(text) for role, text in named.items()}
    ids: dict[str, int] = {role: token for role, token in found.items() if token is not None}
    unknown = sorted(found.keys() - ids.keys())
    if unknown or "eos_token" not in ids:
        why = f"{unknown[0]} is not in the vocabulary" if unknown else "no eos_token is named, so no answer would end"
        raise MalformedError("tokenizer directory", why)
    end = ids["eos_token"]
    added = library.get_added_tokens_decoder()
    specials = sorted({*named.values(), *(one.content for one in added.values() if one.special)} - {""})
    vocabulary = max(library.get_vocab(with_added_tokens=True).values()) + 1
    conversations = Conversations(
        compile_template(template, named), lambda text: _encode(library, text), tuple(specials), end
    )
    # Padding stands behind all that is learned and weighs nothing, so any token serves where none is named.
    return BpeTokenizer(identity, end, ids.get("pad_token", end), vocabulary, ids, library, conversations)


def _load(data: bytes) -> Library:
    try:
        import tokenizers
    except ModuleNotFoundError:
        hint = "pip install tokenizers, or ckptstore[trainer]"
        raise NotFoundError("tokenizers library", "this tokenizer needs it, and it is not installed", hint) from None
    library: Library = _guarded("tokenizer file tokenizer.json", lambda: tokenizers.Tokenizer.from_buffer(data))
    library.no_truncation()
    library.no_padding()
    return library


def _encode(library: Library, text: str) -> list[int]:
    ids: list[int] = _guarded("text", lambda: library.encode(text, add_special_tokens=False).ids)
    return ids


def _named_tokens(described: Mapping[str, object]) -> dict[str, str]:
    """The special tokens that the files name, by role. A token is a text, or an object that holds one."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        given = described.get(name)
        if not isinstance(given, dict):
            raise MalformedError(f"tokenizer file {name}", "no JSON object")
        for role in _NAMED:
            value = given.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if type(text) is str and text:
                found[role] = text
    return found


def _guarded(what: str, work: Callable[[], T]) -> T:
    """The library raises plain exceptions, and where it gives up on an input, a panic that is not even one."""
    try:
        return work()
    except (CkptStoreError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise MalformedError(what, f"the tokenizers library refuses it: {error!s:.300}") from None
