"""``ckpt init``: make a store."""

from __future__ import annotations

import click

import ckptstore
from ckptstore.errors import NotFoundError

from . import output
from .command import Session, command


@command("init", codes=(3, 5, 8, 9))
@click.argument("url", required=False)
@click.option("--single-writer", is_flag=True, help="One process at a time will write: for endpoints that overwrite.")
def COMMAND(session: Session, url: str | None, single_writer: bool) -> None:
    """Make an empty store at URL (default: --store, else the current directory).

    The directory must be new or empty; a bucket must be there, and its prefix empty. A store that is there already
    stays as it is. What the endpoint of a bucket honours is found out and recorded in the store; ckpt endpoint shows
    it.

    Where an endpoint has no conditional writes, refs can only be moved in a store made with --single-writer. Should
    two processes write to that nevertheless, a checkpoint may drop out of its history.
    """
    place = url or session.url or "."
    try:
        store, created = ckptstore.open(place), False
    except NotFoundError:
        store, created = ckptstore.open(place, create=True, single_writer=single_writer), True
    honoured = store.capabilities() if created else None
    if session.json:
        output.record({"type": "store", "url": store.url, "created": created})
        return
    output.line(f"{'created' if created else 'already a store'}: {store.url}")
    if honoured is not None and not honoured.conditional_create and not store.single_writer:
        session.note("the endpoint has no conditional writes: refs cannot be moved here (see ckpt init --help)")
