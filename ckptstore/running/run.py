"""A training run: resume from a ref, save to it, read back behind, push on in the background."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from logging import getLogger
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.backends import deadline
from ckptstore.commits.commit import Committed, Declared
from ckptstore.errors import (
    CkptStoreError,
    ConflictError,
    CorruptError,
    MismatchError,
    NotArmedError,
    NotFoundError,
    RefusedError,
    TornRestoreError,
    UsageError,
)
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.keys import check_ref_name
from ckptstore.format.progress import Cursor
from ckptstore.format.records import RefRecord
from ckptstore.gaps import Completeness
from ckptstore.live.binding import default_binding, drift
from ckptstore.live.capture import TrainingState
from ckptstore.live.completeness import inspect_state
from ckptstore.live.preflight import check_metrics
from ckptstore.live.restore import Restored, arm
from ckptstore.live.save import HashSink, write_shard
from ckptstore.running.behind import ReadbackBehind
from ckptstore.running.latest import Skipped, newest
from ckptstore.running.pushes import Push, Pushes, PushTo, targets

if TYPE_CHECKING:
    from ckptstore.store import Store

Readback = Literal["behind", "before-commit"]


class Run:
    """A run of one process that saves whole checkpoints to ``ref``; use it as a context manager.

    Args:
        store: the store.
        ref: the ref that the run moves.
        model, optimizer, scheduler, scaler, data, generators, values, moving: the live objects, and which of their
            hyper-parameters change, as in :class:`~ckptstore.live.capture.TrainingState`.
        binding: what decides bits, as plain values (default: torch version, threads, determinism switches, as they are
            at each save; what is not as in the parent is a deviation of the checkpoint).
        files: a tree that belongs to every checkpoint of the run.
        tracks_step: by counter name, whether it must equal the step (inferred where left out).
        readback: "behind": each save returns when the checkpoint is durable, and it is read back meanwhile;
            "before-commit": it is read back before the ref moves. The default is "behind" where the store is on this
            machine, and "before-commit" behind a network, where nothing else is possible: an upload that was
            acknowledged is no proof that the bytes are there.

    Raises:
        UsageError: ``readback="behind"`` for a store behind a network.
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
        moving: Collection[str] = (),
        binding: Mapping[str, object] | None = None,
        files: Digest | None = None,
        tracks_step: Mapping[str, bool] | None = None,
        readback: Readback | None = None,
    ) -> None:
        network = store.backend.traits.network
        if network and readback == "behind":
            why = f"{store.url} is behind a network, where a ref moves only after everything was read back"
            raise UsageError("readback='behind'", why, "leave readback out")
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
            moving=moving,
        )
        self.skipped: list[Skipped] = []
        self.root: Digest | None = None
        self.checkpoint: Checkpoint | None = None
        self._binding = None if binding is None else dict(binding)
        self._files = files
        self._tracks_step = tracks_step
        self._readback = readback or ("before-commit" if network else "behind")
        self._head: RefRecord | None = None
        self._tried: Digest | None = None
        self._restored: Restored | None = None
        self._torn = False
        self._behind = ReadbackBehind(store)
        self._pushes = Pushes(store, self.ref)
        self._started = False

    def resume(self, *, atomic: bool = False, allow_drift: bool = False) -> int:
        """Restore the head of the ref, verified while loading; returns its step, 0 if there is no checkpoint yet.

        Only if the closure of the head fails, its parents are tried in turn. Each one passed over is in
        :attr:`skipped` and in a warning of the logger ``ckptstore``, with the reason and the command that may repair
        it. The next save then first moves the ref to what was restored, so that this is the parent of what follows and
        the log of the ref says so; what was passed over stays in the store, and :meth:`resume` takes it once it is
        repaired before that.

        Args:
            atomic: verify every byte before the first live one changes.
            allow_drift: go on although the binding (versions, threads, switches) is not the stored one; the next
                checkpoint then says that it is no exact continuation.

        Raises:
            MismatchError: live and stored state or binding do not fit; nothing was changed.
            NotArmedError: the live state was overwritten and is not the stored one; it cannot be saved any more.
            CorruptError, NotFoundError, MalformedError: no checkpoint of the ref's history can be loaded.
            UnsupportedVersionError: one is of a later version, which is no damage.
            BackendError, TornRestoreError: the storage failed; resume again when it does not.

        After an error in which nothing live was changed, the run is where it was before: it goes on if it had resumed,
        and else nothing can be saved, since it would name a parent that it does not continue.
        """
        before = self._started, self._head, self._tried, self.root, self.checkpoint, self.skipped
        try:
            return self._resume(atomic, allow_drift)
        except BaseException:
            if self._torn:
                self._started = False
            else:
                self._started, self._head, self._tried, self.root, self.checkpoint, self.skipped = before
            raise

    def _resume(self, atomic: bool, allow_drift: bool) -> int:
        head = self.store.refs.head(self.ref)
        found = None
        if head is not None and head.root is not None:

            def load(root: Digest, checkpoint: Checkpoint) -> None:
                self._check_binding(root, checkpoint, allow_drift)
                self._restore(root, atomic)

            found = newest(self.store, self.ref, head, load)
        self._head, self._tried, self._started = head, None, True
        self.root = None if found is None else found.root
        self.checkpoint = None if found is None else found.checkpoint
        self.skipped = [] if found is None else list(found.skipped)
        self._warn()
        return 0 if found is None else found.checkpoint.step

    def arm(self) -> None:
        """Check, just before the first step, that the live state still is the restored one. Nothing to do without one.

        Raises:
            NotArmedError: names everything that was changed since the restore; until it is as it was, nothing is saved.
        """
        if self._restored is not None:
            self._torn = True
            arm(self.state, self._restored)
            self._torn = False

    def inspect(self, *, cursors: Collection[str] | Mapping[str, object] = ()) -> Completeness:
        """What of this process the checkpoints of this run would not cover, best asked before the first save; see
        :func:`ckptstore.live.completeness.inspect_completeness`. Changes nothing.

        Args:
            cursors: the cursors that :meth:`save` will get, or their names.
        """
        files = None if self._files is None else self.store.tree(self._files)
        return inspect_state(self.state, cursors=cursors, binding=self._binding, files=files)

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, object] | None = None,
        cursors: Mapping[str, Cursor] | None = None,
        push_to: PushTo | None = None,
    ) -> Digest:
        """Commit the live state as the next checkpoint of the ref; returns its root when it is durable.

        Args:
            step: updates done so far; more than the parent's.
            metrics: plain values that are kept as a receipt beside the checkpoint.
            cursors: positions in streams by name.
            push_to: where the checkpoint goes besides, with a full readback there and the ref of this run, while the
                training goes on: a store, its URL, the name of a remote, or several of these. If more than two
                checkpoints wait for one of them besides the one under way, this call waits, too.

        Raises:
            RefusedError: the state cannot be stored exactly, or counters disagree; nothing was committed.
            ConflictError: somebody else moved the ref.
            CkptStoreError: an earlier readback or push failed; it is raised here first, once, and nothing was saved.
        """
        if metrics is not None:
            check_metrics(metrics)
        wanted = targets(self.store, push_to)
        self._behind.wait()
        self._tell()
        if self._torn:
            why = "the last restore was torn, or its state changed since: it is not that of a checkpoint"
            raise RefusedError(f"save to {self.ref}", why, "restore a good checkpoint first")
        root = self._saved_before(step, cursors) or self._saved(step, metrics, cursors)
        if self._readback == "behind":
            self._behind.read(root)
        self._pushes.ask(root, step, wanted)
        return root

    @property
    def pushes(self) -> tuple[Push, ...]:
        """The pushes that were asked for and how far they are, oldest first; of those that are done only the last."""
        return self._pushes.all

    def wait(self) -> None:
        """Wait for the readback and the pushes that are under way. Raises what went wrong and was not told yet."""
        done = self._behind.wait() and self._pushes.wait()
        self._tell()
        if not done:
            raise deadline.out_of_time(f"readback and pushes of ref {self.ref}")

    def close(self) -> None:
        """The same, at the end of the run. An interrupt ends them: what was pushed so far is used by the next push."""
        try:
            self.wait()
        except KeyboardInterrupt:
            self._give_up()
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._give_up()
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"besides, a readback or push of this run failed: {failure}")
            for note in getattr(failure, "__notes__", ()):
                error.add_note(note)

    def _saved(self, step: int, metrics: Mapping[str, object] | None, cursors: Mapping[str, Cursor] | None) -> Digest:
        """Store and commit the live state."""
        began = time.monotonic()
        head = self._base()
        parent = head.root if head else None
        if parent is not None and self.checkpoint is not None and step <= self.checkpoint.step:
            why = f"step {step} does not come after its parent's step {self.checkpoint.step}"
            raise RefusedError(f"save to {self.ref}", why, "save after at least one more update")
        attempt = self.store.begin(self.ref, after=head)
        if attempt.parent != parent:
            why = f"it was moved to {attempt.parent} by somebody else"
            raise ConflictError(f"ref {self.ref}", why, "resume from there, or save to another ref")
        binding = self._present_binding()
        deviations = [] if self.checkpoint is None else drift(self.checkpoint, binding)

        def commit() -> Committed:
            with self.store.lease():  # from the first object to the moved ref
                receipt = self.store.save_shard(
                    self.state, attempt, step=step, binding=binding, cursors=cursors, files=self._files
                )
                return self.store.commits.conclude(
                    attempt,
                    [receipt],
                    Declared(deviations=deviations, tracks_step=self._tracks_step),
                    metrics=metrics,
                    readback=self._readback == "before-commit",
                    after=head if head is not None and head.generation == attempt.generation else None,
                    began=began,
                    before_ref=self._try,
                )

        try:
            committed = commit()
        except (CorruptError, NotFoundError):
            if not self.store.backend.traits.network:
                raise
            committed = commit()  # what was changed on its way, and found so, is stored anew
        self._follow(committed)
        self.store.note_in_catalogue(committed.root)
        return committed.root

    def _try(self, root: Digest) -> None:
        self._tried = root

    def _follow(self, committed: Committed) -> None:
        """What was committed is what the next save follows."""
        self.root, self.checkpoint, self._head = committed.root, committed.checkpoint, committed.record
        self._restored = self._tried = None

    def _saved_before(self, step: int, cursors: Mapping[str, Cursor] | None) -> Digest | None:
        """The root of the last save, if it was committed although its answer was lost, and this is that state."""
        if self._tried is None:
            return None
        attempt = self.store.begin(self.ref, after=self._head)
        if attempt.parent != self._tried:
            return None
        record = self.store.refs.record(self.ref, attempt.generation)
        checkpoint = self.store.checkpoint(attempt.parent)
        self._follow(Committed(attempt.parent, checkpoint, record))
        if step != checkpoint.step or dict(cursors or {}) != dict(checkpoint.progress.cursors):
            return None
        captured = self.state.capture()
        same = [write_shard(captured, 0, 1, HashSink()).digest] == list(checkpoint.shards)
        return attempt.parent if same and tuple(captured.states) == checkpoint.progress.states else None

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
        drifted = drift(checkpoint, self._present_binding())
        if drifted and not allow_drift:
            listed = "; ".join(f"{d.code} is {d.actual}, stored {d.expected}" for d in drifted)
            hint = "run with the stored settings, or resume(allow_drift=True): the next checkpoint then says so"
            raise MismatchError(f"binding of checkpoint {root.short}", listed, hint)

    def _warn(self) -> None:
        """Say loudly that the head was not taken."""
        if not self.skipped or self.root is None or self.checkpoint is None:
            return
        log = getLogger("ckptstore")
        for item in self.skipped:
            log.warning("ref %s: passed over %s; %s may bring it back", self.ref, item, item.repair)
        log.warning(
            "ref %s: resumed from checkpoint %s at step %d instead; the next save lets the ref name that first",
            self.ref,
            self.root.short,
            self.checkpoint.step,
        )

    def _tell(self) -> None:
        """Raise what went wrong in the background and was not told yet: the first, with notes about the others."""
        failures = [*self._behind.failures(), *self._pushes.failures()]
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"besides: {other}")
            raise failures[0]

    def _give_up(self) -> None:
        """End what is under way in the background as soon as possible."""
        self._behind.give_up()
        self._pushes.give_up()
