"""Claims on a store: leases of writers and markers of collections, and whether who made them still lives.

Nothing here trusts a clock alone. A process is dead if the kernel that it ran under says so, by its number and start or
by a lock that nobody holds any more; it is alive if that kernel says so; and of every other nobody knows. Ages are
for people, who may then say that those which are old enough are to count as dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import cast

from ckptstore.backends.owners import Liveness, Owner
from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import CorruptError, MalformedError, NotFoundError
from ckptstore.format.records import RECORD_LIMIT, CollectionMarker, Lease
from ckptstore.objects import undamaged

LEASES = "leases/"
MARKERS = "gc/"

_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class Claim:
    """A lease or a marker, ``record`` None if it cannot be read, and what is known of who made it.

    ``str()`` names who and since when, in one line without control characters.
    """

    key: str
    record: Lease | CollectionMarker | None
    liveness: Liveness

    def __str__(self) -> str:
        if self.record is None:
            return f"somebody unknown ({self.key} cannot be read)"
        owner = Owner.parse(self.record.process)
        process = f"{owner.pid}" if owner else _shown(self.record.process)
        return f"process {process} on {_shown(self.record.host)} since {_shown(self.record.time)} ({self.key})"

    def age_seconds(self, backend: ReadBackend, reference: str) -> float:
        """How old it is at least, in seconds; 0 if that cannot be said, or if its time has not come yet.

        By two clocks, of which the smaller result counts: by what its maker wrote and our own, and by when the store
        says that it and ``reference``, a key that was written just now, were written.
        """
        ages = []
        if self.record is not None:
            written = _seconds(self.record.time)
            ages.append(0.0 if written is None else time.time() - written)
        modified = cast(Callable[[str], float | None] | None, getattr(backend, "modified", None))
        if modified is not None:
            then, just_now = modified(self.key), modified(reference)
            ages.append(0.0 if then is None or just_now is None else just_now - then)
        return max(0.0, min(ages, default=0.0))


def leases(backend: ReadBackend, *, lock_is_free: bool) -> list[Claim]:
    """The leases in a store, by key.

    Args:
        backend: the store.
        lock_is_free: whether this process knows, by a lock that it holds itself, that no other process of this boot
            holds the lock that the maker of a lease holds besides.
    """
    return list(_claims(backend, LEASES, Lease.parse, lock_is_free))


def markers(backend: ReadBackend, *, lock_is_free: bool) -> list[Claim]:
    """The markers of collections in a store, by key; for the arguments see :func:`leases`."""
    return list(_claims(backend, MARKERS, CollectionMarker.parse, lock_is_free))


def _claims(
    backend: ReadBackend, prefix: str, parse: Callable[[bytes], Lease | CollectionMarker], lock_is_free: bool
) -> Iterator[Claim]:
    for stat in backend.list(prefix):
        try:
            record = undamaged(backend, partial(_read, backend, stat.key, parse))
        except NotFoundError:  # ended meanwhile
            continue
        except (CorruptError, MalformedError):
            yield Claim(stat.key, None, Liveness.UNKNOWN)
        else:
            yield Claim(stat.key, record, _liveness(record.process, lock_is_free))


def _read(
    backend: ReadBackend, key: str, parse: Callable[[bytes], Lease | CollectionMarker]
) -> Lease | CollectionMarker:
    return parse(backend.get(key, 0, RECORD_LIMIT + 1))


def _liveness(process: str, lock_is_free: bool) -> Liveness:
    owner = Owner.parse(process)
    if owner is None:
        return Liveness.UNKNOWN
    found = owner.liveness()
    if found is Liveness.UNKNOWN and lock_is_free and owner.is_of_this_boot:
        return Liveness.DEAD  # in another container, whose numbers say nothing here; but the kernel gave its lock back
    return found


def _seconds(text: str) -> float | None:
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None


def _shown(text: str) -> str:
    """Somebody else's text, without control characters and not longer than a line."""
    return "".join(c if c.isprintable() else "?" for c in text)[:80]


def now() -> str:
    """The time in UTC as RFC 3339 with seconds, for receipts, leases and markers."""
    return datetime.now(UTC).strftime(_TIME)
