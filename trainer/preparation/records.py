"""Frozen dataclasses as canonical JSON and back, strictly by their annotations; a float is text by ``float.hex``."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ckptstore.errors import MalformedError, UsageError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.fields import Fields, as_list, parse_digest

T = TypeVar("T")


def to_json(value: object) -> Json:
    """The JSON of a record: dataclasses, tuples, digests, texts, integers, booleans, None, and finite floats."""
    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[return-value]
    if type(value) is float and math.isfinite(value):
        return value.hex()
    if type(value) is Digest:
        return str(value)
    if type(value) is tuple:
        return [to_json(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    raise MalformedError(f"value {value!r:.40}", f"of type {type(value).__name__}, has no place in a record")


def from_json(kind: type[T], value: Json, where: str) -> T:
    """The record of type ``kind``.

    Raises:
        MalformedError: a field is missing, unknown, or not of its annotated type; the message says where.
    """
    result: T = _read(kind, value, where)
    return result


def encode(value: object) -> bytes:
    """Canonical bytes of a record."""
    return canonical.encode(to_json(value))


def parse(kind: type[T], data: bytes, limit: int, where: str) -> T:
    """The record of type ``kind`` in canonical bytes of at most ``limit``. MalformedError if it is not one."""
    return from_json(kind, canonical.decode(data, limit), where)


def _read(kind: Any, value: Json, where: str) -> Any:
    if is_dataclass(kind) and kind is not Digest:
        return _record(kind, value, where)
    if kind is Digest:
        return parse_digest(value, where)
    if kind is float:
        return exact_float(value, where)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), as_list(value, where), where)
    if get_origin(kind) is UnionType:
        (other,) = (choice for choice in get_args(kind) if choice is not NoneType)
        return None if value is None else _read(other, value, where)
    if type(value) is not kind:
        raise MalformedError(where, f"{value!r:.40} is not of type {kind.__name__}")
    return value


def _record(kind: Any, value: Json, where: str) -> Any:
    given = Fields(value, where)
    read = {name: _read(hint, given.take(name), f"{where}.{name}") for name, hint in _hints(kind)}
    given.end()
    try:
        return kind(**read)
    except UsageError as error:
        raise MalformedError(where, str(error)) from None


def _tuple(kinds: tuple[Any, ...], items: list[Json], where: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        return tuple(_read(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if len(kinds) != len(items):
        raise MalformedError(where, f"{len(items)} items, expected {len(kinds)}")
    return tuple(_read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, items, strict=True)))


def exact_float(value: object, where: str) -> float:
    """The finite float of its one text in hexadecimal, as ``float.hex`` writes it. MalformedError for any other."""
    try:
        number = float.fromhex(value) if type(value) is str else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number.hex() != value:
        raise MalformedError(where, f"{value!r:.40} is not a finite float in hexadecimal")
    return number


@cache
def _hints(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))
