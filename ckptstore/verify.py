"""Verify: read every byte of a closure again, hash it, recompute every root, and list all that is wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadBackend, ReadbackMethod
from ckptstore.closure import Closure, Need, read_closure
from ckptstore.findings import Finding, exit_code
from ckptstore.format.digest import Digest
from ckptstore.format.records import Receipt, closure_digest
from ckptstore.leases import now
from ckptstore.meter import OnProgress
from ckptstore.objects import Objects
from ckptstore.readbacks.actors import readback_details, store_id
from ckptstore.readbacks.documents import ROOM, KeptDocuments
from ckptstore.readbacks.looks import Look, look
from ckptstore.readbacks.pasts import Ancestor, Pasts
from ckptstore.threads import in_threads


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification read and found.

    ``documents``, ``objects`` and ``bytes_read`` count the closure's distinct keys that were read and hashed for it;
    documents of ancestors and ref records are history, and counted in ``history_bytes``. ``method`` is the weakest way
    in which a key was read, ``keys`` the keys of the closure's objects, ``store`` the id in the header of the store.
    ``read`` says for each key of the closure, sorted, whether it was read for it; None: all were. The others were read
    before: for checkpoints that were verified together with this one, the first of them ``oldest_seconds`` ago.
    """

    root: Digest
    closure: Digest
    step: int | None
    documents: int
    objects: int
    bytes_read: int
    history_bytes: int
    method: ReadbackMethod
    ancestors: tuple[Ancestor, ...]
    keys: tuple[str, ...]
    findings: tuple[Finding, ...]
    store: str | None = None
    read: tuple[bool, ...] | None = None
    oldest_seconds: int = 0

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.findings

    @property
    def exit_code(self) -> int:
        """0, or the exit code of the worst finding."""
        return exit_code(self.findings)

    def receipt(self, where: str, *, max_age_seconds: int = 0) -> Receipt:
        """The receipt of this verification of the store at ``where``; only one that found nothing wrong deserves one.

        ``max_age_seconds`` is the age of the oldest readback that stands for what was skipped.
        """
        return Receipt(
            operation="verify" if self.method.reaches_medium else "read",
            subject=self.root,
            closure=self.closure,
            documents=self.documents,
            objects=self.objects,
            bytes_read=self.bytes_read,
            method=self.method.value,
            time=now(),
            where=where,
            details=readback_details(
                self.store, max_age_seconds=max(max_age_seconds, self.oldest_seconds), read=self.read
            ),
        )


def verify(
    backend: ReadBackend,
    root: Digest,
    shards: Collection[int] | None = None,
    progress: OnProgress | None = None,
    refs: Iterable[tuple[list[Finding], int]] = (),
    skip: Collection[str] = (),
    *,
    files: bool = True,
) -> VerifyReport:
    """Verify the closure of ``root``, reading each distinct key once and from the medium where the backend can.

    Args:
        backend: the store.
        root: digest of the checkpoint.
        shards: only these shards, for a partial store.
        progress: called as bytes are read.
        refs: findings and bytes read of ref logs that were checked besides.
        skip: keys of objects that this process has read back already; documents are always read.
        files: whether the trees of files and of the preparation belong to what must be here.
    """
    return Verifier(backend, room=0).verify(root, shards, progress, refs, skip, files=files)


class Verifier:
    """Verifies checkpoints of one store one after the other, and remembers of each object what reading it said.

    Args:
        backend: the store.
        room: bytes of documents that are kept, so that those which several checkpoints share are read once.
    """

    def __init__(self, backend: ReadBackend, *, room: int = ROOM) -> None:
        self._backend = backend
        self._objects = KeptDocuments(backend, room)
        self._looks: dict[str, Look] = {}
        self._pasts = Pasts(backend)

    def verify(
        self,
        root: Digest,
        shards: Collection[int] | None = None,
        progress: OnProgress | None = None,
        refs: Iterable[tuple[list[Finding], int]] = (),
        skip: Collection[str] = (),
        *,
        files: bool = True,
        history: bool = True,
        since: float | None = None,
    ) -> VerifyReport:
        """See :func:`verify`.

        Args:
            history: whether the ancestors are looked at, too.
            since: what was read from then on (of :func:`time.monotonic`; by default from now) was read for ``root``.
        """
        objects, began = self._objects, time.monotonic() if since is None else since
        found: list[Finding] = []
        closure = read_closure(objects, root, shards, found.append, files=files)
        wanted = {key: need for key, need in closure.objects.items() if key not in skip}
        self._read({key: need for key, need in wanted.items() if not self._is_known(key, need)}, progress)
        for key, need in wanted.items():
            found.extend(self._looks[key].findings(key, need))
        past = self._pasts.bytes_read
        ancestors = []
        for ancestor, faults in self._pasts.of(root, closure.checkpoint) if history and shards is None else ():
            ancestors += [] if ancestor is None else [ancestor]
            found.extend(faults)
        past = self._pasts.bytes_read - past
        for findings, size in refs:
            found.extend(findings)
            past += size
        moments = {key: self._looks[key].moment for key in wanted}
        moments |= {key: objects.moments[key] for key in closure.documents}
        read = {key for key, moment in moments.items() if moment >= began}
        oldest = min(moments.values(), default=began)
        return VerifyReport(
            root=root,
            closure=closure_digest(closure.sizes()),
            step=closure.checkpoint.step if closure.checkpoint else None,
            documents=len(read & closure.documents.keys()),
            objects=len(read & wanted.keys()),
            keys=tuple(closure.objects),
            bytes_read=sum(self._looks[key].size if key in wanted else closure.documents[key] for key in read),
            history_bytes=past,
            method=objects.weakest(moments),
            ancestors=tuple(ancestors),
            findings=tuple(found),
            store=store_id(self._backend),
            read=_flags(closure, read),
            oldest_seconds=0 if oldest >= began else math.ceil(time.monotonic() - oldest),
        )

    def closure(self, root: Digest, *, files: bool = True) -> Closure:
        """The documents of ``root``, read back; raises the first finding. They are kept for :meth:`verify`."""
        return read_closure(self._objects, root, files=files)

    def _is_known(self, key: str, need: Need) -> bool:
        known = self._looks.get(key)
        return known is not None and known.tells_of(need)

    def _read(self, wanted: dict[str, Need], progress: OnProgress | None) -> None:
        total, done = sum(need.length for need in wanted.values()), 0
        reading = in_threads(lambda item: look(self._objects, *item), wanted.items(), self._objects.threads)
        for (key, need), seen in zip(wanted.items(), reading, strict=True):
            self._looks[key] = seen
            done += need.length
            if progress is not None:
                progress(done, total)


def check_object(objects: Objects, key: str, need: Need) -> tuple[Need, list[Finding], int]:
    """Read one object back and hash it, and each slot of a pack; findings name every place that uses it."""
    seen = look(objects, key, need)
    return need, list(seen.findings(key, need)), seen.size


def _flags(closure: Closure, read: Collection[str]) -> tuple[bool, ...] | None:
    """For each key, sorted, whether it was read; None if all were."""
    keys = sorted((*closure.documents, *closure.objects))
    return None if len(read) == len(keys) else tuple(key in read for key in keys)
