"""Proving a save over a network: what it refers to is read back from the other end before a ref names it.

What this process has read back in full before, and neither wrote again nor found bad since, is not read once more. It
has to be there still, and the receipt says how old such a readback may be.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadbackMethod
from ckptstore.closure import Closure
from ckptstore.commits.presence import check_still_there
from ckptstore.errors import CkptStoreError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key
from ckptstore.format.records import Receipt, closure_digest
from ckptstore.leases import now
from ckptstore.objects import Objects
from ckptstore.readbacks.actors import readback_details
from ckptstore.threads import in_threads
from ckptstore.verify import check_object


@dataclass(frozen=True, slots=True)
class Proof:
    """That the closure of a root was read back: documents, objects and bytes that were read for this save, the age in
    seconds (0: there is none) of the oldest readback that stands for what was not, and for each key, sorted, whether it
    was read (None: all were)."""

    root: Digest
    closure: Digest
    documents: int
    objects: int
    bytes_read: int
    oldest_seconds: int
    read: tuple[bool, ...] | None

    def receipt(self, where: str, store: str | None) -> Receipt:
        """The receipt for the store at ``where`` with the id ``store``."""
        return Receipt(
            operation="verify",
            subject=self.root,
            closure=self.closure,
            documents=self.documents,
            objects=self.objects,
            bytes_read=self.bytes_read,
            method=ReadbackMethod.SERVER.value,
            time=now(),
            where=where,
            details=readback_details(store, max_age_seconds=self.oldest_seconds, read=self.read),
        )


def prove_parts(objects: Objects, closure: Closure, began: float) -> None:
    """Read back every object of a checkpoint that is being made, except what was read back before and is still there.

    Args:
        objects: the store.
        closure: what the checkpoint will refer to; its documents are read already.
        began: when the save did (of :func:`time.monotonic`).

    Raises:
        CorruptError, NotFoundError, BackendError: the first finding.
    """
    unread = [(key, need) for key, need in closure.objects.items() if objects.read_back_at(key) is None]
    for _, findings, _ in in_threads(lambda item: check_object(objects, *item), unread, objects.threads):
        if findings:
            raise _not_kept(findings[0])
    check_still_there(objects, closure, began)


def prove_root(objects: Objects, root: Digest, closure: Closure, began: float) -> Proof:
    """Read back the document of a checkpoint whose parts are proven, and sum up what was read since ``began``."""
    data = objects.document(root, Place(checkpoint=root, part="checkpoint document"))
    assert data is not None
    return _summed(objects, root, {document_key(root): len(data), **dict(closure.sizes())}, began)


def _not_kept(finding: Finding) -> CkptStoreError:
    hint = "nothing was committed; save again"
    if finding.kind in (Kind.CORRUPT, Kind.TRUNCATED):
        hint += "; if it happens again, the endpoint does not keep what it is given: try checksums=required in the URL"
    return finding.error(hint)


def _summed(objects: Objects, root: Digest, sizes: Mapping[str, int], began: float) -> Proof:
    moments = {key: objects.read_back_at(key) or 0.0 for key in sizes}
    fresh = {key for key, moment in moments.items() if moment >= began}
    oldest = min(moments.values())
    return Proof(
        root=root,
        closure=closure_digest(sizes.items()),
        documents=sum(key.startswith("documents/") for key in fresh),
        objects=sum(key.startswith("objects/") for key in fresh),
        bytes_read=sum(sizes[key] for key in fresh),
        oldest_seconds=0 if oldest >= began else int(time.monotonic() - oldest) + 1,
        read=None if len(fresh) == len(sizes) else tuple(key in fresh for key in sorted(sizes)),
    )
