"""What is known before a transfer begins: the closure and its history at the source, and hints about the target.

Nothing here changes anything, so that a plan may look with the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadBackend
from ckptstore.closure import Closure
from ckptstore.errors import CorruptError, NotFoundError
from ckptstore.findings import Place
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.keys import document_key
from ckptstore.objects import Objects
from ckptstore.readbacks.actors import store_id
from ckptstore.readbacks.readbacks import Part
from ckptstore.transfers.ages import Ages, versioned
from ckptstore.transfers.steps import Past, Steps, decide, lost


@dataclass(frozen=True, slots=True)
class Scope:
    """What of a checkpoint is transferred, and how.

    Args:
        operation: "push" or "pull", for the receipt.
        shards: only these; the destination then gets a pin of that scope.
        files: whether the trees of files and of the preparation go too; a restore needs none of them.
        max_age: seconds for which an earlier readback of the same version of an object may stand for one now; 0: every
            key is read now.
    """

    operation: str
    shards: tuple[int, ...] | None = None
    files: bool = True
    max_age: int = 0

    @property
    def part(self) -> Part:
        """What of the checkpoint, as receipts say it."""
        return Part(self.shards, self.files)


@dataclass(frozen=True, slots=True)
class Survey:
    """Of what store the target is (None: it has no header), the steps to be done there, and what the caller of a
    transfer may not expect."""

    store: str | None
    steps: Steps
    notes: tuple[str, ...] = ()


def ancestors(source: Objects, checkpoint: Checkpoint | None) -> Iterator[Past]:
    """The ancestors of a checkpoint, newest first, as far as the source has them.

    Raises:
        CorruptError: the document of one is damaged.
    """
    parent = checkpoint.parent if checkpoint else None
    while parent is not None:
        try:
            data = source.document(parent, Place(checkpoint=parent, part="ancestor"))
        except NotFoundError:
            return
        assert data is not None
        checkpoint = Checkpoint.parse(data)
        yield Past(parent, len(data), checkpoint.shards)
        parent = checkpoint.parent


def read_history(source: Objects, closure: Closure) -> tuple[Past, ...]:
    """The ancestors of a closure's root, newest first, as far as they can be read; where one cannot, verify says so at
    both ends."""
    found: list[Past] = []
    with suppress(CorruptError):
        for past in ancestors(source, closure.checkpoint):
            found.append(past)
    return tuple(found)


def survey(source: Objects, target: ReadBackend, closure: Closure, history: Sequence[Past], scope: Scope) -> Survey:
    """Ask the target, in a few requests, where everything stands.

    Args:
        source: where the closure was read.
        target: where it goes.
        closure: what has to be there.
        history: the ancestors of its root.
        scope: what of the root the closure is.
    """
    store = store_id(target)
    keys = {key for key, _ in closure.sizes()}
    older = {document_key(digest) for past in history for digest in (past.root, *past.shards)}
    there = target.present(keys | older)
    retired = {stat.key for stat in target.list("retired/")} if lost(history, there) else set()
    accepted: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    if scope.max_age and not there.isdisjoint(keys):
        if versioned(target) is not None and store is not None and closure.root is not None:
            ages = Ages(source, target, store, scope.max_age)
            accepted, versions = ages.accepted(closure, closure.root, scope.part, [past.root for past in history])
        else:
            versions = 0
        if not versions:
            notes = (f"{target.url} keeps no versions: everything is read, whatever its age",)
    return Survey(store, decide(closure, history, there, retired, accepted), notes)
