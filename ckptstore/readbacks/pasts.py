"""Ancestors of a checkpoint: present, retired or missing, each looked at once for all checkpoints that descend from
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import CkptStoreError, NotFoundError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import document_key, retired_key
from ckptstore.retirements import was_retired_by_name


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An ancestor of the verified checkpoint: present, retired or missing."""

    root: Digest
    step: int | None
    status: str


@dataclass(frozen=True, slots=True)
class Past:
    """An ancestor (None: nothing can be said of it), what is wrong, at no place, and its parent."""

    ancestor: Ancestor | None
    faults: tuple[Finding, ...] = ()
    parent: Digest | None = None


class Pasts:
    """Looks at ancestors in one store."""

    def __init__(self, backend: ReadBackend) -> None:
        self._backend = backend
        self._known: dict[Digest, Past] = {}
        self.bytes_read = 0

    def of(
        self, descendant: Digest | None, checkpoint: Checkpoint | None
    ) -> Iterator[tuple[Ancestor | None, list[Finding]]]:
        """Each ancestor of a checkpoint, newest first, with what is wrong with it; it ends where the line is broken."""
        parent = checkpoint.parent if checkpoint is not None else None
        while parent is not None:
            if parent not in self._known:
                self._known[parent] = self._look(parent)
            past = self._known[parent]
            place = Place(checkpoint=descendant, part=f"ancestor {parent.short}")
            yield past.ancestor, [Finding(f.kind, place, f.key, f.message, f.expected, f.actual) for f in past.faults]
            parent = past.parent

    def _look(self, root: Digest) -> Past:
        """Present if the document and its shards' documents are there, else retired, else missing."""
        key, faults = document_key(root), list[Finding]()
        try:
            data = self._backend.get(key, 0, DOCUMENT_LIMIT + 1)
            self.bytes_read += len(data)
            actual = Digest.of(data)
            if actual != root:
                return Past(None, (Finding(Kind.CORRUPT, Place(), key, "wrong bytes", str(root), str(actual)),))
            checkpoint = Checkpoint.parse(data)
        except NotFoundError:
            if was_retired_by_name(self._backend, root):
                return Past(Ancestor(root, None, "retired"))
            return Past(Ancestor(root, None, "missing"), (Finding(Kind.ANCESTOR, Place(), key, "not in the store"),))
        except CkptStoreError as error:
            return Past(None, (Finding(Kind.of(error), Place(), key, error.why or error.what),))
        present = [self._is_there(document_key(shard), faults) for shard in checkpoint.shards]
        if all(present):
            status = "present"
        elif self._is_there(retired_key(root), faults):
            status = "retired"
        else:
            status = "missing"
            faults.append(Finding(Kind.ANCESTOR, Place(), key, "its closure is gone and it was not retired"))
        return Past(Ancestor(root, checkpoint.step, status), tuple(faults), checkpoint.parent)

    def _is_there(self, key: str, faults: list[Finding]) -> bool:
        """Whether there is such a key; what lies there without being one is there, and a finding."""
        try:
            return self._backend.stat(key) is not None
        except CkptStoreError as error:
            faults.append(Finding(Kind.of(error), Place(), key, error.why or error.what))
            return True
