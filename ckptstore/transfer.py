"""Push and pull: a closure, or one shard of it, from one store to another, read back whole where it arrived."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadBackend
from ckptstore.closure import Closure, Need, read_closure, read_shard
from ckptstore.errors import CorruptError, NotFoundError
from ckptstore.findings import Finding, Kind, Place, Report, raise_finding
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, object_key, pin_key, receipt_key, retired_key
from ckptstore.format.records import Pin, Receipt, Retired, closure_digest
from ckptstore.leases import lease, now
from ckptstore.meter import OnProgress
from ckptstore.objects import Objects, writable
from ckptstore.threads import in_threads


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a push or pull did: keys and bytes sent, keys that good bytes lay under already, and the receipt of the
    readback."""

    root: Digest
    sent_keys: int
    sent_bytes: int
    present_keys: int
    repaired_keys: int
    receipt: Receipt


def transfer(
    source: Objects,
    target: ReadBackend,
    root: Digest,
    operation: str,
    shards: Collection[int] | None = None,
    progress: OnProgress | None = None,
    *,
    files: bool = True,
) -> Transfer:
    """Copy what is missing, children before parents, and read every key of the closure back from ``target``.

    Args:
        source: where the closure is; every byte is verified when it is read, so no unverified byte is sent.
        target: where it goes. A key that is there is no proof: its bytes are read and hashed, and replaced if they
        are wrong.
        root: digest of the checkpoint.
        operation: "push" or "pull", for the receipt.
        shards: only these shards; ``target`` then gets a pin of that scope.
        progress: called with (bytes done, bytes in all).
        files: whether the trees of files and of the preparation go too; a restore needs none of them.

    Raises:
        CorruptError, NotFoundError: the source lacks good bytes; nothing that refers to them was written to ``target``.
        CorruptError: what ``target`` gives back is not what was sent; names the key.
    """
    store = writable(target)
    closure = read_closure(source, root, shards, files=files)
    sender = _Sender(source, Objects(target, medium=True))
    with lease(target):
        outcomes = sender.send_objects(closure, progress)
        # Whatever says what of a checkpoint is not here on purpose comes before the checkpoint.
        if shards is not None:
            pin = Pin(tuple(sorted(shards)), f"{operation} of some shards")
            store.create(pin_key(root, secrets.token_hex(16)), pin.encode())
        _send_history(source, target, closure)
        outcomes += sender.send_documents(closure)
    return sender.sum_up(root, operation, closure, outcomes)


