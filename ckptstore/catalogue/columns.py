"""Types of columns that take and give back the same values in every kind of database."""

from __future__ import annotations

import re

from sqlalchemy import BigInteger, Dialect, Integer, Text
from sqlalchemy.types import TypeDecorator

_ESCAPE = re.compile(r"\\[\\0]")


class _WithoutNull(TypeDecorator[str]):
    """Text where U+0000 cannot be stored: written ``\\0``, and a backslash twice. Names of tensors may hold both."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None else value.replace("\\", "\\\\").replace("\0", "\\0")

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None else _ESCAPE.sub(lambda found: "\0" if found[0] == "\\0" else "\\", value)


TEXT = Text().with_variant(_WithoutNull(), "postgresql")
"""Any text that a document can hold."""

INTEGER = BigInteger().with_variant(Integer(), "sqlite")
"""Any integer that a document can hold (53 bits). SQLite's have no size."""
