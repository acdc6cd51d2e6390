"""One key on its way: read and hashed at the source, created where it is absent, and read back where it arrived."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass

from ckptstore.backends import deadline
from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import CkptStoreError, CorruptError, RefusedError
from ckptstore.findings import Finding, Kind, Place, Report, raise_finding
from ckptstore.format.digest import Digest
from ckptstore.objects import Objects, repairing, writable
from ckptstore.transfers.steps import Step, Way

_STALE_SECONDS = (0.1, 0.4, 1.5, 3.0)  # pauses before an endpoint that said "stored" is believed to have nothing
_KEPT = 32 * 2**20  # bytes of documents that need not be read twice: two chunks
_WRONG = (Kind.CORRUPT, Kind.TRUNCATED)
_FRAME = re.compile(rb"([0-9a-fA-F]{1,8})(?:;chunk-signature=[0-9a-f]{64})?\r\n")
_FRAME_ROOM = 64 * 2**10  # bytes that framing may add at the end of an object of 16 MiB


class Source(Objects):
    """Where a transfer takes bytes from. Documents, which are read to know the closure, are kept within a limit."""

    def __init__(self, backend: ReadBackend) -> None:
        super().__init__(backend)
        self._documents: dict[Digest, bytes] = {}
        self._room = _KEPT

    def document(self, digest: Digest, place: Place, report: Report = raise_finding) -> bytes | None:
        """See :class:`~ckptstore.objects.Objects`."""
        kept = self._documents.get(digest)
        if kept is not None:
            return kept
        data = super().document(digest, place, report)
        if data is not None and len(data) <= self._room:
            self._documents[digest] = data
            self._room -= len(data)
        return data

    def holds(self, step: Step) -> bool:
        """Whether a step takes its bytes from memory."""
        return step.is_document and step.digest in self._documents


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one key: bytes read back (None: accepted unread), whether this transfer stored them or good ones
    lay there, and whether they replaced wrong ones."""

    step: Step
    read: int | None
    stored: bool = False
    repaired: bool = False


class Sender:
    """Does steps; may be called from several threads.

    ``outcomes`` are those of the steps that are done, ``target`` is where they go.
    """

    def __init__(self, source: Source, target: Objects) -> None:
        self.outcomes: list[Outcome] = []
        self._source = source
        self.target = target
        self._pauses = _STALE_SECONDS if target.backend.traits.network else ()

    @property
    def method(self) -> str:
        """The weakest way in which keys were read back so far; ``none`` if none was."""
        return self.target.method.value if any(outcome.read is not None for outcome in self.outcomes) else "none"

    def send(self, step: Step) -> Outcome:
        """Make sure that the target gives back the bytes of this step.

        Raises:
            CorruptError, NotFoundError: the source has no good bytes, or the target does not keep them.
            RefusedError: the target does not hand out what it keeps.
            BackendError: one of them fails.
        """
        outcome = self._done(step)
        self.outcomes.append(outcome)
        return outcome

    def _done(self, step: Step) -> Outcome:
        if step.way is Way.ACCEPT:
            return Outcome(step, None)
        wrong = False
        if step.way is Way.READ:
            found = self._look(step)
            if isinstance(found, int):
                return Outcome(step, found)
            if found.kind is Kind.UNREADABLE:  # whether the bytes are wrong is not known
                hint = "check the device; if it is damaged for good, move the file out of the store"
                raise found.error("run it again later" if self.target.backend.traits.network else hint)
            wrong = found.kind is not Kind.MISSING
        created = not wrong and self.create(step)
        if wrong:
            found = self._replaced(step)
        else:
            found = self._look_patiently(step, (Kind.MISSING,))
            if not created and isinstance(found, Finding):
                # The name was taken by bytes that nobody had looked at yet, or that vanished since.
                if found.kind in _WRONG:
                    wrong = True
                    found = self._replaced(step)
                elif found.kind is Kind.MISSING:
                    created = self.create(step)
                    found = self._look_patiently(step, (Kind.MISSING,))
        if isinstance(found, Finding):
            raise self._not_kept(step, found)
        return Outcome(step, found, created or wrong, wrong)

    def create(self, step: Step) -> bool:
        """Send the bytes of a step if its key is absent; whether it was."""
        return writable(self.target.backend).create(step.key, self._bytes(step))

    def _replaced(self, step: Step) -> int | Finding:
        repairing(self.target.backend).replace(step.key, self._bytes(step))
        return self._look_patiently(step, (Kind.MISSING, *_WRONG))

    def _bytes(self, step: Step) -> bytes:
        data = self._read(self._source, step, raise_finding)
        assert data is not None
        return data

    def _look(self, step: Step) -> int | Finding:
        """Read the key back at the target: its length, or what is wrong."""
        found: list[Finding] = []
        try:
            data = self._read(self.target, step, found.append)
        except RefusedError as error:
            what = f"{step.place} at {self.target.backend.url}"
            why = f"it is there and cannot be read back, so nothing is verified: {error.why} [{step.key}]"
            raise RefusedError(what, why, error.hint) from error
        return found[0] if data is None else len(data)

    def _look_patiently(self, step: Step, stale: Collection[Kind]) -> int | Finding:
        """The same after a write: what may come from a copy that lags behind is read again a few times."""
        found = self._look(step)
        for pause in self._pauses:
            if not isinstance(found, Finding) or found.kind not in stale:
                break
            deadline.check(f"reading key {step.key} again")
            left = deadline.remaining()
            time.sleep(pause if left is None else min(pause, left))
            found = self._look(step)
        return found

    @staticmethod
    def _read(objects: Objects, step: Step, report: Report) -> bytes | None:
        if step.is_document:
            return objects.document(step.digest, step.place, report)
        return objects.read(step.digest, step.size, step.place, report)

    def _not_kept(self, step: Step, found: Finding) -> CkptStoreError:
        if found.kind is Kind.UNREADABLE:
            return found.error("run it again: what was sent is used")
        what = f"{step.place} at {self.target.backend.url}"
        if found.kind in _WRONG and self._is_framed(step):
            why = f"what is stored is the upload with its chunk framing, not the bytes that were sent: {found}"
            hint = "the endpoint does not understand streamed checksums: add checksums=required to the store's URL"
            return CorruptError(what, why, hint)
        return CorruptError(
            what,
            f"readback after sending failed: {found}",
            "the destination does not keep what it is given; check its disk or its checksum settings",
        )

    def _is_framed(self, step: Step) -> bool:
        """Whether the stored bytes look like an aws-chunked body that was stored as it came."""
        data = self._bytes(step)
        try:
            stored = self.target.backend.get(step.key, 0, len(data) + _FRAME_ROOM)
        except CkptStoreError:
            return False
        head = _FRAME.match(stored)
        if head is None:
            return False
        length = int(head[1], 16)
        return 0 < length <= len(data) and stored[head.end() : head.end() + length] == data[:length]
