"""``ckpt show``: a checkpoint in people's terms."""

from __future__ import annotations

from typing import Any

import click

from ckptstore import Checkpoint, CkptStoreError, Digest, Store

from . import describe, output
from .command import Session, command
from .exits import worst


@command("show", codes=(3, 4, 9))
@click.argument("root")
def COMMAND(session: Session, root: str) -> int:
    """Show what a checkpoint says: step, parent, roots, shards, progress, binding, and the receipts about it.

    A shard that cannot be read is shown as such, and unless this store is pinned to others, it decides the exit code.
    """
    store = session.store()
    digest = store.resolve(root)
    checkpoint = store.checkpoint(digest)
    scope = store.scope(digest)
    shards, codes = [], []
    for index, document in enumerate(checkpoint.shards):
        described, code = _shard(store, digest, index, document)
        shards.append(described)
        codes.append(code if scope is None or index in scope else 0)
    receipts = store.receipts(digest)
    if session.json:
        kept = [describe.receipt(receipt) for receipt in receipts]
        output.record(describe.checkpoint(digest, checkpoint) | {"shards": shards, "receipts": kept})
        return worst(codes)
    output.fields(_fields(digest, checkpoint))
    for shard in shards:
        output.fields([("shard", _shard_line(shard))])
    for receipt in receipts:
        output.fields([("receipt", describe.receipt_line(receipt))])
    return worst(codes)


def _fields(root: Digest, checkpoint: Checkpoint) -> list[tuple[str, object]]:
    progress = checkpoint.progress
    found: list[tuple[str, object]] = [
        ("checkpoint", root),
        ("step", checkpoint.step),
        ("parent", checkpoint.parent or "none: this is the first"),
        ("run", checkpoint.run or "none"),
        ("state root", checkpoint.state_root),
        ("rng root", checkpoint.rng_root),
    ]
    if checkpoint.files is not None:
        found.append(("files", checkpoint.files))
    for name, cursor in progress.cursors:
        each = f", {cursor.per_step} a step" if cursor.per_step is not None else ""
        found.append(("cursor", f"{name}: {cursor.position} {cursor.unit}{each}"))
    for counter in progress.counters:
        values = ", ".join(f"{value} ({times}x)" for value, times in counter.values)
        found.append(
            ("counter", f"{counter.name}: {values}{'' if counter.tracks_step else ', does not track the step'}")
        )
    for state in progress.states:
        found.append((state.kind, f"{state.name}: {describe.typed(state.value)}"))
    binding = describe.typed(checkpoint.binding)
    if isinstance(binding, dict):
        found.extend(("binding", f"{name} = {value}") for name, value in binding.items())
    found.extend(("tie", f"{tie.path} is {tie.owner}") for tie in checkpoint.ties)
    found.extend(("replica", f"{'/'.join(replica.role)} {replica.path}") for replica in checkpoint.replicas)
    found.extend(("deviation", f"{d.code}: {d.actual}, expected {d.expected}") for d in checkpoint.deviations)
    return found


def _shard(store: Store, root: Digest, index: int, document: Digest) -> tuple[dict[str, Any], int]:
    """What is known of a shard, and 0 or the exit code of the ``error`` for which it could not be read."""
    described: dict[str, Any] = {"index": index, "digest": str(document)}
    try:
        view = store.closure(root, [index], files=False).shards[index]
    except CkptStoreError as error:
        return described | {"error": str(error)}, error.exit_code
    tensors = list(view.tensors())
    described |= {
        "tensors": len(tensors),
        "bytes": sum(entry.nbytes for entry in tensors),
        "entries": len(view.entries),
        "pages": len(view.shard.pages),
        "optimizers": [
            {"name": o.name, "type": o.type, "groups": [describe.typed(g.hyper) for g in o.groups]}
            for o in view.shard.optimizers
        ],
        "generators": [entry.name for entry in view.shard.rng],
        "aliases": {alias.path: alias.owner for alias in view.shard.aliases},
    }
    return described, 0


def _shard_line(shard: dict[str, Any]) -> str:
    if "error" in shard:
        return f"{shard['index']}: {shard['digest']} cannot be read: {shard['error']}"
    parts = [f"{shard['index']}: {shard['digest']}", f"{shard['tensors']:,} tensors of {shard['bytes']:,} bytes"]
    parts += [f"optimizer {optimizer['name']} ({optimizer['type']})" for optimizer in shard["optimizers"]]
    if shard["generators"]:
        parts.append(f"generators {', '.join(shard['generators'])}")
    if shard["aliases"]:
        parts.append(f"{len(shard['aliases']):,} other names of shared tensors")
    return "; ".join(parts)
