"""What must be true of a directory store at every instant, also after a crash, a full disk or a race
(docs/design.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import ckptstore
from ckptstore.format import canonical
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import digest_of_key, document_key, object_key, retired_key
from ckptstore.format.page import TensorEntry, parse_page
from ckptstore.format.shard import Shard
from ckptstore.format.tree import Preparation, Tree
from ckptstore.store import Store


def broken(path: Path) -> list[str]:
    """Every way in which the store at ``path`` breaks an invariant; needs no trust in anything but its bytes."""
    store = ckptstore.open(path)
    keys = {stat.key: stat.size for stat in store.backend.list("")}
    wrong = []
    for key in keys:
        if (path / key).stat().st_mode & 0o222:
            wrong.append(f"{key} can be written")
        digest = digest_of_key(key)
        if digest is None:
            continue
        data = store.backend.get(key)
        if Digest.of(data) != digest:
            wrong.append(f"{key} is visible and has other bytes")
        elif key.startswith("documents/") and retired_key(digest) not in keys and store.scope(digest) is None:
            wrong += [f"{key} is visible before {child}" for child in children(data) if child not in keys]
    for name in store.refs.names():
        wrong += [f"ref {name}: {finding}" for finding in store.refs.findings(name)[0]]
        head = store.head(name)
        if head is not None:
            wrong += [f"head of {name}: {finding}" for finding in store.verify(head).findings]
    return wrong


def children(data: bytes) -> Iterator[str]:
    """Keys of all that a document needs; a short chunk lies in a pack, which its shard names."""
    node = canonical.decode(data, DOCUMENT_LIMIT)
    assert type(node) is dict
    match node["kind"]:
        case "checkpoint":
            checkpoint = Checkpoint.parse(data)
            documents = [*checkpoint.shards, checkpoint.run, checkpoint.files]
            yield from (document_key(digest) for digest in documents if digest is not None)
        case "shard":
            shard = Shard.parse(data)
            yield from (document_key(page.digest) for page in shard.pages)
            yield from (object_key(digest) for packs in shard.packs for digest in packs.digests)
        case "page":
            for entry in parse_page(data):
                if isinstance(entry, TensorEntry):
                    yield from map(object_key, entry.chunks[:-1] if entry.tail else entry.chunks)
        case "tree":
            yield from (object_key(chunk) for file in Tree.parse(data).files for chunk in file.chunks)
        case "preparation":
            parts = Preparation.parse(data)
            yield from map(document_key, (parts.plan, parts.inputs, parts.sources))


def inodes(path: Path) -> dict[str, int]:
    """Inode of every object and document: a good one that was there is used and not written again."""
    listed = (file for kind in ("objects", "documents") for file in (path / kind).rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.stat().st_ino for file in listed}


def temporaries(path: Path) -> list[str]:
    """Names of the files that are on their way into the store, or were when their writer died."""
    return sorted(os.listdir(path / "tmp")) if (path / "tmp").exists() else []


def settled(store: Store) -> dict[str, int]:
    """Every key and size but those of receipts and leases, which have times in them."""
    return {s.key: s.size for s in store.backend.list("") if not s.key.startswith(("receipts/", "leases/"))}
