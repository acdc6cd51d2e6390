"""Leases: a writer says that it is alive before its first decision not to write something that is already there.

A lease belongs to one process and one backend object, however many threads and blocks hold it, and ends with the last
of them. In a directory the lock of the store is held besides, shared. A forked child holds nothing of its parent's.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from logging import getLogger
from threading import Lock
from typing import cast

from ckptstore.backends import deadline
from ckptstore.backends.flocks import StoreLock
from ckptstore.backends.owners import Liveness, this_process
from ckptstore.backends.protocol import Buffer, ReadBackend, WriteBackend
from ckptstore.claims import Claim, markers, now
from ckptstore.errors import CkptStoreError, ConflictError, NotFoundError
from ckptstore.format.keys import STORE_KEY, lease_key
from ckptstore.format.records import Lease
from ckptstore.objects import writable

__all__ = ["PATIENCE_SECONDS", "check_lease", "held_since", "lease", "lock", "now", "publish", "remove_claim"]

PATIENCE_SECONDS = 30.0
"""How long a writer waits for a collection to end before it gives up."""

_GRACE_SECONDS = 3.0
_POLL_SECONDS = (0.02, 1.0)  # the first pause and the longest


@contextmanager
def lease(backend: ReadBackend) -> Iterator[None]:
    """Hold a writer's lease for the time of the block; inside another block of this process, the same one.

    While a collection is running, the writer withdraws and waits, :data:`PATIENCE_SECONDS` at most.

    Raises:
        ConflictError: a collection is running, or did not end; nothing was written.
        ReadOnlyError: the store cannot be written.
        NotFoundError: it is no store any more; nothing was written.
    """
    with _registry_lock:
        tenure = _tenures.setdefault(id(backend), _Tenure(backend))
        tenure.users += 1
    try:
        tenure.enter()
        try:
            yield
        finally:
            tenure.leave()
    finally:
        if tenure.is_ours:
            with _registry_lock:
                tenure.users -= 1
                if not tenure.users:
                    del _tenures[id(backend)]


def held_since(backend: ReadBackend) -> float | None:
    """When the lease that this process holds through ``backend`` began (of :func:`time.monotonic`); None without one.

    Of what was seen before that, nobody knows whether it is still there.
    """
    tenure = _tenures.get(id(backend))
    return tenure.since if tenure is not None and tenure.key else None


def check_lease(backend: ReadBackend) -> None:
    """To be called right before something is published that says what is to be kept.

    Raises:
        ConflictError: the lease that this process holds through ``backend`` was taken away: a collection took it for
            dead, and what it found or stored under the lease may be gone.
    """
    tenure = _tenures.get(id(backend))
    if tenure is None or not tenure.key or backend.stat(tenure.key) is not None:
        return
    with suppress(NotFoundError):  # asked twice: over a network, "not there" may be said of what is
        backend.get(tenure.key)
        return
    why = f"a collection took this process for dead and its lease away ({tenure.key}), and deletes what nothing names"
    raise ConflictError(f"store {backend.url}", why, "nothing was published; do it again, from the beginning")


def publish(backend: ReadBackend, key: str, data: Buffer) -> bool:
    """Create ``key``, which says what is to be kept, under a lease; returns whether it was absent.

    What is to be kept has to be seen inside the same lease, so the caller holds one already.

    Raises:
        ConflictError: the lease was taken away; the key is not there.
    """
    with lease(backend):
        check_lease(backend)
        store = writable(backend)
        created = store.create(key, data)
        try:
            check_lease(backend)  # a process may sleep for hours between two lines
        except ConflictError:
            if created:
                remove_claim(store, key)
            raise
        return created


def remove_claim(store: WriteBackend, key: str) -> None:
    """Delete ``key``, also when the time of the present work is over: a moment is left for this. A failure is not told:
    it must not mask what ends the work, and what is left is removed by the next collection."""
    delete = getattr(store, "delete", None)
    if delete is not None:
        with suppress(CkptStoreError):
            Context().run(_delete_soon, delete, key)


def lock(backend: ReadBackend, *, exclusive: bool) -> StoreLock | None:
    """The lock that ``backend`` has besides leases, not honoured where it has none; None if somebody else holds it."""
    locked = cast(Callable[..., StoreLock | None] | None, getattr(backend, "locked", None))
    return StoreLock(None) if locked is None else locked(exclusive=exclusive)


class _Tenure:
    """The lease that this process holds, or is about to hold, through one backend."""

    def __init__(self, backend: ReadBackend) -> None:
        self.backend = backend
        self.users = 0  # blocks that are inside or on their way
        self.key = ""
        self.since = 0.0
        self._holders = 0
        self._lock = Lock()
        self._pid = os.getpid()
        self._store_lock = StoreLock(None)

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, and not one that it was forked from."""
        return self._pid == os.getpid()

    def enter(self) -> None:
        with self._lock:
            if not self._holders:
                self._take()
            self._holders += 1

    def leave(self) -> None:
        if not self.is_ours:  # a child that leaves its parent's block
            return
        with self._lock:
            self._holders -= 1
            if not self._holders:
                key, self.key = self.key, ""
                self._withdraw(writable(self.backend), key)

    def _take(self) -> None:
        store = writable(self.backend)
        if store.stat(STORE_KEY) is None:
            why = f"there is no {STORE_KEY}: it was removed, or emptied, while this process had it open"
            raise NotFoundError(f"store {store.url}", why, "find out what happened to it, and open it again")
        end = time.monotonic() + PATIENCE_SECONDS
        pause, longest = _POLL_SECONDS
        refusal = self._tried(store)
        while refusal is not None:
            left = deadline.remaining()
            if not refusal.passes or time.monotonic() >= end or (left is not None and left <= longest):
                raise refusal.error(store.url)
            time.sleep(pause)
            pause = min(2 * pause, longest)
            # Over a network only the marker is watched: leases that come and go would keep the collection away.
            refusal = (_refusal(store) if store.traits.network else None) or self._tried(store)

    def _tried(self, store: WriteBackend) -> _Refusal | None:
        """Take the lease, or leave nothing behind and say why not."""
        held = lock(store, exclusive=False)
        if held is None:
            return _refusal(store) or _Refusal(None)
        _tell_without_locks(store, held)
        self._store_lock = held
        key = lease_key(secrets.token_hex(16))
        since = time.monotonic()
        try:
            store.create(key, Lease(socket.gethostname(), str(this_process()), now()).encode())
            refusal = _refusal(store, lock_is_free=held.honoured)
        except BaseException:
            self._withdraw(store, key)
            raise
        if refusal is not None:
            self._withdraw(store, key)
            return refusal
        self.key, self.since = key, since
        return None

    def _withdraw(self, store: WriteBackend, key: str) -> None:
        remove_claim(store, key)
        self._store_lock.close()  # last: while it is held, the lease is no dead writer's


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a writer has to withdraw: a marker, or (None) somebody who holds the lock and has shown none yet."""

    marker: Claim | None

    @property
    def passes(self) -> bool:
        """Whether it is worth waiting for its end."""
        return self.marker is None or self.marker.record is not None

    def error(self, url: str) -> ConflictError:
        if self.marker is None:
            why = "a collection holds the lock of the store"
            return ConflictError(f"store {url}", why, "try again when it has ended")
        if self.marker.liveness is Liveness.ALIVE:
            why = f"a collection is running: {self.marker}"
            return ConflictError(f"store {url}", why, "try again when it has ended")
        why = f"a collection is running, or ended without saying so: {self.marker}"
        hint = "try again when it has ended; if that process is gone, ckpt gc --break-leases-older-than ends it"
        return ConflictError(f"store {url}", why, hint)


def _refusal(store: ReadBackend, *, lock_is_free: bool = False) -> _Refusal | None:
    for marker in markers(store, lock_is_free=lock_is_free):
        # One that died deletes nothing any more. But what it asked of a server may still be under way.
        if marker.liveness is not Liveness.DEAD or store.traits.network:
            return _Refusal(marker)
    return None


def _tell_without_locks(store: ReadBackend, held: StoreLock) -> None:
    if hasattr(store, "locked") and not held.honoured and store.url not in _told:
        _told.add(store.url)
        getLogger("ckptstore").warning("%s has no file locks: leases alone keep collections away", store.url)


def _delete_soon(delete: Callable[[str], object], key: str) -> None:
    with deadline.deadline(_GRACE_SECONDS):
        delete(key)


_tenures: dict[int, _Tenure] = {}
_registry_lock = Lock()
_told: set[str] = set()


def _forget_in_child() -> None:
    global _registry_lock
    _registry_lock = Lock()  # another thread of the parent may have had it
    _tenures.clear()


os.register_at_fork(after_in_child=_forget_in_child)
