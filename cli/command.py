"""What every command has: ``--store``, ``--json``, its exit codes on the help page, and a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any

import click

import ckptstore
from ckptstore.errors import CkptStoreError, NotFoundError

from . import output
from .exits import epilog

STORE_FILE = "ckptstore.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """What was given before the command's name."""

    store: str | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """One invocation: which store, and whether it prints JSON."""

    url: str | None
    json: bool

    def store(self, *, create: bool = False) -> ckptstore.Store:
        """The store: ``--store``, else CKPT_STORE, else the nearest ``ckptstore.json`` upwards.

        ``create`` makes the one that is named if there is none.
        """
        return ckptstore.open(self.url or _nearest(), create=create and self.url is not None)

    def place(self) -> str:
        """Where the store is, for who must not open it yet."""
        return self.url or _nearest()

    def note(self, text: str) -> None:
        """A line on stderr; with ``--json`` nothing."""
        if not self.json:
            output.note(text)

    def tell(self, error: CkptStoreError, during: str = "") -> int:
        """The one line about an error ``during`` something, after which the command goes on; returns its exit code."""
        what = f"{during}: {error.what}" if during else error.what
        told = {"error": error.code, "what": what, "why": error.why, "hint": error.hint}
        return output.error(told, error.exit_code, as_json=self.json)

    def scope(self, store: ckptstore.Store, root: ckptstore.Digest, shards: Collection[int]) -> tuple[int, ...] | None:
        """The shards asked for, else those that this store is pinned to hold, else None for all."""
        if shards:
            return tuple(sorted(set(shards)))
        pinned = store.scope(root)
        if pinned is not None:
            listed = ", ".join(str(shard) for shard in pinned)
            self.note(f"{store.url} is pinned to shard {listed} of checkpoint {root.short}: only that is looked at")
        return pinned


def command(
    name: str, *, codes: Collection[int] = (), store: bool = True
) -> Callable[[Callable[..., int | None]], click.Command]:
    """Make a command of a function that takes a :class:`Session` and its parameters and returns an exit code or None.

    Args:
        name: as it is typed.
        codes: the exit codes that it can return besides those that every command can.
        store: whether it uses a store.
    """

    def make(function: Callable[..., int | None]) -> click.Command:
        def run(**parameters: Any) -> int:
            settings = click.get_current_context().find_object(Settings) or Settings()
            url = parameters.pop("store", None) or settings.store
            as_json = parameters.pop("json") or settings.json
            return function(Session(url, as_json), **parameters) or 0

        made = click.command(name, epilog=epilog(codes))(update_wrapper(run, function))
        if store:
            made.params.append(store_option())
        made.params.append(json_option())
        return made

    return make


def store_option(*, variable: bool = False) -> click.Option:
    """``--store URL``. ``variable`` lets CKPT_STORE stand for it: on the group alone, or it would win over that."""
    help_text = "The store [default: CKPT_STORE, else the nearest ckptstore.json upwards]."
    return click.Option(["--store"], metavar="URL", envvar="CKPT_STORE" if variable else None, help=help_text)


def json_option() -> click.Option:
    """``--json``."""
    return click.Option(["--json"], is_flag=True, help="Print one JSON object a line, with full digests.")


def shard_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--shard N``, several times."""
    return click.option("--shard", "shards", type=click.IntRange(0), multiple=True, metavar="N", help=help_text)


def _nearest() -> str:
    here = Path.cwd()
    for folder in (here, *here.parents):
        if os.path.isfile(folder / STORE_FILE):
            return str(folder)
    why = f"no --store, no CKPT_STORE, and no {STORE_FILE} in {here} or above"
    raise NotFoundError("store", why, "name it with --store, or make one with ckpt init DIR")
