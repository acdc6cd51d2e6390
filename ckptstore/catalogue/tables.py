"""The tables of the catalogue, and what of their rows leads to documents."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    DDL,
    Column,
    Connection,
    MetaData,
    Table,
    column,
    event,
    insert,
    select,
    table,
    union,
)

from ckptstore.catalogue.columns import INTEGER, TEXT
from ckptstore.catalogue.errors import REBUILD, CatalogueError
from ckptstore.catalogue.inventory import SHARD
from ckptstore.endpoints import PROBE

APPLICATION = 0x636B7074  # "ckpt": no other program's tables are taken for a catalogue
VERSION = 2

metadata = MetaData()


def _table(name: str, key: str, columns: str) -> Table:
    """A table with text columns (``:int``: integers, ``?``: may be null), stored in the order of its key."""
    made: list[Column[Any]] = []
    for item in columns.split():
        label = item.rstrip("?").removesuffix(":int")
        kind = INTEGER if ":int" in item else TEXT
        made.append(Column(label, kind, primary_key=label in key.split(), nullable=item.endswith("?")))
    return Table(name, metadata, *made, sqlite_with_rowid=False)


store = _table("store", "id", "id")
refs = _table("refs", "name generation", "name generation:int root? previous? nonce")
receipts = _table(
    "receipts",
    "subject digest",
    "subject digest operation closure? documents:int objects:int bytes_read:int method time location "
    "exceptions details",
)
checkpoints = _table("checkpoints", "root", "root step:int parent? run? state_root rng_root files? shards:int")
checkpoint_shards = _table("checkpoint_shards", "root index", "root index:int shard")
shards = _table("shards", "digest", "digest index:int count:int entries:int optimizers")
shard_pages = _table("shard_pages", "shard position", "shard position:int page")
pages = _table("pages", "digest", "digest entries:int")
# By its position and not by its path, which may be longer than a key of an index can be.
tensors = _table("tensors", "page position", "page position:int path role dtype shape digest bytes:int")
preparations = _table("preparations", "digest", "digest plan inputs sources")
trees = _table("trees", "digest", "digest files:int bytes:int")
objects = _table("objects", "key size", "key size:int")
object_uses = _table("object_uses", "holder key", "holder key")
unreadable = _table("unreadable", "key", "key why")

archives = table(
    "archives",
    *(column(name, TEXT) for name in ("tree", "receipt")),
    *(column(name, INTEGER) for name in ("files", "bytes")),
    *(column(name, TEXT) for name in ("time", "location")),
)
event.listen(
    metadata,
    "after_create",
    DDL(  # type: ignore[no-untyped-call]
        "CREATE VIEW archives AS SELECT r.subject AS tree, r.digest AS receipt, t.files, t.bytes, r.time, r.location "
        "FROM receipts r LEFT JOIN trees t ON t.digest = r.subject WHERE r.operation = 'evidence'"
    ),
)

# Whatever a row names that has a document of its own, and what is described already.
named = union(
    select(refs.c.root),
    select(receipts.c.subject).where(receipts.c.operation.not_in((SHARD, PROBE))),
    *(select(checkpoints.c[name]) for name in ("parent", "run", "files")),
    select(checkpoint_shards.c.shard),
    *(select(preparations.c[name]) for name in ("plan", "inputs", "sources")),
)
described = union(
    select(checkpoints.c.root), select(shards.c.digest), select(trees.c.digest), select(preparations.c.digest)
)


def create(connection: Connection, owner: str) -> None:
    """Make all tables, as those of the store with this id."""
    metadata.create_all(connection, checkfirst=False)
    connection.execute(insert(store), {"id": owner})


def check(name: str, application: object, version: object) -> None:
    """CatalogueError if tables that say this of themselves are not those of this program and release."""
    if application != APPLICATION:
        raise CatalogueError(f"catalogue {name}", "it is no catalogue of this program", REBUILD)
    if version != VERSION:
        why = f"it is of version {version}; this release has version {VERSION}"
        raise CatalogueError(f"catalogue {name}", why, REBUILD)
