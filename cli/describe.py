"""Documents and records as plain JSON objects and as short texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime

from ckptstore import Checkpoint, Digest, Finding, Place, Receipt
from ckptstore.format import values
from ckptstore.format.canonical import Json
from ckptstore.format.values import EntryRef, TensorValue


def text(digest: Digest | None) -> str | None:
    """A digest in full, or None."""
    return None if digest is None else str(digest)


def time(moment: datetime | None) -> str | None:
    """A time in UTC as receipts have it, or None."""
    return None if moment is None else moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def plain(value: object) -> object:
    """A typed value as JSON has it; what JSON cannot say (NaN, bytes, tensors) as a text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, TensorValue):
        return f"tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, EntryRef):
        return f"tensor {'/'.join(value.suffix)}"
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    return repr(value)


def typed(node: Json) -> object:
    """Typed JSON of a document as plain JSON."""
    return plain(values.from_json(node))


def receipt(item: Receipt) -> dict[str, object]:
    """A receipt by its fields."""
    return {
        "operation": item.operation,
        "subject": str(item.subject),
        "closure": text(item.closure),
        "documents": item.documents,
        "objects": item.objects,
        "bytes_read": item.bytes_read,
        "method": item.method,
        "time": item.time,
        "where": item.where,
        "exceptions": list(item.exceptions),
        "details": None if item.details is None else typed(item.details),
    }


def receipt_line(item: Receipt) -> str:
    """A receipt in one line."""
    what = f"{item.operation} {item.time} at {item.where}"
    if item.bytes_read:
        what += f": {item.bytes_read:,} bytes read ({item.method})"
    if item.exceptions:
        what += f", but {'; '.join(item.exceptions)}"
    if item.details is not None:
        what += f" {typed(item.details)}"
    return what


def checkpoint(root: Digest, item: Checkpoint) -> dict[str, object]:
    """A checkpoint document by its fields."""
    progress = item.progress
    return {
        "type": "checkpoint",
        "root": str(root),
        "step": item.step,
        "parent": text(item.parent),
        "run": text(item.run),
        "state_root": str(item.state_root),
        "rng_root": str(item.rng_root),
        "files": text(item.files),
        "cursors": {
            name: {"unit": cursor.unit, "position": cursor.position, "per_step": cursor.per_step}
            for name, cursor in progress.cursors
        },
        "counters": {
            counter.name: {"tracks_step": counter.tracks_step, "values": [list(pair) for pair in counter.values]}
            for counter in progress.counters
        },
        "states": [{"kind": s.kind, "name": s.name, "value": typed(s.value)} for s in progress.states],
        "binding": typed(item.binding),
        "ties": {tie.path: tie.owner for tie in item.ties},
        "replicas": [{"role": "/".join(replica.role), "path": replica.path} for replica in item.replicas],
        "deviations": [{"code": d.code, "expected": d.expected, "actual": d.actual} for d in item.deviations],
    }


def finding(found: Finding, root: Digest | None) -> dict[str, object]:
    """A finding by its fields, with full digests; ``root`` is its checkpoint where the place does not say."""
    return {
        "type": "finding",
        "kind": found.kind.value,
        **place(found.place, root),
        "key": found.key,
        "message": found.message,
        "expected": found.expected,
        "actual": found.actual,
    }


def place(where: Place, root: Digest | None) -> dict[str, object]:
    """A place by its parts."""
    return {
        "checkpoint": text(where.checkpoint or root),
        "shard": where.shard,
        "part": where.part,
        "role": "/".join(where.role) if where.role is not None else None,
        "tensor": where.path,
        "chunk": where.chunk,
    }
