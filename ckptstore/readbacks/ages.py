"""When each key of a store was last read back there, as far as receipts tell.

Two kinds tell: notes of scrubs, which list their keys, and receipts about checkpoints, whose keys follow from the
documents here. A receipt dated in the future shows that a clock is or was wrong, and tells nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from ckptstore.findings import Finding
from ckptstore.format.keys import digest_of_key
from ckptstore.objects import Objects
from ckptstore.readbacks.coverage import Closures, readings
from ckptstore.readbacks.notes import Note, reaches_medium
from ckptstore.readbacks.readbacks import Readback, readback_of, receipts_about
from ckptstore.threads import in_threads

if TYPE_CHECKING:
    from ckptstore.store import Store

_LOOKS = 16  # closures that are read only to know in which order keys come that are too old anyway

NEVER = (False, datetime.min.replace(tzinfo=UTC))
"""The age of a key that was never read back: before all others."""

Age = tuple[bool, datetime]
"""Whether a reading reached where the bytes are kept, and when it was, at the earliest. Better is larger."""


@dataclass(frozen=True, slots=True)
class Ages:
    """The best reading of each key that has one.

    Args:
        at: the time that they are seen from, in UTC.
        by_key: the readings.
    """

    at: datetime
    by_key: Mapping[str, Age]

    def of(self, key: str) -> Age:
        """The best reading of ``key``."""
        return self.by_key.get(key, NEVER)

    def is_recent(self, key: str, max_age: timedelta | None) -> bool:
        """Whether ``key`` was read back from where it is kept, at most ``max_age`` ago."""
        counts, time = self.of(key)
        return max_age is not None and counts and timedelta(0) <= self.at - time <= max_age


def ages_of(
    store: Store,
    documents: Objects,
    keys: Collection[str],
    notes: Sequence[Note],
    at: datetime,
    max_age: timedelta | None,
) -> Ages:
    """When keys of ``store`` were last read back.

    Receipts about checkpoints are read newest first, and their closures as long as they are not older than ``max_age``
    and some key is not known to be recent; of older ones only a few closures are read, for the order.

    Args:
        store: the store.
        documents: where its documents are read.
        keys: those that it has.
        notes: notes about it.
        at: the present time in UTC.
        max_age: what will count as recent, None if nothing will.
    """
    found: dict[str, Age] = {}

    def take(key: str, age: Age) -> None:
        if key in wanted and found.get(key, NEVER) < age:
            found[key] = age

    wanted = keys if isinstance(keys, set | frozenset | dict) else set(keys)
    for note in notes:
        if note.readback.time <= at:
            for key in note.keys:
                take(key, (note.counts, note.read_at))
    ages, closures, looks = Ages(at, found), Closures(documents), _LOOKS
    unsure = [key for key in wanted if key.startswith(("objects/", "documents/")) and not ages.is_recent(key, max_age)]
    for readback in _readbacks(store, at) if unsure else ():
        if all(ages.of(key) >= (True, readback.time) for key in unsure):
            break  # the others are older still
        if not closures.is_known(readback) and (max_age is None or at - readback.time > max_age):
            if not looks:
                continue
            looks -= 1
        counts = reaches_medium(readback.receipt.method)
        stated = closures.check(readback, _ignore)
        for named, evidence in () if stated is None else readings(readback, stated, at):
            for key in named:
                take(key, (counts, evidence.read_at))
        unsure = [key for key in unsure if not ages.is_recent(key, max_age)]
    return ages


def _readbacks(store: Store, at: datetime) -> list[Readback]:
    """Receipts about checkpoints that were read in this store, newest first."""
    backend = store.backend
    subjects = {stat.key.split("/")[1] for stat in backend.list("receipts/")}
    documents = {f"documents/{subject[:2]}/{subject}": subject for subject in subjects}
    there = backend.present(documents.keys())
    about = [digest for key in sorted(there) if (digest := digest_of_key(key)) is not None]
    found = []
    for receipts in in_threads(partial(receipts_about, backend, report=_ignore), about, backend.traits.threads):
        for digest, receipt in receipts:
            readback = readback_of(digest, receipt, _ignore)
            if readback is not None and readback.time <= at and _is_here(store, readback):
                found.append(readback)
    return sorted(found, key=lambda readback: readback.time, reverse=True)


def _is_here(store: Store, readback: Readback) -> bool:
    """Whether it was this store that was read. Receipts of earlier releases say neither who nor which store."""
    if readback.store is not None:
        return readback.store == store.id
    return not readback.by and readback.receipt.where == store.url


def _ignore(_finding: Finding) -> None:
    """What is wrong with a receipt is found when it is scrubbed itself; here it only does not count."""
