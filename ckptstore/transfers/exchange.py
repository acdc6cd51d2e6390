"""Between stores: push, pull, and the shard of a worker on its way to where it is committed."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from logging import getLogger

from ckptstore.endpoints import require_exclusive
from ckptstore.errors import CkptStoreError, ConflictError, UsageError
from ckptstore.findings import Place
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.keys import check_ref_name
from ckptstore.format.records import RefRecord, ShardReceipt
from ckptstore.leases import check_lease
from ckptstore.meter import OnProgress
from ckptstore.store import Store
from ckptstore.transfers.sending import Source
from ckptstore.transfers.survey import Scope, ancestors
from ckptstore.transfers.transfer import Transfer, send_shard, transfer


def push(
    source: Store,
    target: Store,
    root: Digest,
    *,
    shards: Collection[int] | None = None,
    ref: str | None = None,
    progress: OnProgress | None = None,
    max_age: int = 0,
) -> Transfer:
    """Copy a checkpoint, or some shards of it, to ``target`` and read all of it back there.

    The receipt of the readback is kept there and, if that can be written, in ``source``, so that one can see without
    the other which copies there are.

    Args:
        source: where it is.
        target: where it goes.
        root: the checkpoint.
        shards: only these; then no ref is moved.
        ref: let this ref of ``target`` name the root afterwards; it must name nothing, an ancestor, or the root itself.
        progress: called with (bytes done, bytes in all).
        max_age: seconds; what lies at ``target`` under the very version that a readback not older than this has read is
            not read again. 0: everything is read now.

    Raises:
        ConflictError: the ref names something else; nothing was sent.
        RefusedError: refs of ``target`` cannot be moved safely, and nothing was sent; or an object there is archived.
        CorruptError, NotFoundError: one of the stores does not give the bytes back.
        BackendError: one of them fails; says what is missing. What was stored is used by the next push.
    """
    done = _transfer(source, target, root, Scope("push", sorted_shards(shards), max_age=max_age), ref, progress)
    try:
        source.add_receipt(done.receipt)
    except CkptStoreError as error:
        getLogger("ckptstore").warning("the receipt is at %s and not in %s: %s", target.url, source.url, error)
    return done


def pull(
    source: Store,
    target: Store,
    root: Digest,
    *,
    shards: Collection[int] | None = None,
    ref: str | None = None,
    progress: OnProgress | None = None,
    files: bool = True,
    max_age: int = 0,
) -> Transfer:
    """Fetch a checkpoint, or some shards of it, from ``source`` into ``target``; no unverified byte is ever handed out.

    ``files`` says whether the trees of files and of the preparation come too, which a restore does not need. The rest
    is as with :func:`push`, except that ``source`` is never written.
    """
    return _transfer(source, target, root, Scope("pull", sorted_shards(shards), files, max_age), ref, progress)


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
    return send_shard(Source(source.backend), target.backend, receipt.shard, receipt.index, receipt.count)


def head_to_move(source: Source, target: Store, root: Digest, ref: str) -> tuple[RefRecord | None, bool]:
    """The head of ``ref`` at ``target``, and whether it has to be moved to name ``root``.

    Raises:
        ConflictError: it names something that is no ancestor of ``root``.
        RefusedError: its endpoint cannot move refs safely.
    """
    head = target.refs.head(ref)
    present = head.root if head else None
    if present == root:
        return head, False
    if present is not None and not _descends(source, root, present):
        why = f"it names {present}, which is no ancestor of {root}"
        raise ConflictError(f"ref {ref} at {target.url}", why, "push to another ref, or move it with ckpt ref")
    require_exclusive(target.backend, f"ref {ref}")
    return head, True


def _transfer(
    source: Store, target: Store, root: Digest, scope: Scope, ref: str | None, progress: OnProgress | None
) -> Transfer:
    check(scope, ref)
    # What would be refused in the end is refused before anything is sent.
    documents = Source(source.backend)
    head, moves = (None, False) if ref is None else head_to_move(documents, target, root, ref)

    def move(ref: str) -> None:
        after, moves = head, True
        while moves:
            try:
                target.refs.move(ref, root, after)
                return
            except ConflictError:  # somebody else moved it: where it is now is what counts
                check_lease(target.backend)
                after, moves = head_to_move(documents, target, root, ref)

    named = partial(move, ref) if ref is not None and moves else None
    done = transfer(documents, target.backend, root, scope, progress, named)
    target.note_in_catalogue(root)
    return done


def check(scope: Scope, ref: str | None) -> None:
    """UsageError if this cannot be meant."""
    if ref is not None:
        check_ref_name(ref)
        if scope.shards is not None:
            raise UsageError(f"ref {ref}", "a ref names whole checkpoints, and only some shards are transferred")
    if type(scope.max_age) is not int or scope.max_age < 0:
        raise UsageError("max_age", f"{scope.max_age!r:.40} is not a whole number of seconds, at least 0")


def _descends(source: Source, root: Digest, ancestor: Digest) -> bool:
    data = source.document(root, Place(checkpoint=root, part="checkpoint document"))
    assert data is not None
    return any(past.root == ancestor for past in ancestors(source, Checkpoint.parse(data)))


def sorted_shards(shards: Collection[int] | None) -> tuple[int, ...] | None:
    """The shards in order, each once; None for all."""
    return None if shards is None else tuple(sorted(set(shards)))
