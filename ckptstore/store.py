"""The store: one object with a method for each verb, over a backend."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from ckptstore import trees
from ckptstore import verify as verification
from ckptstore.backends import open_backend
from ckptstore.backends.protocol import PruneBackend, ReadbackMethod
from ckptstore.closure import Closure, read_closure
from ckptstore.commit import Attempt, begin, collect, commit, publish, verdict
from ckptstore.errors import (
    CkptStoreError,
    CommitAbortedError,
    ConflictError,
    MalformedError,
    NotFoundError,
    RefusedError,
    UnsupportedVersionError,
    UsageError,
)
from ckptstore.findings import Place, raise_finding
from ckptstore.format import values
from ckptstore.format.checkpoint import Checkpoint, Deviation, Replica
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY, check_ref_name, digest_of_key, receipt_key, receipt_prefix
from ckptstore.format.progress import Cursor, Progress
from ckptstore.format.records import (
    RECEIPT_LIMIT,
    RECORD_LIMIT,
    Receipt,
    RefRecord,
    ShardReceipt,
)
from ckptstore.format.records import (
    Store as StoreHeader,
)
from ckptstore.format.shard import Alias
from ckptstore.format.tree import Preparation, Tree
from ckptstore.leases import lease, now
from ckptstore.objects import Objects, malformed, writable
from ckptstore.pins import pinned_shards
from ckptstore.refs import Refs
from ckptstore.transfer import Transfer, send_shard, transfer
from ckptstore.verify import VerifyReport

if TYPE_CHECKING:
    from ckptstore.capture import TrainingState
    from ckptstore.catalogue import Catalogue
    from ckptstore.difference import Difference
    from ckptstore.restore import Restored
    from ckptstore.run import Run

MIN_PREFIX = 4


class Store:
    """A checkpoint store over ``backend``; made by :func:`open_store`."""

    def __init__(self, backend: PruneBackend) -> None:
        self.backend = backend
        self.objects = Objects(backend)
        self.refs = Refs(backend)
        self._lease_depth = 0
        self._lease_lock = Lock()

    @property
    def url(self) -> str:
        """Where the store is."""
        return self.backend.url

    # -- looking ------------------------------------------------------------------------------------------------------

    def head(self, ref: str) -> Digest | None:
        """The root that ``ref`` names now, or None if there is no such ref or it names nothing."""
        record = self.refs.head(ref)
        return record.root if record else None

    def resolve(self, name: str) -> Digest:
        """The root that ``name`` means: a ref, a digest, or a unique prefix of one (4 hex digits or more).

        Raises:
            NotFoundError: nothing has that name.
            UsageError: the prefix fits several checkpoints; lists them.
        """
        hexes = name.removeprefix("b3:")
        if len(hexes) == 64 and _is_hex(hexes):
            return Digest.parse(hexes)
        if not name.startswith("b3:") and not (len(hexes) >= MIN_PREFIX and _is_hex(hexes)):
            root = self.head(check_ref_name(name))
            if root is None:
                known = ", ".join(self.refs.names()) or "none"
                raise NotFoundError(f"ref {name}", f"no such ref in {self.url}", f"refs: {known}")
            return root
        if len(hexes) < MIN_PREFIX or not _is_hex(hexes):
            raise UsageError(f"root {name!r:.80}", f"neither a ref nor {MIN_PREFIX} hex digits or more of a digest")
        fitting = sorted(root for root in self.checkpoints(hexes))
        if not fitting:
            raise NotFoundError(f"checkpoint {name}", f"none in {self.url} begins so", "see ckpt log or ckpt ls")
        if len(fitting) > 1:
            listed = ", ".join(root.short for root in fitting[:8])
            raise UsageError(f"prefix {name}", f"it fits {len(fitting)} checkpoints: {listed}", "give more digits")
        return fitting[0]

    def checkpoint(self, root: Digest) -> Checkpoint:
        """The checkpoint document of ``root``, verified."""
        place = Place(checkpoint=root, part="checkpoint document")
        data = self.objects.document(root, place)
        assert data is not None
        try:
            return Checkpoint.parse(data)
        except MalformedError as error:
            raise malformed(place, "", error).error() from None

    def checkpoints(self, prefix: str = "") -> Iterator[Digest]:
        """Roots of all checkpoint documents in the store whose hex begins with ``prefix``, sorted."""
        folder = f"documents/{prefix[:2]}/" if len(prefix) >= 2 else "documents/"
        for stat in self.backend.list(folder):
            digest = digest_of_key(stat.key)
            if digest is not None and digest.hex.startswith(prefix):
                head = self.backend.get(stat.key, 0, 16)
                if head.startswith(b'{"binding":'):
                    yield digest

    def history(self, root: Digest) -> Iterator[tuple[Digest, Checkpoint]]:
        """``root`` and its ancestors, newest first, as far as their documents are in the store."""
        current: Digest | None = root
        while current is not None:
            try:
                checkpoint = self.checkpoint(current)
            except NotFoundError:
                if current == root:
                    raise
                return
            yield current, checkpoint
            current = checkpoint.parent

    def closure(self, root: Digest, shards: Collection[int] | None = None, *, files: bool = True) -> Closure:
        """All documents of ``root``, read and checked; raises the first finding."""
        return read_closure(self.objects, root, shards, files=files)

    def scope(self, root: Digest) -> tuple[int, ...] | None:
        """The shards of ``root`` that a partial store holds on purpose, by its pins; None: all of them should be here.

        A ref keeps whole checkpoints: what one names, or named before, is whole whatever pins there are.
        """
        shards = pinned_shards(self.backend, root)
        if shards is not None:
            for name in self.refs.names():
                if any(record.root == root for record in self.refs.log(name)):
                    return None
        return shards

    def receipts(self, subject: Digest) -> list[Receipt]:
        """All receipts about ``subject``, oldest first. They are notes: whoever can write the store can forge one."""
        found = []
        for stat in self.backend.list(receipt_prefix(subject)):
            data = self.backend.get(stat.key, 0, RECEIPT_LIMIT + 1)
            try:
                found.append(Receipt.parse(data))
            except MalformedError:
                continue  # shard receipts of an attempt, or damage; neither is proof of anything
        return sorted(found, key=lambda receipt: (receipt.time, receipt.operation))

    def readbacks(self, root: Digest) -> list[Receipt]:
        """Receipts that say that all of ``root`` was read back from its medium, oldest first; still only notes."""
        reaching = {method.value for method in ReadbackMethod if method.reaches_medium}
        return [
            receipt
            for receipt in self.receipts(root)
            if receipt.operation in ("verify", "push", "pull") and receipt.method in reaching and not receipt.exceptions
        ]

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold this store object's writer's lease; within another one of the same object it is that one."""
        with self._lease_lock:
            outermost = self._lease_depth == 0
            self._lease_depth += 1
        try:
            if outermost:
                with lease(self.backend):
                    yield
            else:
                yield
        finally:
            with self._lease_lock:
                self._lease_depth -= 1

    # -- saving -------------------------------------------------------------------------------------------------------

    def run(self, ref: str, **options: Any) -> Run:
        """A training run that saves to ``ref``; see :class:`ckptstore.run.Run` for the arguments. Needs torch."""
        from ckptstore.run import Run

        return Run(self, ref, **options)

    def begin(self, ref: str) -> Attempt:
        """Begin an attempt at moving ``ref``: decided once, given to all workers."""
        return begin(self.refs, ref)

    def save_shard(
        self,
        state: TrainingState,
        attempt: Attempt,
        *,
        step: int,
        index: int = 0,
        count: int = 1,
        run: Digest | None = None,
        binding: Mapping[str, object] | None = None,
        cursors: Mapping[str, Cursor] | None = None,
        files: Digest | None = None,
    ) -> ShardReceipt:
        """Write this worker's shard durably and publish its receipt; the commit comes later. Needs torch.

        Args:
            state: the live objects that this worker owns.
            attempt: the attempt, the same for all workers.
            step: updates done so far.
            index: this shard's number, from 0.
            count: number of shards.
            run: prepared identity, if there is one.
            binding: what decides bits (versions, switches, threads), as plain values; no names of machines.
            cursors: positions in streams by name.
            files: a tree of files that belongs to the checkpoint.

        Raises:
            RefusedError: something cannot be stored exactly; named; nothing was written. The attempt has a receipt that
                says so, and the other workers abort at once.
        """
        from ckptstore.save import write_shard

        try:
            captured = state.capture()
            with self.lease():
                written = write_shard(captured, index, count, self.objects)
            receipt = ShardReceipt(
                attempt=attempt.nonce,
                index=index,
                count=count,
                step=step,
                parent=attempt.parent,
                run=run,
                binding=values.to_json(dict(binding or {}), "binding"),
                progress=Progress(cursors=tuple(sorted((cursors or {}).items())), states=tuple(captured.states)),
                files=files,
                shard=written.digest,
            )
        except CkptStoreError as error:
            if count > 1:
                self.give_up(attempt, index=index, count=count, step=step, reason=str(error))
            raise
        if count > 1:
            publish(self.objects, receipt)
        return receipt

    def give_up(self, attempt: Attempt, *, index: int, count: int, step: int, reason: str) -> None:
        """Tell the other workers of an attempt that this one has no shard, so that they abort at once."""
        receipt = ShardReceipt(
            attempt=attempt.nonce,
            index=index,
            count=count,
            step=step,
            parent=attempt.parent,
            run=None,
            binding=values.to_json({}),
            progress=Progress(),
            files=None,
            shard=None,
            failure=reason[:2000] or "it gave up",
        )
        try:
            publish(self.objects, receipt)
        except CkptStoreError:
            return  # the others' deadline says the same, later; the worker's own error must not be masked

    def commit(
        self,
        attempt: Attempt,
        receipts: Sequence[ShardReceipt] | None = None,
        *,
        count: int | None = None,
        deadline: float = 60.0,
        ties: Sequence[Alias] = (),
        replicas: Sequence[Replica] = (),
        deviations: Sequence[Deviation] = (),
        tracks_step: Mapping[str, bool] | None = None,
        readback: bool = False,
    ) -> Digest:
        """Join the shards of an attempt and move the ref; returns the root. Needs no torch.

        Args:
            attempt: the attempt.
            receipts: the shard receipts; or leave them out and give ``count``, to wait for the published ones.
            count: how many shards are expected.
            deadline: seconds to wait for receipts.
            ties: tensors that are one tensor across shards.
            replicas: entries that several shards hold with equal values.
            deviations: why this is not an exact continuation of the parent.
            tracks_step: by counter name, whether it must equal the step (inferred where left out).
            readback: read the whole closure back before the ref moves.

        Raises:
            CommitAbortedError: the attempt did not come about; the ref is fenced, so everybody learns the same.
            ConflictError: somebody else moved the ref.
        """
        if receipts is None:
            if count is None:
                raise UsageError("commit", "neither receipts nor the number of shards to wait for was given")
            try:
                receipts = collect(self.objects, attempt, count, deadline)
            except CommitAbortedError:
                self.refs.fence(attempt.ref)
                raise
        root = commit(
            self.objects,
            self.refs,
            attempt,
            receipts,
            ties=ties,
            replicas=replicas,
            deviations=deviations,
            tracks_step=tracks_step,
            before_ref=self._readback_or_raise if readback else None,
        )
        self.note_in_catalogue(root)
        return root

    def verdict(self, attempt: Attempt, receipt: ShardReceipt, deadline: float = 60.0) -> Digest:
        """Wait, as a worker, for the verdict on an attempt: the root. CommitAbortedError if it did not come about.

        At the deadline (seconds) the ref is fenced: unknown becomes aborted, for everybody.
        """
        assert receipt.shard is not None
        return verdict(self.objects, self.refs, attempt, receipt.shard, receipt.index, deadline)

    def restore(
        self, root: Digest, state: TrainingState, *, shard: int | None = None, atomic: bool = False
    ) -> Restored:
        """Put a checkpoint, or this process's shard of it, into live objects in place; see
        :func:`ckptstore.restore.restore`."""
        from ckptstore.restore import restore

        return restore(self.objects, root, state, shard=shard, atomic=atomic)

    # -- files --------------------------------------------------------------------------------------------------------

    def put_tree(self, directory: str | Path, exclude: Mapping[str, str] | None = None) -> Digest:
        """Store a folder of files as a tree; see :func:`ckptstore.trees.put_tree`."""
        with self.lease():
            return trees.put_tree(self.objects, Path(directory), exclude)

    def tree(self, digest: Digest) -> Tree:
        """The tree with this digest, verified."""
        return trees.read_tree(self.objects, digest)

    def get_tree(self, digest: Digest, directory: str | Path, paths: Collection[str] | None = None) -> int:
        """Write a tree's files (``paths``: only these) below ``directory``, verified; returns the bytes written."""
        return trees.get_tree(self.objects, digest, Path(directory), paths)

    def put_preparation(self, plan: Digest, inputs: Digest, sources: Digest) -> Digest:
        """Store what was fixed before a run, as three trees; returns the prepared identity."""
        return self.objects.put_document(Preparation(plan, inputs, sources).encode())

    def preparation(self, digest: Digest) -> Preparation:
        """The preparation with this prepared identity, verified."""
        data = self.objects.document(digest, Place(part=f"preparation {digest.short}"))
        assert data is not None
        return Preparation.parse(data)

    # -- proving ------------------------------------------------------------------------------------------------------

    def verify(
        self,
        name: str | Digest,
        shards: Collection[int] | None = None,
        progress: verification.Progress | None = None,
        *,
        files: bool = True,
    ) -> VerifyReport:
        """Read every byte of a closure again and list all that is wrong; see :func:`ckptstore.verify.verify`.

        If ``name`` is a ref, its log of generations is checked as well. ``files`` false leaves out the trees of files and
        of the preparation, for a store that pulled without them.
        """
        if isinstance(name, Digest):
            return verification.verify(self.backend, name, shards, progress, files=files)
        if name in self.refs.names():
            found = self.refs.findings(name)
            try:
                root = self.resolve(name)
            except CkptStoreError:
                if found[0]:
                    raise found[0][0].error("name the root itself to verify the checkpoint") from None
                raise
            return verification.verify(self.backend, root, shards, progress, refs=[found], files=files)
        return verification.verify(self.backend, self.resolve(name), shards, progress, files=files)

    def diff(self, left: str | Digest, right: str | Digest, other: Store | None = None) -> Difference:
        """What is not the same in two checkpoints, each a root, a prefix or a ref; see :func:`ckptstore.diff.diff`.

        ``right`` is looked up in ``other`` if that is given. Needs NumPy, no torch.
        """
        from ckptstore.diff import diff

        second = self if other is None else other
        roots = [
            name if isinstance(name, Digest) else store.resolve(name) for store, name in ((self, left), (second, right))
        ]
        return diff(self, roots[0], second, roots[1])

    def add_receipt(self, receipt: Receipt) -> Digest:
        """Store a receipt; returns its digest."""
        data = receipt.encode()
        digest = Digest.of(data)
        writable(self.backend).create(receipt_key(receipt.subject, digest), data)
        self._note(lambda catalogue: catalogue.add_receipt(digest, receipt))
        return digest

    def move_ref(self, ref: str, root: Digest | None, expected: Digest | None) -> RefRecord:
        """Let ``ref`` name ``root`` if it names ``expected`` now.

        Raises:
            ConflictError: it names something else.
            NotFoundError: the store has no such checkpoint.
        """
        if root is not None:
            self.checkpoint(root)
        head = self.refs.head(check_ref_name(ref))
        actual = head.root if head else None
        if actual != expected:
            raise ConflictError(f"ref {ref}", f"it names {actual}, expected {expected}", "read it and try again")
        return self.refs.move(ref, root, head)

    def note_in_catalogue(self, root: Digest) -> None:
        """Bring the local catalogue up to date. It is an index that can be rebuilt: its failure is logged, and never
        fails a commit."""
        self._note(lambda catalogue: catalogue.add_checkpoint(root))

    def catalogue(self) -> Catalogue:
        """The catalogue, an index for queries; see :class:`ckptstore.catalogue.Catalogue`.

        Raises:
            CatalogueError: the store is not in a directory and so keeps none.
        """
        from ckptstore.catalogue import Catalogue

        return Catalogue.of(self)

    def _note(self, work: Callable[[Catalogue], None]) -> None:
        if not hasattr(self.backend, "path"):
            return  # only a directory keeps a catalogue
        from ckptstore.catalogue import CatalogueError

        try:
            with self.catalogue() as catalogue:
                work(catalogue)
        except CatalogueError as error:
            getLogger("ckptstore").warning("catalogue not brought up to date: %s", error)

    def _readback_or_raise(self, root: Digest) -> None:
        report = verification.verify(self.backend, root)
        if report.findings:
            raise_finding(report.findings[0])
        if not report.method.reaches_medium:
            why = f"bytes could only be read from a cache ({report.method.value})"
            raise RefusedError(
                f"readback before commit in {self.url}", why, "use readback='behind' on this file system"
            )
        self.add_receipt(readback_receipt(self, report))


