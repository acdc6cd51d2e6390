"""``ckpt catalogue``: the index for queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from . import output
from .command import Session, command
from .exits import epilog


def _catalogue_option() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--catalogue URL``, before or after the name of the command."""
    help_text = "The database that keeps it [default: CKPT_CATALOGUE, else a file in the store's folder]."
    return click.option("--catalogue", metavar="URL", help=help_text)


@click.group("catalogue", epilog=epilog((3, 4, 8, 9)))
@_catalogue_option()
def COMMAND(catalogue: str | None) -> None:
    """The catalogue is an index for queries. It is never consulted for correctness and can be dropped at any time.

    Its URL is an SQLAlchemy one. A PostgreSQL database (postgresql+psycopg://user@host/database) keeps the catalogues
    of any number of stores, for all hosts that use them; an SQLite file (sqlite:////absolute/path) that of one store.
    """
    click.get_current_context().obj = catalogue


@command("rebuild", codes=(3, 4, 8, 9))
@_catalogue_option()
def rebuild(session: Session, catalogue: str | None) -> None:
    """Make the catalogue anew from what the store holds, and print the number of rows of each table.

    The new one takes the old one's place in one step.
    """
    store = session.store()
    kept = store.catalogue(catalogue or click.get_current_context().find_object(str))
    counts = kept.rebuild()
    if session.json:
        output.record({"type": "catalogue", "store": store.url, "catalogue": kept.name, "rows": counts})
    else:
        output.table(counts.items(), right=frozenset({1}))


COMMAND.add_command(rebuild)
