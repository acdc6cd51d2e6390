"""Another number of workers for a checkpoint of a run: who owns which layers, found through its preparation.

The controller's part: documents and digests, no torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import ckptstore
from ckptstore import Digest, Store
from ckptstore.errors import RefusedError, UsageError
from trainer.compute.config import Ownership, partition
from trainer.preparation.plan import Plan
from trainer.preparation.prepare import read_plan
from trainer.preparation.staged import PLAN_FILE


def plan_of(store: Store, root: Digest) -> Plan:
    """The plan that a checkpoint's run was prepared with.

    Raises:
        RefusedError: the checkpoint names no preparation, or one that holds no plan of ours.
        NotFoundError, CorruptError: the store lacks it, or has other bytes.
    """
    run = store.checkpoint(root).run
    if run is None:
        why = "it names no preparation, so nobody knows which layers its tensors are of"
        raise RefusedError(f"checkpoint {root.short}", why, "name one of a run of this trainer")
    tree = store.preparation(run).plan
    if PLAN_FILE not in {file.path for file in store.tree(tree).files}:
        raise RefusedError(f"preparation {run.short}", f"its plan has no {PLAN_FILE}", "name one of this trainer")
    with tempfile.TemporaryDirectory(prefix="trainer-plan-") as folder:
        store.get_tree(tree, folder, [PLAN_FILE])
        return read_plan(Path(folder))


def repartition(name: str, cuts: Sequence[int], url: str | None, ref: str | None, out: TextIO) -> Digest:
    """Give a checkpoint of a run to ``len(cuts) + 1`` workers and print what became of its parts.

    Args:
        name: a root, a prefix of one, or a ref.
        cuts: the layers at which the second and each further shard begins.
        url: the store; None: what ``CKPT_STORE`` says.
        ref: the ref that is moved; it names the checkpoint, or nothing yet. None: the one that names the checkpoint.
        out: where the figures go.

    Returns:
        The new root.

    Raises:
        UsageError: no store is given, the cuts do not fit the model, or not exactly one ref names the checkpoint.
        CkptStoreError: as :func:`ckptstore.repartition`.
    """
    url = url or os.environ.get("CKPT_STORE")
    if not url:
        raise UsageError("store", "none was given", "--store URL, or set CKPT_STORE")
    store = ckptstore.open(url)
    root = store.resolve(name)
    owners = partition(plan_of(store, root).config, cuts)
    made = ckptstore.repartition(store, root, paths(owners), ref=ref or _naming(store, root))
    if made.root == root:
        print(f"{root} has these shards already; nothing was written", file=out)
        return root
    for label, text in (
        ("root", f"{made.root}"),
        ("parent", f"{root}"),
        ("state root", f"{made.state_root}, as before"),
        *((f"shard {owner.index}", _owned(owner)) for owner in owners),
        ("taken over", f"{made.chunks} chunks, {made.chunk_bytes:,} bytes; {made.rewritten} of them written"),
        ("packs", f"{made.packs}, {made.pack_bytes:,} bytes"),
        ("documents", f"{made.documents}, {made.document_bytes:,} bytes"),
        ("written", f"{made.written_bytes:,} bytes that were not there"),
        ("read", f"{made.read_bytes:,} bytes of objects, all verified"),
        *(("deviation", f"{one.code}: {one.actual}, expected {one.expected}") for one in made.deviations),
    ):
        print(f"{label:<11} {text}", file=out)
    return made.root


def paths(owners: Sequence[Ownership]) -> list[frozenset[str]]:
    """The names of the tensors of each shard, as :func:`ckptstore.repartition` takes them."""
    return [frozenset(name for name, _ in owner.tensors) for owner in owners]


def _naming(store: Store, root: Digest) -> str:
    """The only ref whose head is ``root``."""
    found = [ref for ref in store.refs.names() if store.head(ref) == root]
    if len(found) != 1:
        named = f"{len(found)} refs name it ({', '.join(found)})" if found else "no ref names it now"
        raise UsageError(f"checkpoint {root.short}", named, "say which ref is to be moved, or made: --ref NAME")
    return found[0]


def _owned(owner: Ownership) -> str:
    layers = f"layer {owner.first}" if owner.last == owner.first + 1 else f"layers {owner.first} to {owner.last - 1}"
    head = ", embedding, final norm and head" if owner.head else ""
    return f"{layers}{head}: {owner.parameters:,} parameters"
