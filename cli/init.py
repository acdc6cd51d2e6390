"""``ckpt init``: make a store."""

from __future__ import annotations

import click

import ckptstore
from ckptstore.errors import NotFoundError

from . import output
from .command import Session, command


@command("init", codes=(3, 5, 8, 9))
@click.argument("url", required=False)
def COMMAND(session: Session, url: str | None) -> None:
    """Make an empty store at URL (default: --store, else the current directory).

    The directory must be new or empty. A store that is there already stays as it is.
    """
    place = url or session.url or "."
    try:
        store, created = ckptstore.open(place), False
    except NotFoundError:
        store, created = ckptstore.open(place, create=True), True
    if session.json:
        output.record({"type": "store", "url": store.url, "created": created})
    else:
        output.line(f"{'created' if created else 'already a store'}: {store.url}")
