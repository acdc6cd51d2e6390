"""Forged checkpoints: documents changed by hand, with every digest above them recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ckptstore.closure import read_parts
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.page import Entry, encode_page
from ckptstore.format.progress import count_updates
from ckptstore.format.shard import PageRef, Shard
from ckptstore.format.state import join_leaves, rng_root, state_root
from ckptstore.store import Store


def rewrite_checkpoint(store: Store, root: Digest, change: Callable[[Checkpoint], dict[str, Any]]) -> Digest:
    """The root of ``root``'s document with some fields changed."""
    checkpoint = store.checkpoint(root)
    return store.objects.put_document(replace(checkpoint, **change(checkpoint)).encode())


def rewrite_shard(store: Store, root: Digest, index: int, change: Callable[[Shard], dict[str, Any]]) -> Digest:
    """The root after fields of one shard were changed: shard, state root and rng root recomputed."""
    checkpoint = store.checkpoint(root)
    shard = store.closure(root).shards[index].shard
    digest = store.objects.put_document(replace(shard, **change(shard)).encode())
    shards = list(checkpoint.shards)
    shards[index] = digest
    return _finish(store, checkpoint, shards)


def rewrite_entries(
    store: Store, root: Digest, index: int, change: Callable[[Entry], Entry], *, recount: bool = False
) -> Digest:
    """The root after entries of one shard were changed one by one: page, shard, roots recomputed; counters on
    demand."""
    checkpoint = store.checkpoint(root)
    view = store.closure(root).shards[index]
    pages: list[PageRef] = []
    start = 0
    for ref in view.shard.pages:
        entries: Sequence[Entry] = [change(entry) for entry in view.entries[start : start + ref.count]]
        start += ref.count
        pages.append(replace(ref, digest=store.objects.put_document(encode_page(entries))))
    digest = store.objects.put_document(replace(view.shard, pages=tuple(pages)).encode())
    shards = list(checkpoint.shards)
    shards[index] = digest
    return _finish(store, checkpoint, shards, recount=recount)


def _finish(store: Store, checkpoint: Checkpoint, shards: list[Digest], *, recount: bool = False) -> Digest:
    parts = read_parts(store.objects, shards, None, None)
    views = [parts.shards[index] for index in range(len(shards))]
    replicas = [(replica.path, replica.role) for replica in checkpoint.replicas]
    leaves, _ = join_leaves([view.leaves() for view in views], checkpoint.ties, replicas)
    changed = replace(
        checkpoint,
        shards=tuple(shards),
        state_root=state_root(leaves),
        rng_root=rng_root([view.shard.rng for view in views]),
    )
    if recount:
        found = count_updates((e for view in views for e in view.entries), checkpoint.progress.states)
        counters = tuple(replace(c, values=found[c.name]) for c in checkpoint.progress.counters)
        changed = replace(changed, progress=replace(checkpoint.progress, counters=counters))
    return store.objects.put_document(changed.encode())
