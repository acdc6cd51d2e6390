"""The store: one object with a method for each verb, over a backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore import trees
from ckptstore import verify as verification
from ckptstore.backends.capabilities import Capabilities
from ckptstore.backends.protocol import PruneBackend
from ckptstore.backends.traffic import Traffic
from ckptstore.closure import Closure, read_closure
from ckptstore.commits.attempts import Attempt, begin, give_up, verdict
from ckptstore.commits.commit import Declared
from ckptstore.commits.concluding import Commits
from ckptstore.endpoints import capabilities, is_single_writer, record
from ckptstore.errors import CkptStoreError, CommitAbortedError, ConflictError, MalformedError, NotFoundError
from ckptstore.findings import Place
from ckptstore.format.checkpoint import Checkpoint, Deviation, Replica
from ckptstore.format.digest import Digest
from ckptstore.format.keys import check_ref_name, document_key, is_ref_name
from ckptstore.format.progress import Cursor
from ckptstore.format.records import Receipt, RefRecord, ShardReceipt
from ckptstore.format.shard import Alias
from ckptstore.format.tree import Preparation, Tree
from ckptstore.lazy import load
from ckptstore.leases import lease
from ckptstore.meter import OnProgress
from ckptstore.names import checkpoints, resolve
from ckptstore.objects import Objects, malformed
from ckptstore.pins import pinned_shards
from ckptstore.receipts import Receipts
from ckptstore.refs import Refs
from ckptstore.verify import VerifyReport

if TYPE_CHECKING:
    from ckptstore.catalogue import Catalogue
    from ckptstore.diff import Difference
    from ckptstore.live.capture import TrainingState
    from ckptstore.live.restore import Restored
    from ckptstore.live.snapshot import Snapshot
    from ckptstore.running.run import Run

CATALOGUE_VARIABLE = "CKPT_CATALOGUE"
"""Environment variable with the URL of the database that keeps the catalogues of a team."""


class Store:
    """A checkpoint store over ``backend``; made by :func:`ckptstore.open`."""

    def __init__(self, backend: PruneBackend) -> None:
        self.backend = backend
        self.objects = Objects(backend)
        self.refs = Refs(backend)
        self._receipts = Receipts(backend)
        self.commits = Commits(self.objects, self.refs, self._receipts)

    @property
    def url(self) -> str:
        """Where the store is."""
        return self.backend.url

    @property
    def id(self) -> str | None:
        """The id in the store's header, which never changes; None if the header cannot be read."""
        return self._receipts.store_id

    @property
    def traffic(self) -> Traffic | None:
        """Requests to the store's endpoint and bytes over its wire so far; None if it is not behind one."""
        return getattr(self.backend, "traffic", None)

    def capabilities(self, *, probe: bool = False) -> Capabilities | None:
        """What the store's endpoint honours, as recorded in the store, or, with ``probe`` or where nothing is recorded,
        as found out and recorded now; None if the store is not behind one."""
        found = capabilities(self.backend)
        return record(self.backend) if probe and found is not None else found

    @property
    def single_writer(self) -> bool:
        """Whether the store was made for one writer at a time."""
        return is_single_writer(self.backend)

    # -- looking ------------------------------------------------------------------------------------------------------

    def head(self, ref: str) -> Digest | None:
        """The root that ``ref`` names now, or None if there is no such ref or it names nothing."""
        record = self.refs.head(ref)
        return record.root if record else None

    def resolve(self, name: str) -> Digest:
        """The root that ``name`` means: a ref, a digest, or a unique prefix of one; see
        :func:`ckptstore.names.resolve`."""
        return resolve(self.backend, self.refs, name)

    def checkpoint(self, root: Digest) -> Checkpoint:
        """The checkpoint document of ``root``, verified."""
        place = Place(checkpoint=root, part="checkpoint document")
        data = self.objects.document(root, place)
        assert data is not None
        try:
            return Checkpoint.parse(data)
        except MalformedError as error:
            raise malformed(place, "", error).error() from None

    def checkpoints(self) -> Iterator[Digest]:
        """Roots of all checkpoint documents in the store, sorted."""
        return checkpoints(self.backend)

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
        if shards is None:
            return None
        unreadable: CkptStoreError | None = None
        for name in self.refs.names():
            try:
                if any(record.root == root for record in self.refs.log(name)):
                    return None
            except CkptStoreError as error:  # another ref may say it as well
                unreadable = unreadable or error
        if unreadable is not None:
            raise unreadable
        return shards

    def receipts(self, subject: Digest) -> list[Receipt]:
        """All receipts about ``subject``, oldest first. They are notes: whoever can write the store can forge one."""
        return self._receipts.about(subject)

    def readbacks(self, root: Digest) -> list[Receipt]:
        """Receipts that say that all of ``root`` was read back here from its medium, oldest first; still only notes."""
        return self._receipts.readbacks(root)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold a writer's lease, one for all who hold it at the same time; see :func:`ckptstore.leases.lease`."""
        with lease(self.backend):
            yield

    # -- saving -------------------------------------------------------------------------------------------------------

    def run(self, ref: str, **options: Any) -> Run:
        """A training run that saves to ``ref``; needs torch. See :class:`ckptstore.running.run.Run` for the
        arguments."""
        run: Run = load("ckptstore.running.run").Run(self, ref, **options)
        return run

    def begin(self, ref: str, after: RefRecord | None = None) -> Attempt:
        """Begin an attempt at moving ``ref``: decided once, given to all workers.

        ``after`` is a record that is its head as far as the caller knows: then only later ones are looked for.
        """
        return begin(self.refs, ref, after)

    def save_shard(
        self,
        state: TrainingState | Snapshot,
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
            state: the live objects that this worker owns, or a snapshot of them that was taken earlier; then ``step``
                and ``cursors`` are those of that moment, too.
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
        with self.lease(), self.objects.looking():
            receipt: ShardReceipt = load("ckptstore.live.save").save_shard(
                self.objects,
                state,
                attempt,
                step=step,
                index=index,
                count=count,
                run=run,
                binding=binding or {},
                cursors=cursors or {},
                files=files,
            )
        return receipt

    def give_up(self, attempt: Attempt, *, index: int, count: int, step: int, reason: str) -> None:
        """Tell the other workers of an attempt that this one has no shard, so that they abort at once."""
        give_up(self.objects, attempt, index=index, count=count, step=step, reason=reason)

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
        metrics: Mapping[str, object] | None = None,
        readback: bool | None = None,
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
            metrics: plain values that are kept as a receipt beside the checkpoint, from before the ref moves.
            readback: read the whole closure back before the ref moves (default: if the store lies behind a network,
                and then nothing else is possible). What this process has read back before is not read again.

        Raises:
            CommitAbortedError: the attempt did not come about; the ref is fenced, so everybody learns the same.
            ConflictError: somebody else moved the ref.
            CorruptError, NotFoundError: what was stored cannot be read back; the ref was not moved.
        """
        committed = self.commits.conclude(
            attempt,
            receipts,
            Declared(ties, replicas, deviations, tracks_step),
            count=count,
            deadline=deadline,
            metrics=metrics,
            readback=readback,
        )
        self.note_in_catalogue(committed.root)
        return committed.root

    def verdict(self, attempt: Attempt, receipt: ShardReceipt, deadline: float = 60.0) -> Digest:
        """Wait, as a worker, for the verdict on an attempt: the root. CommitAbortedError if it did not come about.

        At the deadline (seconds) the ref is fenced: unknown becomes aborted, for everybody.
        """
        assert receipt.shard is not None
        try:
            return verdict(self.objects, self.refs, attempt, receipt.shard, receipt.index, deadline)
        except CommitAbortedError:
            if self.backend.traits.network:
                self.objects.forget()  # it may be that what this worker stored could not be read back
            raise

    def restore(
        self, root: Digest, state: TrainingState, *, shard: int | None = None, atomic: bool = False
    ) -> Restored:
        """Put a checkpoint, or this process's shard of it, into live objects in place; see
        :func:`ckptstore.live.restore.restore`."""
        room = load("ckptstore.live.restore")
        restored: Restored = room.restore(self.objects, root, state, shard=shard, atomic=atomic)
        return restored

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
        with self.lease():
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
        progress: OnProgress | None = None,
        *,
        files: bool = True,
    ) -> VerifyReport:
        """Read every byte of a closure again and list all that is wrong; see :func:`ckptstore.verify.verify`.

        If ``name`` is a ref, its log of generations is checked as well. ``files`` false leaves out the trees of files
        and of the preparation, for a store that pulled without them. What is found bad is stored anew by the next save
        that needs it.
        """
        logs = [self.refs.findings(name)] if isinstance(name, str) and is_ref_name(name) else []
        try:
            root = name if isinstance(name, Digest) else self.resolve(name)
        except CkptStoreError:
            for findings, _ in logs:
                if findings:
                    raise findings[0].error("name the root itself to verify the checkpoint") from None
            raise
        report = verification.verify(self.backend, root, shards, progress, refs=logs, files=files)
        for finding in report.findings:
            self.objects.forget(finding.key)
        return report

    def diff(self, left: str | Digest, right: str | Digest, other: Store | None = None) -> Difference:
        """What is not the same in two checkpoints, each a root, a prefix or a ref; see :func:`ckptstore.diff.diff`.

        ``right`` is looked up in ``other`` if that is given. Needs NumPy, no torch.
        """
        from ckptstore.diff import diff

        second = self if other is None else other
        roots = [
            name if isinstance(name, Digest) else store.resolve(name) for store, name in ((self, left), (second, right))
        ]
        return diff(self.objects, roots[0], second.objects, roots[1])

    def add_receipt(self, receipt: Receipt) -> Digest:
        """Store a receipt; returns its digest."""
        digest = self._receipts.put(receipt)
        self._note(lambda catalogue: catalogue.add_receipt(digest, receipt))
        return digest

    def move_ref(self, ref: str, root: Digest | None, expected: Digest | None) -> RefRecord:
        """Let ``ref`` name ``root`` if it names ``expected`` now.

        Raises:
            ConflictError: it names something else.
            NotFoundError: the store has no such checkpoint, or not all of its shards.
        """
        checkpoint = None if root is None else self.checkpoint(root)
        head = self.refs.head(check_ref_name(ref))
        actual = head.root if head else None
        if actual != expected:
            raise ConflictError(f"ref {ref}", f"it names {actual}, expected {expected}", "read it and try again")
        with self.lease():  # a collection between the look and the move would take what was seen
            if root is not None and checkpoint is not None:
                self._check_shards(root, checkpoint)
            moved = self.refs.move(ref, root, head)
        self._note(lambda catalogue: catalogue.update())
        return moved

    def _check_shards(self, root: Digest, checkpoint: Checkpoint) -> None:
        """NotFoundError if only history, or some shards, of ``root`` are here: a ref names what is whole.

        What a listing lacks may be there; only what cannot be read is not.
        """
        seen = self.backend.present([document_key(shard) for shard in checkpoint.shards])
        for index, shard in enumerate(checkpoint.shards):
            if document_key(shard) not in seen:
                try:
                    self.objects.document(shard, Place(checkpoint=root, shard=index, part="shard document"))
                except NotFoundError as error:
                    why = f"{error.why}; retired or never here, so no ref can name the checkpoint"
                    hint = f"pull {root.hex} from another copy, or ckpt repair {root.hex}"
                    raise NotFoundError(error.what, why, hint) from None

    def note_in_catalogue(self, root: Digest) -> None:
        """Bring the catalogue up to date. It is an index that can be rebuilt: its failure is logged, and never fails a
        commit."""
        self._note(lambda catalogue: catalogue.add_checkpoint(root))

    def catalogue(self, url: str | None = None) -> Catalogue:
        """The catalogue, an index for queries; see :class:`ckptstore.catalogue.Catalogue`.

        Args:
            url: an SQLAlchemy URL of the database that it is kept in; by default what the environment variable
                CKPT_CATALOGUE says, else a file in the store's directory. A store writes to that default.

        Raises:
            CatalogueError: the URL names none, or there is no URL and the store is not in a directory.
        """
        from ckptstore.catalogue import Catalogue

        return Catalogue.of(self.backend, url or os.environ.get(CATALOGUE_VARIABLE))

    def _note(self, work: Callable[[Catalogue], None]) -> None:
        if not os.environ.get(CATALOGUE_VARIABLE) and not hasattr(self.backend, "path"):
            return  # only a directory keeps a catalogue of its own
        from ckptstore.catalogue import CatalogueError

        try:
            with self.catalogue() as catalogue:
                work(catalogue)
        except CatalogueError as error:
            getLogger("ckptstore").warning("catalogue not brought up to date: %s", error)
