"""Latest: the head of a ref, or, where its closure fails, the newest ancestor that is whole.

Nothing is found by a name, a number or a time. What is passed over is listed with its reason and with the command that
may bring it back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from ckptstore.closure import Closure
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    CorruptError,
    MalformedError,
    NotFoundError,
    UnsupportedVersionError,
    UsageError,
)
from ckptstore.findings import Finding, Kind, raise_finding
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.keys import is_ref_name, retired_key
from ckptstore.format.records import RECORD_LIMIT, Receipt, RefRecord, Retired
from ckptstore.meter import OnProgress
from ckptstore.readbacks.readbacks import Part
from ckptstore.verify import Verifier, VerifyReport

if TYPE_CHECKING:
    from ckptstore.store import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that was passed over: its step (None: its document is lost), the reason, and the command that
    repairs it if another store has what it lacks."""

    root: Digest
    step: int | None
    reason: str
    repair: str = ""

    def __str__(self) -> str:
        step = "" if self.step is None else f" (step {self.step})"
        return f"checkpoint {self.root.short}{step}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest whole checkpoint of a ref.

    Args:
        ref: the ref.
        head: what it names now; None if there is no such ref, or it names nothing.
        root: the head, or the ancestor that is taken in its place; None only where ``head`` is.
        checkpoint: its document.
        report: what its verification read; it has no findings.
        skipped: the head and its ancestors down to ``root``, newest first, that are not whole.
    """

    ref: str
    head: Digest | None
    root: Digest | None = None
    checkpoint: Checkpoint | None = None
    report: VerifyReport | None = None
    skipped: tuple[Skipped, ...] = ()

    @property
    def move(self) -> str:
        """The command after which the ref names ``root``, so that it becomes the parent of what is saved next; empty
        if it does."""
        if self.root is None or self.root == self.head or self.head is None:
            return ""
        return f"ckpt ref move {self.ref} {self.root.hex} --expect {self.head.hex}"

    def receipt(self, where: str) -> Receipt:
        """The receipt of the verification of ``root`` in the store at ``where``. UsageError if there is no root."""
        if self.report is None or self.checkpoint is None:
            raise UsageError(f"latest of ref {self.ref}", "nothing was read")
        part = Part(files=_is_whole_without_files(self.checkpoint))
        return replace(self.report.receipt(where), exceptions=part.exceptions())


def latest(store: Store, ref: str, progress: OnProgress | None = None) -> Latest:
    """The head of ``ref``, read back and verified; where its closure fails, the newest ancestor that is whole.

    Looked at is what a restore needs: all but the trees of files and of the preparation. A closure fails where
    something of it is damaged or missing, also because it was retired. Whoever builds on an ancestor has to move the
    ref there first: a commit follows what the ref names (:attr:`Latest.move`; a :class:`~ckptstore.running.run.Run`
    does it).

    Raises:
        UsageError: ``ref`` is the name of no ref.
        CorruptError, NotFoundError, MalformedError: the head cannot be read, or no checkpoint of its history is whole;
            lists all of them.
        UnsupportedVersionError: one is of a later version, which is no damage.
        BackendError: the storage failed, which says nothing about the checkpoints.
    """
    if not is_ref_name(ref):
        why = "latest is asked of a ref; a checkpoint that is named itself is whole or it is not"
        raise UsageError(f"ref {ref!r:.80}", why, "ckpt verify says which")
    head = store.refs.head(ref)
    if head is None or head.root is None:
        return Latest(ref, None)
    verifier = Verifier(store.backend)

    def read(root: Digest, checkpoint: Checkpoint) -> VerifyReport:
        whole, began = _is_whole_without_files(checkpoint), time.monotonic()
        _check_presence(store, verifier.closure(root, files=whole))  # before much is read for nothing
        report = verifier.verify(root, progress=progress, files=whole, history=False, since=began)
        if report.findings:  # a storage that failed says nothing about the bytes
            raise min(report.findings, key=lambda finding: finding.kind is not Kind.UNREADABLE).error()
        return report

    found = newest(store, ref, head, read)
    return Latest(ref, head.root, found.root, found.checkpoint, found.result, found.skipped)


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """The newest checkpoint that could be loaded, what loading it returned, and those that could not."""

    root: Digest
    checkpoint: Checkpoint
    result: T
    skipped: tuple[Skipped, ...]


def newest(store: Store, ref: str, head: RefRecord, load: Callable[[Digest, Checkpoint], T]) -> Found[T]:
    """The head of ``ref``, or the newest ancestor, that ``load`` loads.

    Args:
        store: the store.
        ref: the ref.
        head: its head, which names something.
        load: raises CorruptError, NotFoundError or MalformedError if the closure fails; every other error is raised.

    Raises:
        CorruptError, NotFoundError, MalformedError: none can be loaded; lists all of them.
        BackendError, UnsupportedVersionError: see :func:`latest`.
    """
    skipped: list[Skipped] = []
    failures: list[CkptStoreError] = []
    root = head.root
    while root is not None:
        checkpoint: Checkpoint | None = None
        try:
            checkpoint = store.checkpoint(root)
            return Found(root, checkpoint, load(root, checkpoint), tuple(skipped))
        except (CorruptError, NotFoundError, MalformedError) as error:
            if not _is_damage(error):
                raise
            failures.append(error)
        skipped.append(_skip(store, root, checkpoint, failures[-1]))
        if checkpoint is not None:
            root = checkpoint.parent
            continue
        try:
            root = _before(store, ref, root)
        except (CorruptError, MalformedError, NotFoundError) as error:
            failures.append(error)
            root = None
    raise _none(ref, skipped, failures)


def _is_whole_without_files(checkpoint: Checkpoint) -> bool:
    """Whether there are no trees of files that could be left out."""
    return checkpoint.run is None and checkpoint.files is None


def _check_presence(store: Store, closure: Closure) -> None:
    """Raise the first object that is not there."""
    there = store.backend.present(closure.objects.keys())
    for key, need in closure.objects.items():
        if key not in there and store.backend.stat(key) is None:
            raise_finding(Finding(Kind.MISSING, need.places[0], key, "not in the store", str(need.digest), "nothing"))


def _skip(store: Store, root: Digest, checkpoint: Checkpoint | None, error: CkptStoreError) -> Skipped:
    reason = f"{error.what}: {error.why}"
    retired = _retired(store, root) if isinstance(error, NotFoundError) else None
    if retired is not None:
        reason = f"it was retired ({retired}): {reason}"
    return Skipped(root, None if checkpoint is None else checkpoint.step, reason, repair_command(store, root))


def repair_command(store: Store, root: Digest) -> str:
    """What to run to get good bytes for ``root`` from the remotes of ``store``, or from another store if it knows
    none."""
    from ckptstore.remotes import remotes_of  # which opens stores, and so needs what needs this

    known = {}
    with suppress(CkptStoreError):  # a damaged list of them is told by those who need it
        known = remotes_of(store)
    return f"ckpt repair {root.hex}" if known else f"ckpt repair {root.hex} --from URL"


def _retired(store: Store, root: Digest) -> str | None:
    """The reason why a closure was given up, None if it was not."""
    try:
        return Retired.parse(store.backend.get(retired_key(root), 0, RECORD_LIMIT + 1)).reason
    except NotFoundError:
        return None
    except (CorruptError, MalformedError):
        return "its marker is damaged"


def _before(store: Store, ref: str, root: Digest) -> Digest | None:
    """The parent of a checkpoint whose own document is lost: a commit follows what the ref names, so it is what the ref
    named before it named ``root`` for the first time."""
    seen, before = False, list[Digest | None]()
    for record in store.refs.log(ref):  # newest first
        if record.root == root:
            seen, before = True, []
        elif seen and not before:
            before = [record.root]
    return before[0] if before else None


def _is_damage(error: CkptStoreError) -> bool:
    """Whether stored bytes are at fault, and not the way to them or the release that reads them."""
    if isinstance(error.__cause__, BackendError):
        return False
    unknown: BaseException | None = error
    while isinstance(unknown, MalformedError):
        if isinstance(unknown, UnsupportedVersionError):
            return False
        unknown = unknown.__context__
    return True


def _none(ref: str, skipped: list[Skipped], failures: list[CkptStoreError]) -> CkptStoreError:
    kinds = (CorruptError, MalformedError)
    kind = next((kind for kind in kinds if any(isinstance(failure, kind) for failure in failures)), NotFoundError)
    listed = "; ".join(map(str, skipped))
    if len(failures) > len(skipped):
        listed += f"; and the log of the ref cannot be read further: {failures[-1]}"
    repair = next((item.repair for item in skipped if item.repair), "")
    hint = f"{repair} may bring the newest back" if repair else "name another ref"
    return kind(f"ref {ref}", f"no checkpoint of it can be loaded: {listed}", hint)
