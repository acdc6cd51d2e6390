"""Between stores: push, pull, and the shard of a worker on its way to where it is committed."""

from __future__ import annotations

from collections.abc import Collection

from ckptstore.errors import ConflictError, UsageError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import check_ref_name
from ckptstore.format.records import ShardReceipt
from ckptstore.meter import OnProgress
from ckptstore.store import Store
from ckptstore.transfer import Transfer, send_shard, transfer


def push(
    source: Store,
    target: Store,
    root: Digest,
    *,
    shards: Collection[int] | None = None,
    ref: str | None = None,
    progress: OnProgress | None = None,
) -> Transfer:
    """Copy a checkpoint, or some shards of it, to ``target`` and read all of it back there.

    Args:
        source: where it is.
        target: where it goes.
        root: the checkpoint.
        shards: only these; then no ref is moved.
        ref: let this ref of ``target`` name the root afterwards; it must name nothing, an ancestor, or the root itself.
        progress: called with (bytes done, bytes in all).
    """
    return _transfer(source, target, root, "push", shards, ref, progress)


def pull(
    source: Store,
    target: Store,
    root: Digest,
    *,
    shards: Collection[int] | None = None,
    ref: str | None = None,
    progress: OnProgress | None = None,
    files: bool = True,
) -> Transfer:
    """Fetch a checkpoint, or some shards of it, from ``source`` into ``target``; no unverified byte is ever handed out.

    ``files`` says whether the trees of files and of the preparation come too, which a restore does not need.
    """
    return _transfer(source, target, root, "pull", shards, ref, progress, files)


def push_shard(source: Store, target: Store, receipt: ShardReceipt) -> Transfer:
    """Copy the shard of a receipt to ``target``, where the attempt will be committed, and read all of it back there.

    Args:
        source: where the worker saved it.
        target: where it goes; the transfer's ``root`` is the shard's digest.
        receipt: what :meth:`Store.save_shard` returned.

    Raises:
        UsageError: the receipt says that its worker gave up.
        CorruptError, NotFoundError: one of the stores does not give the bytes back.
    """
    if receipt.shard is None:
        raise UsageError(f"shard {receipt.index}", f"its worker gave up: {receipt.failure}")
    return send_shard(source.objects, target.backend, receipt.shard, receipt.index, receipt.count)


def _transfer(
    source: Store,
    target: Store,
    root: Digest,
    operation: str,
    shards: Collection[int] | None,
    ref: str | None,
    progress: OnProgress | None,
    files: bool = True,
) -> Transfer:
    if ref is not None:
        check_ref_name(ref)
        if shards is not None:
            raise UsageError(f"ref {ref}", "a ref names whole checkpoints, and only some shards are transferred")
    done = transfer(source.objects, target.backend, root, operation, shards, progress, files=files)
    if ref is not None:
        while not _advance(source, target, root, ref):
            pass  # somebody else moved it: where it is now is what counts
    if shards is None:
        target.note_in_catalogue(root)
    return done


def _advance(source: Store, target: Store, root: Digest, ref: str) -> bool:
    """Let a ref name ``root`` if it names an ancestor of it or nothing. False if it was moved meanwhile."""
    head = target.refs.head(ref)
    present = head.root if head else None
    if present == root:
        return True
    if present is not None and present not in {ancestor for ancestor, _ in source.history(root)}:
        why = f"it names {present}, which is no ancestor of {root}"
        raise ConflictError(f"ref {ref} at {target.url}", why, "push to another ref, or move it with ckpt ref")
    try:
        target.refs.move(ref, root, head)
    except ConflictError:
        return False
    return True