def readback_receipt(store: Store, report: VerifyReport) -> Receipt:
    """The receipt of a verification that found nothing wrong."""
    return Receipt(
        operation="verify" if report.method.reaches_medium else "read",
        subject=report.root,
        closure=report.closure,
        documents=report.documents,
        objects=report.objects,
        bytes_read=report.bytes_read,
        method=report.method.value,
        time=now(),
        where=store.url,
    )


def open_store(url: str | Path, *, create: bool = False) -> Store:
    """Open the store at ``url``: a directory, ``file:///…`` or ``memory:name``.

    Args:
        url: where it is.
        create: make an empty store if there is none.

    Raises:
        NotFoundError: there is no store, and ``create`` is False.
        UnsupportedVersionError: the store is of a format, or has a feature, that this release does not know.
    """
    backend = open_backend(str(url), create=create)
    try:
        data = backend.get(STORE_KEY, 0, RECORD_LIMIT + 1)
    except NotFoundError:
        if not create:
            why = f"there is no {STORE_KEY}"
            raise NotFoundError(
                f"store {backend.url}", why, "make one with ckpt init, or open(…, create=True)"
            ) from None
        if next(iter(backend.list("")), None) is not None:
            why = f"it has files but no {STORE_KEY}"
            raise RefusedError(f"store {backend.url}", why, "choose an empty directory") from None
        backend.create(STORE_KEY, StoreHeader(secrets.token_hex(16)).encode())
        data = backend.get(STORE_KEY, 0, RECORD_LIMIT + 1)
    StoreHeader.parse(data)
    for stat in backend.list("features/"):
        name = stat.key.removeprefix("features/")
        raise UnsupportedVersionError(f"store {backend.url}", f"feature {name!r:.60} is unknown to this release")
    return Store(backend)


