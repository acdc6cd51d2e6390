"""The evidence of a run: packed, stored with the operator, and read back whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore import Digest, Receipt, Store, evidence
from ckptstore.errors import CorruptError
from ckptstore.evidence import ArchiveInfo
from ckptstore.format.keys import object_key
from trainer.lifecycle.page import render
from trainer.lifecycle.record import Record
from trainer.workers.events import utc_now

ARCHIVE = "evidence.tar"


@dataclass(frozen=True, slots=True)
class Stored:
    """An archive in a store: digest of the tree that holds it, bytes read back there, and how far down."""

    tree: Digest
    readback_bytes: int
    method: str


def pack_run(record: Record, report: Mapping[str, Any], store: Store, events: Path, target: Path) -> ArchiveInfo:
    """Pack documents, frozen files, receipts, events, evaluations and the report; large objects by reference.

    Args:
        record: the finished run.
        report: its report.
        store: the operator's store.
        events: folder with the events of all processes.
        target: the archive, which must not exist.
    """
    plan = record.plan
    gathered = ckptstore.gather_evidence(store, [record.root(step).root for step in plan.commits])
    members: dict[str, bytes | Path] = {**gathered.members}
    members |= {f"events/{p.relative_to(events).as_posix()}": p for p in events.rglob("*") if p.is_file()}
    members |= {f"evaluations/{update}.json": result.encode() for update, result in record.results.items()}
    members["report.json"] = json.dumps(report, indent=1).encode()
    members["report.html"] = render(report).encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    return evidence.pack(members, target, gathered.references)


def store_archive(info: ArchiveInfo, store: Store) -> Stored:
    """Put the archive into a store as a tree of one file, read every byte of it back there, and leave a receipt.

    Raises:
        CorruptError: the store does not give back what was put into it.
    """
    tree = store.put_tree(info.path.parent)
    (file,) = store.tree(tree).files
    whole, size, methods = hashlib.sha256(), 0, set()
    chunks = list(zip(file.chunks, file.lengths(), strict=True))
    at_a_time = store.backend.traits.threads
    with ThreadPoolExecutor(at_a_time) as pool:
        for first in range(0, len(chunks), at_a_time):  # so many are in memory at a time
            for data, method in pool.map(lambda one: _readback(store, *one), chunks[first : first + at_a_time]):
                whole.update(data)
                size += len(data)
                methods.add(method)
    if (size, whole.hexdigest()) != (info.size, info.sha256):
        why = f"{size} bytes with SHA-256 {whole.hexdigest()}, expected {info.size} with {info.sha256}"
        raise CorruptError(f"archive read back from {store.url}", why, "check the store's disk, then store it again")
    weakest = max(methods, key=list(type(next(iter(methods)))).index)
    store.add_receipt(
        Receipt(
            operation="evidence",
            subject=tree,
            closure=None,
            documents=1,
            objects=len(file.chunks),
            bytes_read=size,
            method=weakest.value,
            time=utc_now()[:19] + "Z",
            where=store.url,
        )
    )
    return Stored(tree, size, weakest.value)


def _readback(store: Store, chunk: Digest, length: int) -> tuple[bytes, Enum]:
    return store.backend.readback(object_key(chunk), length)
