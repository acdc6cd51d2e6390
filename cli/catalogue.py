"""``ckpt catalogue``: the local index."""

from __future__ import annotations

import click

from . import output
from .command import Session, command
from .exits import epilog


@click.group("catalogue", epilog=epilog((3, 4, 8, 9)))
def COMMAND() -> None:
    """The catalogue is an index for queries. It is never consulted for correctness and can be dropped at any time."""


@command("rebuild", codes=(3, 4, 8, 9))
def rebuild(session: Session) -> None:
    """Make the catalogue anew from what the store holds, and print the number of rows of each table.

    Only a store in a directory keeps one (catalogue.sqlite); the new one takes the old one's place in one step.
    """
    store = session.store()
    counts = store.catalogue().rebuild()
    if session.json:
        output.record({"type": "catalogue", "store": store.url, "rows": counts})
    else:
        output.table(counts.items(), right=frozenset({1}))


COMMAND.add_command(rebuild)
