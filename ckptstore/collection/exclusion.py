"""Having a store to oneself: a collection shows its marker, then looks for writers, and begins only if there are none.

A writer shows its lease, then looks for markers. Whichever of the two came first, the other sees it. Where one of them
was taken for dead and only slept, every ref is fenced before anything is deleted, so that its late move fails.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from ckptstore.backends.flocks import StoreLock
from ckptstore.backends.owners import Liveness, this_process
from ckptstore.backends.protocol import PruneBackend, ReadBackend
from ckptstore.claims import Claim, leases, markers, now
from ckptstore.endpoints import require_exclusive
from ckptstore.errors import (
    BackendError,
    ConflictError,
    CorruptError,
    MalformedError,
    NotFoundError,
    ReadOnlyError,
    RefusedError,
    UsageError,
)
from ckptstore.format.keys import STORE_KEY, collection_key, parse_collection_key
from ckptstore.format.records import RECORD_LIMIT, CollectionMarker
from ckptstore.leases import lock, remove_claim
from ckptstore.objects import undamaged
from ckptstore.refs import Refs
from ckptstore.store import Store

_LOCK_SECONDS = 5.0  # a writer gives its lock back a moment after its lease
_LOCK_POLL_SECONDS = 0.02
_SETTLE_SECONDS = 2.0
_LAST = 10**16 - 1
_NAMED = 10  # claims that a message lists


@dataclass(frozen=True, slots=True)
class Guard:
    """That a collection has the store to itself.

    ``broken``: in words, the leases and markers that were taken away because their makers are dead, or old enough.
    ``notes``: what a user should know of how the exclusion was made.
    """

    backend: PruneBackend
    key: str
    nonce: str
    broken: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    pid: int = field(default_factory=os.getpid)

    def settle(self) -> None:
        """Wait a moment before writers may begin: over a network, a deletion that was given up may be under way."""
        if self.backend.traits.network and self.pid == os.getpid():
            time.sleep(_SETTLE_SECONDS)

    def check(self) -> None:
        """To be called before each few deletions.

        Raises:
            ConflictError: somebody took the marker away, having taken this collection for dead. Writers may have begun.
        """
        try:
            mine = undamaged(self.backend, partial(_nonce_at, self.backend, self.key)) == self.nonce
        except (NotFoundError, CorruptError, MalformedError):
            mine = False
        if not mine or self.pid != os.getpid():
            why = f"its marker {self.key} is not there any more: somebody took this collection for dead and ended it"
            raise ConflictError(_what(self.backend), why, "what is left is deleted by the next one: run it again")


@contextmanager
def exclusive(store: Store, *, break_leases_older_than: int | None = None) -> Iterator[Guard]:
    """Keep every writer out of ``store`` for the time of the block, in which no lease is to be taken.

    Leases and markers whose makers are provably dead are taken away. Those of processes that run, as far as this
    machine can tell, are never. All others are in the way unless they are as old as the caller says.

    Args:
        store: the store.
        break_leases_older_than: seconds; leases and markers of which nobody can tell are taken away too if they are at
            least that old (0: whatever their age, also if their time lies in the future). Their makers, if they only
            slept, lose what they store then.

    Raises:
        ConflictError: somebody writes, or another collection runs, or may; says who, since when, and what to do.
            Nothing was changed.
        RefusedError: the store's endpoint cannot tell two collections that only one may begin.
        ReadOnlyError: the store cannot be written.
        NotFoundError: it is no store any more.
    """
    if break_leases_older_than is not None and (
        type(break_leases_older_than) is not int or break_leases_older_than < 0
    ):
        why = f"{break_leases_older_than!r:.40} is not a whole number of seconds, at least 0"
        raise UsageError("break_leases_older_than", why)
    backend = _pruning(store.backend)
    if backend.stat(STORE_KEY) is None:
        raise NotFoundError(f"store {backend.url}", f"there is no {STORE_KEY}", "open the store again")
    require_exclusive(backend, _what(backend))
    with _locked(backend) as held:
        entry = _Entry(backend, break_leases_older_than, held.honoured)
        guard = entry.marked()
        try:
            cleared = entry.cleared(guard)
            try:
                yield cleared
            except BaseException:
                guard.settle()
                raise
        finally:
            if guard.pid == os.getpid():  # and not a child that leaves its parent's block
                remove_claim(backend, guard.key)


class _Entry:
    """The way in: nothing but the own marker is written before everybody else is known to be gone."""

    def __init__(self, backend: PruneBackend, oldest: int | None, locked: bool) -> None:
        self._backend = backend
        self._oldest = oldest
        self._locked = locked

    def marked(self) -> Guard:
        """Show the marker. ConflictError, and nothing written, if there is another one in the way."""
        there = markers(self._backend, lock_is_free=self._locked)
        # Without a marker of our own the store's clock is not known: whether those of unknown makers are old enough is
        # found out again below.
        self._refuse([claim for claim in there if not self._may_break(claim)])
        number = 1 + max((parse_collection_key(claim.key) or 0 for claim in there), default=0)
        if number > _LAST:
            raise RefusedError(_what(self._backend), f"{there[-1].key} is the last number", "delete that key by hand")
        key, nonce = collection_key(number), secrets.token_hex(16)
        marker = CollectionMarker(socket.gethostname(), str(this_process()), now(), nonce)
        guard = Guard(self._backend, key, nonce)
        try:
            created = self._backend.create(key, marker.encode())
        except BaseException:
            self._remove_if_mine(guard)
            raise
        if not created and not self._is_mine(guard):  # after a lost answer, it may be our own that was found
            why = f"another one began at the same moment ({key})"
            raise ConflictError(_what(self._backend), why, "let it end, then run this one again")
        return guard

    def cleared(self, guard: Guard) -> Guard:
        """The guard when nobody is in the way any more: claims of the dead are taken away, and refs fenced if any of
        those may only have slept."""
        others = [claim for claim in markers(self._backend, lock_is_free=self._locked) if claim.key != guard.key]
        writers = leases(self._backend, lock_is_free=self._locked)
        self._refuse([claim for claim in (*others, *writers) if not self._may_break(claim, guard.key)])
        # A lease goes before the fence: who looks for its lease after the fence does not find it. And markers go after
        # it: should this process die in between, the next collection finds one and makes the fence itself.
        for claim in writers:
            self._backend.delete(claim.key)
        asleep = any(claim.liveness is not Liveness.DEAD or self._backend.traits.network for claim in writers)
        if asleep or others:
            _fence(self._backend)
        for claim in others:
            self._backend.delete(claim.key)
        broken = tuple(f"{_kind(claim)} of {claim}" for claim in (*writers, *others))
        notes: tuple[str, ...] = ()
        if hasattr(self._backend, "locked") and not self._locked:
            notes = ("the file system of the store has no file locks: leases alone keep writers away",)
        return Guard(self._backend, guard.key, guard.nonce, broken, notes, guard.pid)

    def _may_break(self, claim: Claim, reference: str = "") -> bool:
        if claim.liveness is not Liveness.UNKNOWN:
            return claim.liveness is Liveness.DEAD
        if self._oldest is None:
            return False
        return not reference or claim.age_seconds(self._backend, reference) >= self._oldest

    def _refuse(self, claims: Sequence[Claim]) -> None:
        if claims:
            raise _in_the_way(self._backend, claims, self._oldest)

    def _is_mine(self, guard: Guard) -> bool:
        with suppress(NotFoundError, CorruptError, MalformedError):
            return undamaged(self._backend, partial(_nonce_at, self._backend, guard.key)) == guard.nonce
        return False

    def _remove_if_mine(self, guard: Guard) -> None:
        with suppress(BackendError):
            if self._is_mine(guard):
                remove_claim(self._backend, guard.key)


def _locked(backend: PruneBackend) -> StoreLock:
    """The lock of the store, alone. ConflictError if somebody holds it."""
    end = time.monotonic() + _LOCK_SECONDS
    while (held := lock(backend, exclusive=True)) is None:
        alive = [
            claim
            for claim in (*leases(backend, lock_is_free=False), *markers(backend, lock_is_free=False))
            if claim.liveness is not Liveness.DEAD
        ]
        if alive:
            raise _in_the_way(backend, alive, None)
        if time.monotonic() >= end:
            why = "a process holds the lock of the store, and shows no lease"
            raise ConflictError(_what(backend), why, "find it (fuser on the file lock in the store) and let it end")
        time.sleep(_LOCK_POLL_SECONDS)
    return held


def _fence(backend: PruneBackend) -> None:
    refs = Refs(backend)
    for name in refs.names():
        head = refs.head(name)
        if head is not None:
            refs.fence(name, head.generation)


def _in_the_way(backend: ReadBackend, claims: Sequence[Claim], oldest: int | None) -> ConflictError:
    listed = ", ".join(f"{_kind(claim)} of {claim}" for claim in claims[:_NAMED])
    more = f" and {len(claims) - _NAMED} more" if len(claims) > _NAMED else ""
    if any(claim.liveness is Liveness.ALIVE for claim in claims):
        hint = "wait until it has ended, or end it, then run this again"
    elif oldest is None:
        hint = "wait until it has ended; if it is gone for good, say so with ckpt gc --break-leases-older-than"
    else:
        hint = f"it is younger than {oldest} s, or its clock is ahead of ours; if it is gone for good, give a lower age"
    why = f"whether it still runs cannot be told from here: {listed}{more}"
    if all(claim.liveness is Liveness.ALIVE for claim in claims):
        why = f"it is in use: {listed}{more}"
    return ConflictError(_what(backend), f"{why}; nothing was deleted", hint)


def _kind(claim: Claim) -> str:
    return "lease" if claim.key.startswith("leases/") else "collection"


def _what(backend: ReadBackend) -> str:
    return f"collection in {backend.url}"


def _nonce_at(backend: ReadBackend, key: str) -> str:
    return CollectionMarker.parse(backend.get(key, 0, RECORD_LIMIT + 1)).nonce


def _pruning(backend: ReadBackend) -> PruneBackend:
    if not hasattr(backend, "delete"):
        raise ReadOnlyError(f"store {backend.url}", "its backend cannot delete")
    return cast(PruneBackend, backend)
