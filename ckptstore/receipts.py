"""Receipts of one store: notes about documents, kept beside them."""

from __future__ import annotations

from functools import partial

from ckptstore.backends.protocol import ReadBackend, ReadbackMethod
from ckptstore.errors import CorruptError, MalformedError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import receipt_key, receipt_prefix
from ckptstore.format.records import RECEIPT_LIMIT, Receipt
from ckptstore.objects import undamaged, writable
from ckptstore.readbacks.actors import store_id, store_of


class Receipts:
    """All receipts of one store. Whoever can write the store can forge one: they are notes, and no proof."""

    def __init__(self, backend: ReadBackend) -> None:
        self.backend = backend
        self._store_id: str | None = None

    @property
    def store_id(self) -> str | None:
        """The id in the store's header, which never changes; None if the header cannot be read."""
        if self._store_id is None:
            self._store_id = store_id(self.backend)
        return self._store_id

    def about(self, subject: Digest) -> list[Receipt]:
        """All receipts about ``subject``, oldest first."""
        found = []
        for stat in self.backend.list(receipt_prefix(subject)):
            try:
                found.append(undamaged(self.backend, partial(self._receipt, stat.key)))
            except (CorruptError, MalformedError):
                continue  # shard receipts of an attempt, or damage; neither is proof of anything
        return sorted(found, key=lambda receipt: (receipt.time, receipt.operation))

    def readbacks(self, root: Digest) -> list[Receipt]:
        """Those that say that all of ``root`` was read back here from its medium, oldest first.

        Those of pushes from here tell of another store, and are left out.
        """
        reaching = {method.value for method in ReadbackMethod if method.reaches_medium}
        return [
            receipt
            for receipt in self.about(root)
            if receipt.operation in ("verify", "push", "pull") and receipt.method in reaching and not receipt.exceptions
            if store_of(receipt) in (None, self.store_id)
        ]

    def put(self, receipt: Receipt) -> Digest:
        """Store a receipt; returns its digest."""
        data = receipt.encode()
        digest = Digest.of(data)
        writable(self.backend).create(receipt_key(receipt.subject, digest), data)
        return digest

    def _receipt(self, key: str) -> Receipt:
        data = self.backend.get(key, 0, RECEIPT_LIMIT + 1)
        if Digest.of(data).hex != key.rpartition("/")[2]:
            raise CorruptError(f"receipt {key}", "it has other bytes than its name says")
        return Receipt.parse(data)
