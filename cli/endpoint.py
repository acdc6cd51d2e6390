"""``ckpt endpoint``: what the server of a bucket honours."""

from __future__ import annotations

import click

from ckptstore.errors import UsageError

from . import output
from .command import Session, command

_MEANING = {
    "conditional_create": "refs can be moved by several writers",
    "checksums": "what becomes of a SHA-256 that is sent along",
    "ranged_get": "parts of objects can be read",
    "versioning": "old versions are kept; --max-age can be used",
    "object_lock": "objects can be held against deletion",
    "list_in_order": "listings are in the order of the keys",
}


@command("endpoint", codes=(3, 4, 5, 9))
@click.option("--probe", is_flag=True, help="Find out anew, and record it; needs the right to write.")
def COMMAND(session: Session, probe: bool) -> None:
    """Show what the endpoint of a store in a bucket honours, as it was found when it was recorded in the store."""
    store = session.store()
    found = store.capabilities(probe=probe)
    if found is None:
        raise UsageError(f"store {store.url}", "it is not behind an endpoint", "name a store in a bucket, s3://…")
    if session.json:
        output.record({"type": "endpoint", "store": store.url, "single_writer": store.single_writer, **found.plain()})
        return
    rows = [(name, _shown(value), _MEANING[name]) for name, value in found.plain().items()]
    output.table([*rows, ("single_writer", _shown(store.single_writer), "the store was made for one writer at a time")])


def _shown(value: object) -> str:
    return value if isinstance(value, str) else "yes" if value else "no"