def send_shard(source: Objects, target: ReadBackend, digest: Digest, index: int, count: int) -> Transfer:
    """Copy one shard that belongs to no checkpoint yet, children before parents, and read it back from ``target``.

    So workers save to a store of their own, and who commits needs only what arrived. Nothing keeps the shard until the
    commit.

    Args:
        source: where the worker saved it.
        target: where the commit will be made.
        digest: the shard document.
        index: the shard's number.
        count: number of shards.

    Returns:
        Its ``root`` is the shard's digest.

    Raises:
        CorruptError, NotFoundError: as :func:`transfer`.
    """
    writable(target)
    closure = read_shard(source, digest, index, count)
    sender = _Sender(source, Objects(target, medium=True))
    with lease(target):
        outcomes = [*sender.send_objects(closure, None), *sender.send_documents(closure)]
    return sender.sum_up(digest, "push", closure, outcomes)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What happened to one key: bytes sent (0: good bytes were there), bytes read back, whether bad ones were
    replaced."""

    sent: int
    read: int
    repaired: bool = False


class _Sender:
    """Sends one key at a time; may be called from several threads."""

    def __init__(self, source: Objects, target: Objects) -> None:
        self._source = source
        self._target = target

    def send_objects(self, closure: Closure, progress: OnProgress | None) -> list[_Outcome]:
        """Make sure that the target gives back every object."""
        outcomes: list[_Outcome] = []
        total = sum(need.length for need in closure.objects.values())
        done = 0
        for need, outcome in in_threads(self.send_object, closure.objects.values()):
            outcomes.append(outcome)
            done += need.length
            if progress is not None:
                progress(done, total)
        return outcomes

    def send_documents(self, closure: Closure) -> list[_Outcome]:
        """Make sure that the target gives back every document, children before parents; its objects are there."""
        return [self.send_document(key) for key in reversed(closure.documents)]

    def send_object(self, need: Need) -> tuple[Need, _Outcome]:
        """Make sure that the target gives back this object."""
        return need, self._send(object_key(need.digest), need.digest, need.length, need.places[0])

    def send_document(self, key: str) -> _Outcome:
        """Make sure that the target gives back this document."""
        digest = Digest.parse(key.rsplit("/", 1)[1])
        return self._send(key, digest, None, Place(part=f"document {digest.short}"))

    def _send(self, key: str, digest: Digest, length: int | None, place: Place) -> _Outcome:
        """``length`` None: a document, of any length up to the limit."""
        found: list[Finding] = []
        existed = self._target.backend.stat(key) is not None
        if existed:
            data = self._read(self._target, digest, length, place, found.append)
            if data is not None:
                return _Outcome(0, len(data))
        data = self._read(self._source, digest, length, place, raise_finding)
        assert data is not None
        self._target.put(key, digest, data)
        found.clear()
        if self._read(self._target, digest, length, place, found.append) is None:
            (finding,) = found
            if finding.kind is Kind.UNREADABLE:
                raise finding.error("run it again: what was sent is used")
            raise CorruptError(
                f"{place} at {self._target.backend.url}",
                f"readback after sending failed: {finding}",
                "the destination does not keep what it is given; check its disk or its checksum settings",
            )
        return _Outcome(len(data), len(data), existed)

    @staticmethod
    def _read(objects: Objects, digest: Digest, length: int | None, place: Place, report: Report) -> bytes | None:
        if length is None:
            return objects.document(digest, place, report)
        return objects.read(digest, length, place, report)

    def sum_up(self, subject: Digest, operation: str, closure: Closure, outcomes: list[_Outcome]) -> Transfer:
        """Leave a receipt about ``subject`` at the target, and say what was done."""
        backend = self._target.backend
        receipt = Receipt(
            operation=operation,
            subject=subject,
            closure=closure_digest(closure.sizes()),
            documents=len(closure.documents),
            objects=len(closure.objects),
            bytes_read=sum(outcome.read for outcome in outcomes),
            method=self._target.method.value,
            time=now(),
            where=backend.url,
            exceptions=_exceptions(closure),
        )
        data = receipt.encode()
        writable(backend).create(receipt_key(subject, Digest.of(data)), data)
        return Transfer(
            root=subject,
            sent_keys=sum(outcome.sent > 0 for outcome in outcomes),
            sent_bytes=sum(outcome.sent for outcome in outcomes),
            present_keys=sum(not outcome.sent for outcome in outcomes),
            repaired_keys=sum(outcome.repaired for outcome in outcomes),
            receipt=receipt,
        )


def _exceptions(closure: Closure) -> tuple[str, ...]:
    """What of a checkpoint did not go along, for the receipt."""
    checkpoint = closure.checkpoint
    if checkpoint is None:
        return ()
    left_out = []
    if len(closure.shards) < len(checkpoint.shards):
        left_out.append(f"only shards {', '.join(map(str, sorted(closure.shards)))}")
    if not closure.trees and (checkpoint.run, checkpoint.files) != (None, None):
        left_out.append("without its files")
    return tuple(left_out)


def _send_history(source: Objects, target: ReadBackend, closure: Closure) -> None:
    """Bring the checkpoint documents of the ancestors, and say of those whose closure is not at the target that it
    may be gone."""
    store = writable(target)
    parent = closure.checkpoint.parent if closure.checkpoint else None
    documents = Objects(target)
    while parent is not None:
        try:
            data = source.document(parent, Place(checkpoint=parent, part="ancestor"))
        except (CorruptError, NotFoundError):
            return  # history that the source itself has lost; verify says so at both ends
        assert data is not None
        checkpoint = Checkpoint.parse(data)
        if any(store.stat(document_key(shard)) is None for shard in checkpoint.shards):
            # First this, or a crash would leave a checkpoint that seems to have lost its closure.
            store.create(retired_key(parent), Retired("history only: its closure was not transferred").encode())
        documents.put(document_key(parent), parent, data)
        parent = checkpoint.parent
