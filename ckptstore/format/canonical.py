"""Canonical JSON (F-12 to F-17): one value has one encoding, and bytes are accepted only if re-encoding gives them
back."""

from __future__ import annotations

import json
from typing import NoReturn, TypeAlias

from ckptstore.errors import MalformedError

Json: TypeAlias = "bool | int | str | list[Json] | dict[str, Json] | None"

MAX_DEPTH = 64
MAX_INT = 2**53 - 1


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)


def encode(value: Json) -> bytes:
    """Canonical bytes of ``value``: sorted keys, no space, no float, integers within 2^53 - 1, nesting at most 64.

    Raises:
        MalformedError: the value has no canonical encoding.
    """
    _check(value, 0)
    try:
        return _ENCODER.encode(value).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start]
        raise MalformedError("text", f"lone surrogate U+{ord(bad):04X} cannot be stored", "use valid Unicode") from None


def decode(data: bytes, limit: int) -> Json:
    """The value of canonical bytes.

    Args:
        data: at most ``limit`` bytes of UTF-8.
        limit: the size limit of this kind of document, in bytes.

    Raises:
        MalformedError: too long, not JSON, or not canonical.
    """
    if len(data) > limit:
        raise MalformedError("document", f"longer than its limit of {limit} bytes")
    try:
        value: Json = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_no_float,
            parse_constant=_no_float,
            parse_int=_small_int,
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise MalformedError("document", f"not JSON ({type(error).__name__})") from None
    if encode(value) != data:
        raise MalformedError("document", "not canonical: re-encoding gives other bytes")
    return value


def _check(value: object, depth: int) -> None:
    """Refuse what canonical JSON does not have. Exact types only: a subclass could print itself differently."""
    kind = type(value)
    if value is None or kind is bool:
        return
    if kind is int:
        if not -MAX_INT <= value <= MAX_INT:  # type: ignore[operator]
            raise MalformedError("integer", "beyond 2^53 - 1", "write it as a typed int")
        return
    if kind is str:
        return
    if depth >= MAX_DEPTH:
        raise MalformedError("document", f"nested deeper than {MAX_DEPTH}")
    if kind is list:
        for item in value:  # type: ignore[attr-defined]
            _check(item, depth + 1)
        return
    if kind is dict:
        for key, item in value.items():  # type: ignore[attr-defined]
            if type(key) is not str:
                raise MalformedError("document", f"a key of type {type(key).__name__}")
            _check(item, depth + 1)
        return
    raise MalformedError("document", f"a value of type {kind.__name__} has no canonical JSON")


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise MalformedError("document", "a key appears twice")
    return value


def _no_float(text: str) -> NoReturn:
    raise MalformedError("document", f"holds the number {text[:40]}; numbers are integers only")


def _small_int(text: str) -> int:
    if len(text) > 17:
        raise MalformedError("document", f"integer {text[:40]} beyond 2^53 - 1")
    return int(text)
