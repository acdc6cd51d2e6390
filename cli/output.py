"""What is printed: data to stdout, everything else to stderr, and nothing that could drive a terminal."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import click

PROGRAM = "ckpt"

# Control, format (bidirectional overrides among them), surrogates, private, unassigned; line and paragraph separators.
_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def escape(text: str) -> str:
    """``text`` on one line, control and bidirectional characters as escapes: no name can pose as another."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escaped(character) if unicodedata.category(character) in _ESCAPED else character for character in text
    )


def line(text: str = "") -> None:
    """One line of data."""
    click.echo(escape(text))


def note(text: str) -> None:
    """One line for the person at the terminal, on stderr."""
    click.echo(escape(text), err=True)


def record(value: Mapping[str, object], *, err: bool = False) -> None:
    """One JSON object on one line."""
    click.echo(json.dumps(value, allow_nan=False, separators=(", ", ": ")), err=err)


def error(told: Mapping[str, str], code: int, *, as_json: bool) -> int:
    """The one line about an error (``error``: its code, ``what``, ``why``, ``hint``) on stderr, or one object. Returns
    the exit code."""
    if as_json:
        record({"type": "error", **told, "exit_code": code}, err=True)
        return code
    separator = "; " if told["error"] == "interrupted" else ": "
    why = f"{separator}{told['why']}" if told["why"] else ""
    hint = f" ({told['hint']})" if told["hint"] else ""
    note(f"{PROGRAM}: {told['what']}{why}{hint}")
    return code


def table(rows: Iterable[Sequence[object]], right: frozenset[int] = frozenset()) -> None:
    """Rows as aligned columns; numbers of the columns in ``right`` stand at the right."""
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    for row in cells:
        padded = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(padded).rstrip())


def fields(pairs: Iterable[tuple[str, object]]) -> None:
    """Names and values, one pair a line."""
    for name, value in pairs:
        click.echo(f"{escape(name):<12} {escape(str(value))}".rstrip())


def count(number: int, noun: str) -> str:
    """``3 keys``, ``1 key``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
