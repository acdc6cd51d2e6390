"""The tables of the catalogue, and what of their rows leads to documents."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    DDL,
    Column,
    Integer,
    MetaData,
    Table,
    Text,
    column,
    event,
    select,
    table,
    union,
)

from ckptstore.catalogue.inventory import SHARD

metadata = MetaData()


def _table(name: str, key: str, columns: str) -> Table:
    """A table with text columns (``:int``: integers, ``?``: may be null), stored in the order of its key."""
    made: list[Column[Any]] = []
    for item in columns.split():
        label = item.rstrip("?").removesuffix(":int")
        kind = Integer if ":int" in item else Text
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
tensors = _table("tensors", "page role path", "page role path dtype shape digest bytes:int")
preparations = _table("preparations", "digest", "digest plan inputs sources")
trees = _table("trees", "digest", "digest files:int bytes:int")
objects = _table("objects", "key size", "key size:int")
object_uses = _table("object_uses", "holder key", "holder key")
unreadable = _table("unreadable", "key", "key why")

archives = table("archives", *map(column, ("tree", "receipt", "files", "bytes", "time", "location")))
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
    select(receipts.c.subject).where(receipts.c.operation != SHARD),
    *(select(checkpoints.c[name]) for name in ("parent", "run", "files")),
    select(checkpoint_shards.c.shard),
    *(select(preparations.c[name]) for name in ("plan", "inputs", "sources")),
)
described = union(
    select(checkpoints.c.root), select(shards.c.digest), select(trees.c.digest), select(preparations.c.digest)
)
