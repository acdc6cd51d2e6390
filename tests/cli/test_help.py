"""Every command has a help page that lists the exit codes it can return."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

import ckptstore
from ckptstore import errors
from ckptstore_cli.exits import ALWAYS, MEANINGS
from ckptstore_cli.root import ckpt as root
from tests.cli.conftest import Ckpt


def walk(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of every command, groups included."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from walk(inner, *path, name)


COMMANDS = list(walk(root))
LEAVES = [
    path for path in COMMANDS if path not in ((), ("ref",), ("evidence",), ("catalogue",), ("plan",), ("remote",))
]


def test_all_commands_are_there() -> None:
    single = ["init", "log", "show", "ls", "verify", "repair", "diff", "push", "pull", "restore", "export", "import"]
    nested = [
        "ref list",
        "ref show",
        "ref move",
        "ref log",
        "evidence pack",
        "evidence verify",
        "plan push",
        "plan pull",
        "remote add",
        "remote list",
        "remote remove",
    ]
    others = ["catalogue rebuild", "completion", "doctor", "durability", "endpoint", "gc", "latest", "pin", "scrub"]
    assert sorted(" ".join(path) for path in LEAVES) == sorted([*single, *nested, *others])


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "ckpt")
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_a_help_page_says_what_the_command_does_and_its_exit_codes(
    path: tuple[str, ...], flag: str, ckpt: Ckpt
) -> None:
    done = ckpt(*path, flag)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: {' '.join(('ckpt', *path))} ")
    listed = {int(code) for code in re.findall(r"^ +([0-9]+) {2,}\S", done.out.split("Exit codes:")[1], re.M)}
    assert set(ALWAYS) <= listed <= set(MEANINGS)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_takes_json(path: tuple[str, ...], ckpt: Ckpt) -> None:
    assert "--json" in ckpt(*path, "-h").out


def test_only_what_needs_no_store_takes_none(ckpt: Ckpt) -> None:
    without = [path for path in LEAVES if "--store" not in ckpt(*path, "-h").out]
    assert without == [("evidence", "verify"), ("completion",)]


def test_every_exit_code_of_the_library_has_a_meaning() -> None:
    codes = {
        item.exit_code
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, errors.CkptStoreError)
    }
    assert codes <= set(MEANINGS)


def test_different_is_an_exit_code_of_diff_alone(ckpt: Ckpt) -> None:
    with_it = [path for path in LEAVES if re.search(r"^ +1 {2,}", ckpt(*path, "-h").out, re.M)]
    assert with_it == [("diff",)]


def test_the_version_is_that_of_the_library(ckpt: Ckpt) -> None:
    assert ckpt("--version").out == f"ckpt, version {ckptstore.__version__}\n"


def test_without_a_command_the_help_page_goes_to_stderr_as_a_usage_error(ckpt: Ckpt) -> None:
    done = ckpt()
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage: ckpt ")
