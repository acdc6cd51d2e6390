"""What receipts say of checkpoints: verified or not, since when they are there, their metrics. Notes, and no proof."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from ckptstore.backends.protocol import ReadBackend, ReadbackMethod
from ckptstore.errors import MalformedError
from ckptstore.findings import Finding
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.records import Receipt
from ckptstore.readbacks.actors import store_of
from ckptstore.readbacks.readbacks import OPERATIONS, Part, receipts_about, time_of
from ckptstore.threads import in_threads

METRICS = "metrics"
"""Operation of the receipts that record metrics."""

_REACHING = {method.value for method in ReadbackMethod if method.reaches_medium}
_WITHOUT_FILES = Part(files=False).exceptions()


@dataclass(frozen=True, slots=True)
class _About:
    receipts: tuple[Receipt, ...]
    doubtful: bool


class Facts:
    """Receipts about the checkpoints of one store, each read once.

    Args:
        backend: the store.
        store: the id in its header; receipts about another store say nothing of this one.
        subjects: what there are receipts about, so that nothing is asked about others.
    """

    def __init__(self, backend: ReadBackend, store: str | None, subjects: Collection[Digest]) -> None:
        self._backend = backend
        self._store = store
        self._subjects = subjects
        self._known: dict[Digest, _About] = {}

    def load(self, roots: Iterable[Digest]) -> None:
        """Read the receipts about ``roots``, several at a time."""
        wanted = [root for root in dict.fromkeys(roots) if root in self._subjects and root not in self._known]
        threads = self._backend.traits.threads
        for root, about in zip(wanted, in_threads(self._read, wanted, threads), strict=True):
            self._known[root] = about

    def is_verified(self, root: Digest) -> bool:
        """Whether a receipt says that all of it was read back here from where it is kept."""
        return any(self._proves(receipt) for receipt in self._about(root).receipts)

    def arrived_whole(self, root: Digest) -> bool:
        """Whether a receipt says that a push or pull brought all of it here."""
        return any(self._is_transfer(receipt) for receipt in self._about(root).receipts)

    def has_receipt(self, subject: Digest) -> bool:
        """Whether a receipt tells of it, whatever that says, and of this store."""
        return any(self._may_be_here(receipt) for receipt in self._about(subject).receipts)

    def without_files(self, root: Digest) -> bool:
        """Whether it came here without its trees of files, each time that a receipt tells of."""
        arrivals = [
            set(_WITHOUT_FILES) <= set(receipt.exceptions)
            for receipt in self._about(root).receipts
            if receipt.operation in ("push", "pull") and self._is_here(receipt)
        ]
        return bool(arrivals) and all(arrivals)

    def time(self, root: Digest) -> datetime | None:
        """The time of the oldest receipt about it in UTC; None if there is none, or one that cannot be read."""
        about = self._about(root)
        times = [_time(receipt.time) for receipt in about.receipts]
        known = [time for time in times if time is not None]
        return min(known) if known and len(known) == len(times) and not about.doubtful else None

    def metric(self, root: Digest, name: str) -> object:
        """The value of a metric in the newest receipt that has it; None if none has."""
        found: list[tuple[str, bytes, object]] = []
        for receipt in self._about(root).receipts:
            if receipt.operation == METRICS and receipt.details is not None:
                try:
                    plain = values.from_json(receipt.details, "metrics")
                except MalformedError:
                    continue
                if isinstance(plain, Mapping) and name in plain:
                    found.append((receipt.time, receipt.encode(), plain[name]))
        return max(found, key=lambda item: item[:2])[2] if found else None

    def is_doubtful(self, root: Digest) -> bool:
        """Whether a receipt about it cannot be read."""
        return self._about(root).doubtful

    def _about(self, root: Digest) -> _About:
        if root not in self._known:
            self._known[root] = self._read(root) if root in self._subjects else _About((), False)
        return self._known[root]

    def _read(self, root: Digest) -> _About:
        found: list[Finding] = []
        receipts = tuple(receipt for _, receipt in receipts_about(self._backend, root, found.append))
        return _About(receipts, bool(found))

    def _proves(self, receipt: Receipt) -> bool:
        return (
            receipt.operation in OPERATIONS
            and receipt.method in _REACHING
            and not receipt.exceptions
            and self._is_here(receipt)
        )

    def _is_transfer(self, receipt: Receipt) -> bool:
        part = Part.of(receipt.exceptions)
        whole = part is not None and part.shards is None
        return receipt.operation in ("push", "pull") and whole and self._may_be_here(receipt)

    def _may_be_here(self, receipt: Receipt) -> bool:
        """Whether nothing says that it tells of another store: enough to keep something, not to let anything go."""
        return store_of(receipt) in (None, self._store)

    def _is_here(self, receipt: Receipt) -> bool:
        told = store_of(receipt)
        return receipt.where == self._backend.url if told is None else told == self._store


def _time(text: str) -> datetime | None:
    try:
        return time_of(text)
    except MalformedError:
        return None