def push(
    source: Store,
    target: Store,
    root: Digest,
    *,
    shards: Collection[int] | None = None,
    ref: str | None = None,
    progress: verification.Progress | None = None,
) -> Transfer:
    """Copy a checkpoint, or some shards of it, to ``target`` and read all of it back there.

    Args:
        source: where it is.
        target: where it goes.
        root: the checkpoint.
        shards: only these; then no ref is moved.
        ref: let this ref of ``target`` name the root afterwards; it must name the parent, nothing, or the root already.
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
    progress: verification.Progress | None = None,
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
    progress: verification.Progress | None,
    files: bool = True,
) -> Transfer:
    if ref is not None:
        check_ref_name(ref)
        if shards is not None:
            raise UsageError(f"ref {ref}", "a ref names whole checkpoints, and only some shards are transferred")
    done = transfer(source.objects, target.backend, root, operation, shards, progress, files=files)
    if ref is not None:
        head = target.refs.head(ref)
        present = head.root if head else None
        if present != root:
            if present is not None and present not in {r for r, _ in source.history(root)}:
                why = f"it names {present}, which is no ancestor of {root}"
                raise ConflictError(f"ref {ref} at {target.url}", why, "push to another ref, or move it with ckpt ref")
            target.refs.move(ref, root, head)
    if shards is None:
        target.note_in_catalogue(root)
    return done


def _is_hex(text: str) -> bool:
    return bool(text) and all(digit in "0123456789abcdef" for digit in text)
