"""``ckpt remote``: other stores by name."""

from __future__ import annotations

import click

import ckptstore

from . import output
from .command import Session, command
from .exits import epilog


@click.group("remote", epilog=epilog((3, 4, 5, 6, 8, 9)))
def COMMAND() -> None:
    """Let a store in a directory know other stores by name: push, pull, plan and durability take the names.

    They stand in config.toml beside the store's keys, each as [remotes.NAME] with a url.
    """


@command("add", codes=(3, 4, 5, 6, 8, 9))
@click.argument("name")
@click.argument("url")
@click.option("--check/--no-check", default=True, help="Open the store at URL first [default: check].")
def add(session: Session, name: str, url: str, check: bool) -> None:
    """Let NAME, formed like that of a ref, stand for the store at URL.

    URL is a directory, whose path is kept as an absolute one, or a bucket. It holds no credentials: those come from
    where boto3 finds them.
    """
    store = session.store()
    kept = ckptstore.add_remote(store, name, url, check=check)
    if session.json:
        output.record({"type": "remote", "name": name, "url": kept})
    else:
        output.line(f"remote {name} is {kept}")


@command("list", codes=(3, 4, 5, 9))
def list_remotes(session: Session) -> None:
    """List the remotes with their URLs."""
    found = ckptstore.known_remotes(session.store())
    if session.json:
        for name, url in found.items():
            output.record({"type": "remote", "name": name, "url": url})
    else:
        output.table(found.items())


@command("remove", codes=(3, 4, 5, 8, 9))
@click.argument("name")
def remove(session: Session, name: str) -> None:
    """Forget the remote NAME. Nothing changes there."""
    store = session.store()
    ckptstore.remove_remote(store, name)
    if session.json:
        output.record({"type": "remote-removed", "name": name})
    else:
        output.line(f"remote {name} is forgotten")


for _command in (add, list_remotes, remove):
    COMMAND.add_command(_command)
