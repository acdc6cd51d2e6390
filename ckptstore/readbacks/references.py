"""What a document leads to: the keys that it names, by its kind."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.format import canonical
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import document_key, object_key
from ckptstore.format.page import TensorEntry, parse_page
from ckptstore.format.shard import Shard
from ckptstore.format.tree import Preparation, Tree


@dataclass(frozen=True, slots=True)
class References:
    """What a document names.

    Args:
        kind: of the document; empty if it is one that this release does not know.
        keys: documents and objects of the closure, but for the shards of a checkpoint.
        shards: documents of a checkpoint's shards, by index.
        parent: of a checkpoint.
    """

    kind: str
    keys: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    parent: Digest | None = None


def references(data: bytes) -> References:
    """What a document of any kind names; MalformedError if it is none."""
    node = canonical.decode(data, DOCUMENT_LIMIT)
    kind = node.get("kind") if type(node) is dict else None
    if kind == "checkpoint":
        checkpoint = Checkpoint.parse(data)
        files = [document_key(digest) for digest in (checkpoint.run, checkpoint.files) if digest is not None]
        return References(kind, tuple(files), tuple(map(document_key, checkpoint.shards)), checkpoint.parent)
    if kind == "shard":
        shard = Shard.parse(data)
        packs = [object_key(digest) for packs in shard.packs for digest in packs.digests]
        return References(kind, (*(document_key(page.digest) for page in shard.pages), *packs))
    if kind == "page":
        entries = [entry for entry in parse_page(data) if isinstance(entry, TensorEntry)]
        # A short chunk lies in a pack, which the shard names.
        whole = [chunk for entry in entries for chunk in (entry.chunks[:-1] if entry.tail else entry.chunks)]
        return References(kind, tuple(map(object_key, whole)))
    if kind == "tree":
        return References(kind, tuple(object_key(chunk) for file in Tree.parse(data).files for chunk in file.chunks))
    if kind == "preparation":
        parts = Preparation.parse(data)
        return References(kind, tuple(map(document_key, (parts.plan, parts.inputs, parts.sources))))
    return References("")
