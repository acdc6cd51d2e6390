"""What need not be read again: keys that lie under the very version that a receipt not too old has seen.

A receipt is a note that whoever can write the store can forge; nothing is taken from one unless its reader says how old
a readback may be for that. What is accepted so is never counted as read, neither now nor by a later reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Protocol, cast

from ckptstore.backends.protocol import ReadBackend
from ckptstore.closure import Closure
from ckptstore.errors import CkptStoreError, MalformedError
from ckptstore.findings import Finding
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key
from ckptstore.format.records import RECEIPT_LIMIT, Receipt
from ckptstore.objects import Objects
from ckptstore.readbacks.coverage import Closures, Keys
from ckptstore.readbacks.readbacks import Part, readback_of


class Versioned(Protocol):
    """A backend that can keep the versions of what is overwritten."""

    def versions(self, keys: Collection[str]) -> dict[str, str]:
        """The present version id of each of ``keys`` that has one, in few requests."""
        ...

    def versions_read(self) -> dict[str, str]:
        """The version id under which this process last read each key."""
        ...


def versioned(backend: ReadBackend) -> Versioned | None:
    """The backend as one that can keep versions; None if it cannot."""
    return cast(Versioned, backend) if hasattr(backend, "versions") else None


@dataclass(frozen=True, slots=True)
class Ages:
    """What an earlier readback may stand for.

    Args:
        source: has the documents that say which keys a receipt is about.
        target: the store whose receipts count, and only those about itself.
        store: its id.
        max_age: seconds since the readback, at most.
    """

    source: Objects
    target: ReadBackend
    store: str
    max_age: int

    def accepted(
        self, closure: Closure, root: Digest, part: Part, ancestors: Sequence[Digest]
    ) -> tuple[frozenset[str], int]:
        """The keys of ``closure`` that lie at the target under a version that a receipt young enough has seen, and how
        many of them have a version at all.

        Receipts about ``root`` are looked at first, then those about its ancestors, then all others; never more of them
        than there are keys, for then reading the keys is no more work.
        """
        backend = versioned(self.target)
        waiting = {} if backend is None else backend.versions([key for key, _ in closure.sizes()])
        known = len(waiting)
        found: set[str] = set()
        closures = Closures(self.source)
        closures.know(root, part, Keys.of(closure))
        for key in islice(self._receipts([root, *ancestors]), known):
            for name, version in self._seen(key, closures).items():
                if waiting.get(name) == version:
                    del waiting[name]
                    found.add(name)
            if not waiting:
                break
        return frozenset(found), known

    def _receipts(self, first: Sequence[Digest]) -> Iterator[str]:
        """Keys of the target's receipts about documents that the source has."""
        by_subject: dict[str, list[str]] = {}
        for stat in self.target.list("receipts/"):
            by_subject.setdefault(stat.key.split("/")[1], []).append(stat.key)
        for subject in first:
            yield from by_subject.pop(subject.hex, ())
        for text, keys in by_subject.items():
            try:
                about = document_key(Digest.parse(text))
            except MalformedError:
                continue
            if self.source.backend.stat(about) is not None:
                yield from keys

    def _seen(self, key: str, closures: Closures) -> Mapping[str, str]:
        """Version ids by key that a receipt says were read; none if it does not count."""
        try:
            data = self.target.get(key, 0, RECEIPT_LIMIT + 1)
            digest, receipt = Digest.of(data), Receipt.parse(data)
        except CkptStoreError:
            return {}  # a shard receipt, or damage; it says nothing
        readback = readback_of(digest, receipt, _ignore)
        if readback is None or readback.key != key or not readback.lasting or readback.store != self.store:
            return {}
        age = datetime.now(UTC) - readback.time
        if not timedelta(0) <= age <= timedelta(seconds=self.max_age):  # one from the future says nothing of its age
            return {}
        details = values.plain_from_json(receipt.details, "receipt details")
        versions = details.get("versions") if isinstance(details, dict) else None
        keys = closures.check(readback, _ignore) if isinstance(versions, list) else None
        if keys is None or not isinstance(versions, list) or len(versions) != len(keys.documents) + len(keys.objects):
            return {}
        names = sorted((*keys.documents, *keys.objects))
        return {name: version for name, version in zip(names, versions, strict=True) if isinstance(version, str)}


def _ignore(_finding: Finding) -> None:
    """What is wrong with a receipt is told by those who are asked for it; here it only does not count."""
