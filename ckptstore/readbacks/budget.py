"""What a scrub may use up, and its looks at documents, which have to keep to that as well."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import MalformedError
from ckptstore.findings import Finding, Kind, Place, Report
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key
from ckptstore.readbacks.documents import KeptDocuments
from ckptstore.readbacks.references import References, references


@dataclass(slots=True)
class Budget:
    """How much may be read, and until when."""

    max_bytes: int | None
    max_seconds: float | None
    began: float = field(default_factory=time.monotonic)
    taken: int = 0

    @contextmanager
    def part(self) -> Iterator[None]:
        """Inside, only a quarter may be used up: a plan must not take what there is for the work."""
        whole = self.max_bytes, self.max_seconds
        self.max_bytes = None if self.max_bytes is None else self.max_bytes // 4
        self.max_seconds = None if self.max_seconds is None else self.max_seconds / 4
        try:
            yield
        finally:
            self.max_bytes, self.max_seconds = whole

    @property
    def ended_by(self) -> str:
        """What is used up; empty if nothing is."""
        if self.max_bytes is not None and self.taken >= self.max_bytes:
            return "bytes"
        if self.max_seconds is not None and time.monotonic() - self.began >= self.max_seconds:
            return "duration"
        return ""


class Looking(KeptDocuments):
    """Reads the documents that say what receipts are about, as long as the budget lasts."""

    def __init__(self, backend: ReadBackend, budget: Budget) -> None:
        super().__init__(backend, medium=False)
        self._budget = budget
        self._taken: dict[str, tuple[int, References]] = {}

    def fetch(self, digest: Digest, place: Place, report: Report) -> bytes | None:
        """See :class:`~ckptstore.readbacks.documents.KeptDocuments`."""
        key = document_key(digest)
        if self._budget.ended_by:
            report(Finding(Kind.UNREADABLE, place, key, "there is no budget left to look at it"))
            return None
        data = super().fetch(digest, place, report)
        if data is not None and key not in self._taken:
            self._budget.taken += len(data)
            with suppress(MalformedError):  # it is read again, and told
                self._taken[key] = (len(data), references(data))
        return data

    def taken(self) -> dict[str, tuple[int, References]]:
        """Of the documents that were looked at, by key, the size in bytes and what they lead to; they are forgotten
        here."""
        taken, self._taken = self._taken, {}
        return taken
