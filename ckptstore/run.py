"""A training run: resume from a ref, save to it, read back behind."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.binding import default_binding
from ckptstore.capture import TrainingState
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    ConflictError,
    CorruptError,
    MalformedError,
    MismatchError,
    NotArmedError,
    NotFoundError,
    RefusedError,
    TornRestoreError,
)
from ckptstore.findings import raise_finding
from ckptstore.format import values
from ckptstore.format.checkpoint import Checkpoint, Deviation
from ckptstore.format.digest import Digest
from ckptstore.format.keys import check_ref_name
from ckptstore.format.progress import Cursor
from ckptstore.format.records import RefRecord
from ckptstore.restore import Restored, arm
from ckptstore.verify import verify

if TYPE_CHECKING:
    from ckptstore.store import Store

Readback = Literal["behind", "before-commit"]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that resume passed over, and why."""

    root: Digest
    step: int | None
    reason: str


class Run:
    """A run of one process that saves whole checkpoints to ``ref``; use it as a context manager.

    Args:
        store: the store.
        ref: the ref that the run moves.
        model, optimizer, scheduler, scaler, data, generators, values: the live objects, as in
            :class:`~ckptstore.capture.TrainingState`.
        binding: what decides bits, as plain values (default: torch version, threads, determinism switches, as they are
            at each save; what is not as in the parent is a deviation of the checkpoint).
        files: a tree that belongs to every checkpoint of the run.
        tracks_step: by counter name, whether it must equal the step (inferred where left out).
        readback: "behind": each save returns when the checkpoint is durable, and it is read back meanwhile;
            "before-commit": it is read back before the ref moves.
    """

    def __init__(
        self,
        store: Store,
        ref: str,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        generators: Any = (),
        values: Any = None,
        binding: Mapping[str, object] | None = None,
        files: Digest | None = None,
        tracks_step: Mapping[str, bool] | None = None,
        readback: Readback = "behind",
    ) -> None:
        self.store = store
        self.ref = check_ref_name(ref)
        self.state = TrainingState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            data=data,
            generators=generators,
            values=values,
        )
        self.skipped: list[Skipped] = []
        self.root: Digest | None = None
        self.checkpoint: Checkpoint | None = None
        self._binding = None if binding is None else dict(binding)
        self._files = files
        self._tracks_step = tracks_step
        self._readback = readback
        self._head: RefRecord | None = None
        self._committed: tuple[Digest, int] | None = None
        self._restored: Restored | None = None
        self._torn = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckptstore-readback")
        self._behind: Future[None] | None = None
        self._read_back: set[str] = set()
        self._started = False

    def resume(self, *, atomic: bool = False, allow_drift: bool = False) -> int:
        """Restore the head of the ref, verified while loading; returns its step, 0 if there is no checkpoint yet.

        If the closure of the head fails, its parents are tried in turn; each one passed over is in :attr:`skipped`.

        Args:
            atomic: verify every byte before the first live one changes.
            allow_drift: go on although the binding (versions, threads, switches) is not the stored one; the next
                checkpoint then says that it is no exact continuation.

        Raises:
            MismatchError: live and stored state or binding do not fit; nothing was changed.
            NotArmedError: the live state was overwritten and is not the stored one; it cannot be saved any more.
            CorruptError, NotFoundError, MalformedError: no checkpoint of the ref's history can be loaded.
            BackendError, TornRestoreError: the storage failed; resume again when it does not.
        """
        self._started = True
        self._head = self.store.refs.head(self.ref)
        self.skipped = []
        root = self._head.root if self._head else None
        failure: CkptStoreError | None = None
        while root is not None:
            checkpoint: Checkpoint | None = None
            try:
                checkpoint = self.store.checkpoint(root)
                self._check_binding(root, checkpoint, allow_drift)
                self._restore(root, atomic)
            except (CorruptError, NotFoundError, MalformedError) as error:
                if isinstance(error.__cause__, BackendError):
                    raise  # the storage failed in the middle; that is no reason to lose the steps since the parent
                failure = error
            else:
                self.root, self.checkpoint = root, checkpoint
                return checkpoint.step
            self.skipped.append(Skipped(root, checkpoint.step if checkpoint else None, str(failure)))
            root = checkpoint.parent if checkpoint else self._parent_in_log(root)
        if failure is not None:
            listed = "; ".join(f"{item.root.short}: {item.reason}" for item in self.skipped)
            hint = "bring good bytes with ckpt pull, or name another ref"
            raise type(failure)(f"ref {self.ref}", f"no checkpoint of it can be loaded: {listed}", hint)
        return 0

    def arm(self) -> None:
        """Check, just before the first step, that the live state still is the restored one. Nothing to do without one.

        Raises:
            NotArmedError: names everything that was changed since the restore; until it is as it was, nothing is saved.
        """
        if self._restored is not None:
            self._torn = True
            arm(self.state, self._restored)
            self._torn = False

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, object] | None = None,
        cursors: Mapping[str, Cursor] | None = None,
    ) -> Digest:
        """Commit the live state as the next checkpoint of the ref; returns its root when it is durable.

        Args:
            step: updates done so far; more than the parent's.
            metrics: plain values that are kept as a receipt beside the checkpoint.
            cursors: positions in streams by name.

        Raises:
            RefusedError: the state cannot be stored exactly, or counters disagree; nothing was committed.
            ConflictError: somebody else moved the ref.
            CkptStoreError: an earlier readback failed; it is raised here first.
        """
        self._await_readback()
        self._adopt()
        if self._torn:
            why = "the last restore was torn, or its state changed since: it is not that of a checkpoint"
            raise RefusedError(f"save to {self.ref}", why, "restore a good checkpoint first")
        head = self._base()
        parent = head.root if head else None
        if parent is not None and self.checkpoint is not None and step <= self.checkpoint.step:
            why = f"step {step} does not come after its parent's step {self.checkpoint.step}"
            raise RefusedError(f"save to {self.ref}", why, "save after at least one more update")
        attempt = self.store.begin(self.ref)
        if attempt.parent != parent:
            why = f"it was moved to {attempt.parent} by somebody else"
            raise ConflictError(f"ref {self.ref}", why, "resume from there, or save to another ref")
        binding = self._present_binding()
        deviations = [] if self.checkpoint is None else _drift(self.checkpoint, binding)
        with self.store.lease():  # from the first object to the moved ref
            receipt = self.store.save_shard(
                self.state, attempt, step=step, binding=binding, cursors=cursors, files=self._files
            )
            root = self.store.commit(
                attempt,
                [receipt],
                deviations=deviations,
                tracks_step=self._tracks_step,
                metrics=metrics,
                readback=self._readback == "before-commit",
            )
        self._committed = root, attempt.generation + 1
        with suppress(CkptStoreError):  # it stands, whether it can be read now or not; the next save asks again
            self._adopt()
        if self._readback == "behind":
            self._behind = self._pool.submit(self._read_behind, root)
        return root

    def close(self) -> None:
        """Wait for the readback that is under way. Raises what it found."""
        try:
            self._await_readback()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CkptStoreError as failure:
            if error is None:
                raise
            error.add_note(f"besides, the readback of the last checkpoint failed: {failure}")

    def _adopt(self) -> None:
        """Take what the last save committed as what the next one follows."""
        if self._committed is None:
            return
        root, generation = self._committed
        checkpoint, head = self.store.checkpoint(root), self.store.refs.record(self.ref, generation)
        self.root, self.checkpoint, self._head = root, checkpoint, head
        self._restored = None
        self._committed = None

    def _base(self) -> RefRecord | None:
        """The ref's record that the next checkpoint follows."""
        if not self._started:
            head = self.store.refs.head(self.ref)
            if head is not None and head.root is not None:
                why = f"it names {head.root} already and this run did not resume from it"
                raise RefusedError(f"save to {self.ref}", why, "call resume() first, or save to another ref")
            self._started, self._head = True, head
        if self.skipped and self._head is not None and self._head.root != self.root:
            # The head is broken and an ancestor was restored: say so in the ref before building on it.
            self._head = self.store.refs.move(self.ref, self.root, self._head)
            self.skipped = []
        return self._head

    def _restore(self, root: Digest, atomic: bool) -> None:
        """Restore ``root``. What is interrupted or fails once live state may be overwritten leaves the run torn."""
        torn, self._torn = self._torn, True
        try:
            self._restored = self.store.restore(root, self.state, atomic=atomic)
        except (NotArmedError, TornRestoreError):
            raise
        except CkptStoreError:  # nothing was changed
            self._torn = torn
            raise
        self._torn = False

    def _present_binding(self) -> dict[str, object]:
        """The given binding, or what decides bits in this process now: switches may be thrown in mid-run."""
        return default_binding() if self._binding is None else self._binding

    def _check_binding(self, root: Digest, checkpoint: Checkpoint, allow_drift: bool) -> None:
        drifted = _drift(checkpoint, self._present_binding())
        if drifted and not allow_drift:
            listed = "; ".join(f"{d.code} is {d.actual}, stored {d.expected}" for d in drifted)
            hint = "run with the stored settings, or resume(allow_drift=True): the next checkpoint then says so"
            raise MismatchError(f"binding of checkpoint {root.short}", listed, hint)

    def _parent_in_log(self, root: Digest) -> Digest | None:
        """The root before ``root`` in the ref's own log, for a head whose document cannot be read."""
        seen = False
        for record in self.store.refs.log(self.ref):
            if seen and record.root is not None and record.root != root:
                return record.root
            seen = seen or record.root == root
        return None

    def _read_behind(self, root: Digest) -> None:
        report = verify(self.store.backend, root, skip=self._read_back)
        if report.findings:
            raise_finding(report.findings[0])
        self._read_back.update(report.keys)
        self.store.add_receipt(report.receipt(self.store.url))

    def _await_readback(self) -> None:
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()


def _drift(parent: Checkpoint, binding: Mapping[str, object]) -> list[Deviation]:
    """What of ``binding`` is not as it was in ``parent``."""
    stored = values.from_json(parent.binding, "binding")
    actual = values.from_json(values.to_json(dict(binding), "binding"))
    assert isinstance(stored, dict)
    assert isinstance(actual, dict)
    return [
        Deviation(f"binding.{key!s}", repr(stored.get(key)), repr(actual.get(key)))
        for key in sorted(stored.keys() | actual.keys(), key=str)
        if values.to_json(stored.get(key)) != values.to_json(actual.get(key))
    ]
