"""The help pages of ``ckpt`` inside docs/cli.md: read out of it, and written into it.

``python -m tests.support.help_pages`` brings the page up to date (``make docs`` calls it); tests/test_docs.py compares.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import click

from ckptstore_cli.main import run
from ckptstore_cli.root import ckpt

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "cli.md"

_BLOCK = re.compile(r"<!-- (?P<words>ckpt[a-z ]*) --help -->\n```text\n(?P<help>.*?)```\n", re.S)


def commands() -> list[str]:
    """Every command as it is typed, groups and ``ckpt`` itself included, in the order of the help pages."""
    return [" ".join(words) for words in _walk(ckpt, ("ckpt",))]


def help_page(words: str) -> str:
    """What ``words --help`` prints on a terminal of 100 columns."""
    printed = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": "100"}), redirect_stdout(printed):
        code = run([*words.split()[1:], "--help"])
    if code != 0:
        raise ValueError(f"{words} --help ends with {code}")
    return printed.getvalue()


def blocks(page: str) -> dict[str, str]:
    """The help page that stands in ``page`` for each command."""
    return {found["words"]: found["help"] for found in _BLOCK.finditer(page)}


def with_help(page: str) -> str:
    """``page`` with each block as ``--help`` prints it now."""

    def block(found: re.Match[str]) -> str:
        return f"<!-- {found['words']} --help -->\n```text\n{help_page(found['words'])}```\n"

    return _BLOCK.sub(block, page)


def _walk(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _walk(inner, (*words, name))


if __name__ == "__main__":
    PAGE.write_text(with_help(PAGE.read_text("utf-8")), "utf-8")
