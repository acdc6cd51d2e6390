"""Documents that are kept for a while: checkpoints share most of them, and each is read once for several."""

from __future__ import annotations

import time
from collections import OrderedDict
from threading import Lock

from ckptstore.backends.protocol import ReadBackend
from ckptstore.findings import Place, Report, raise_finding
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key
from ckptstore.objects import Objects

ROOM = 64 * 2**20
"""Bytes of documents that are kept."""


class KeptDocuments(Objects):
    """Keeps the documents that were read last, and when each was.

    Args:
        backend: where they lie.
        room: bytes that are kept.
        medium: as with :class:`~ckptstore.objects.Objects`.
    """

    def __init__(self, backend: ReadBackend, room: int = ROOM, *, medium: bool = True) -> None:
        super().__init__(backend, medium=medium)
        self.moments: dict[str, float] = {}
        self._room = room
        self._kept: OrderedDict[Digest, bytes] = OrderedDict()
        self._guard = Lock()

    def document(self, digest: Digest, place: Place, report: Report = raise_finding) -> bytes | None:
        """See :class:`~ckptstore.objects.Objects`."""
        with self._guard:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest]
        data = self.fetch(digest, place, report)
        if data is None:
            return None
        with self._guard:
            self.moments[document_key(digest)] = time.monotonic()
            if digest not in self._kept:
                self._kept[digest] = data
                self._room -= len(data)
            while self._room < 0:
                self._room += len(self._kept.popitem(last=False)[1])
        return data

    def fetch(self, digest: Digest, place: Place, report: Report) -> bytes | None:
        """Read a document that is not kept."""
        return super().document(digest, place, report)
