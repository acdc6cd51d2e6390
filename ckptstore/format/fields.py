"""Reading the fields of a document strictly: every field known, none missing, each of its exact type (F-18)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ckptstore.errors import MalformedError, UnsupportedVersionError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest

T = TypeVar("T")

FORMAT = 1
DOCUMENT_LIMIT = 4 * 2**20


class Fields:
    """The fields of one JSON object; each is taken once, and :meth:`end` refuses what was not taken."""

    __slots__ = ("_left", "where")

    def __init__(self, value: Json, where: str) -> None:
        if type(value) is not dict:
            raise MalformedError(where, "not an object")
        self._left = dict(value)
        self.where = where

    def take(self, name: str) -> Json:
        """The raw value of a required field."""
        if name not in self._left:
            raise MalformedError(self.where, f"field {name!r} is missing")
        return self._left.pop(name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not yet taken."""
        return name in self._left

    def text(self, name: str, *, empty: bool = False) -> str:
        """A string, not empty unless ``empty``."""
        value = self.take(name)
        if type(value) is not str or (not value and not empty):
            raise MalformedError(self.where, f"field {name!r} is not a text")
        return value

    def choice(self, name: str, choices: Iterable[str]) -> str:
        """A string out of a closed set."""
        value = self.take(name)
        if type(value) is not str or value not in choices:
            raise MalformedError(self.where, f"field {name!r} is {value!r:.40}, not one of {', '.join(choices)}")
        return value

    def count(self, name: str, least: int = 0) -> int:
        """An integer of at least ``least``."""
        value = self.take(name)
        if type(value) is not int or value < least:
            raise MalformedError(self.where, f"field {name!r} is not an integer of at least {least}")
        return value

    def optional_count(self, name: str) -> int | None:
        """An integer of at least 0, or null."""
        return None if self._left.get(name, 0) is None and self.take(name) is None else self.count(name)

    def digest(self, name: str) -> Digest:
        """A digest in its one text form, ``b3:<hex>``."""
        return parse_digest(self.take(name), self.where)

    def optional_digest(self, name: str) -> Digest | None:
        """A digest, or null."""
        value = self.take(name)
        return None if value is None else parse_digest(value, self.where)

    def items(self, name: str, read: Callable[[Json], T]) -> tuple[T, ...]:
        """A list, each item read by ``read``."""
        return tuple(read(item) for item in as_list(self.take(name), self.where))

    def end(self) -> None:
        """Refuse unknown fields."""
        if self._left:
            raise MalformedError(self.where, f"unknown field {sorted(self._left)[0]!r:.60}")


def as_list(value: Json, where: str) -> list[Json]:
    """``value`` if it is a list, else MalformedError."""
    if type(value) is not list:
        raise MalformedError(where, "not a list where one is expected")
    return value


def parse_digest(value: Json, where: str) -> Digest:
    """A digest as documents write it: with its ``b3:`` prefix."""
    if type(value) is not str or not value.startswith("b3:"):
        raise MalformedError(where, f"{value!r:.40} is not a digest of the form b3:<hex>")
    return Digest.parse(value)


def open_document(data: bytes, kind: str, limit: int = DOCUMENT_LIMIT) -> Fields:
    """The fields of a canonical document that says it is of ``kind`` and of this format version.

    Raises:
        MalformedError: not canonical, or of another kind than its referrer expects.
        UnsupportedVersionError: of a format version that this release does not know.
    """
    fields = Fields(canonical.decode(data, limit), kind)
    found = fields.take("kind")
    if found != kind:
        raise MalformedError(kind, f"document is of kind {found!r:.40}, expected {kind!r}")
    version = fields.take("format")
    if version != FORMAT or type(version) is not int:
        raise UnsupportedVersionError(kind, f"format {version!r:.20}; this release reads format {FORMAT}")
    return fields


def close_document(kind: str, body: dict[str, Json], limit: int = DOCUMENT_LIMIT) -> bytes:
    """Canonical bytes of a document of ``kind`` with the given fields.

    Raises:
        MalformedError: no canonical encoding, or longer than the limit of its kind.
    """
    data = canonical.encode({"kind": kind, "format": FORMAT, **body})
    if len(data) > limit:
        raise MalformedError(f"{kind} document", f"{len(data)} bytes, over its limit of {limit}")
    return data
