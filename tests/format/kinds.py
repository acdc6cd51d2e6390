"""The kinds of documents of format 1, each with its parser, its encoder and its limit in bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.page import encode_page, parse_page
from ckptstore.format.records import (
    RECEIPT_LIMIT,
    RECORD_LIMIT,
    CollectionMarker,
    Feature,
    Lease,
    Pin,
    Receipt,
    RefRecord,
    Retired,
    ShardReceipt,
    Store,
)
from ckptstore.format.shard import Shard
from ckptstore.format.tree import Preparation, Tree

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests" / "v1"
VECTORS = MANIFESTS / "vectors"

PARSERS: dict[str, Callable[[bytes], Any]] = {
    "page": parse_page,
    "shard": Shard.parse,
    "checkpoint": Checkpoint.parse,
    "tree": Tree.parse,
    "preparation": Preparation.parse,
    "ref": RefRecord.parse,
    "receipt": Receipt.parse,
    "shard-receipt": ShardReceipt.parse,
    "pin": Pin.parse,
    "retired": Retired.parse,
    "lease": Lease.parse,
    "collection": CollectionMarker.parse,
    "feature": Feature.parse,
    "store": Store.parse,
}

LIMITS = {
    **dict.fromkeys(("page", "shard", "checkpoint", "tree", "preparation", "shard-receipt"), DOCUMENT_LIMIT),
    **dict.fromkeys(("ref", "pin", "retired", "lease", "collection", "feature", "store"), RECORD_LIMIT),
    "receipt": RECEIPT_LIMIT,
}


def encode(kind: str, value: Any) -> bytes:
    """Bytes of a document of ``kind``."""
    return encode_page(value) if kind == "page" else value.encode()


def valid_documents() -> list[tuple[str, str, bytes]]:
    """(kind, name, bytes) of every valid document in manifests/."""
    files = sorted((MANIFESTS / "valid").glob("*/*.json"))
    return [(file.parent.name, file.stem, file.read_bytes()) for file in files]
