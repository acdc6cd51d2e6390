"""Leases: a writer says that it is alive before its first decision not to write something that is already there."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from datetime import UTC, datetime

from ckptstore.backends.deadline import deadline
from ckptstore.backends.owners import this_process
from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import CkptStoreError, ConflictError, NotFoundError
from ckptstore.format.keys import STORE_KEY, lease_key
from ckptstore.format.records import Lease
from ckptstore.objects import writable

_GRACE_SECONDS = 3.0


@contextmanager
def lease(backend: ReadBackend) -> Iterator[None]:
    """Hold a writer's lease for the time of the block.

    Raises:
        ConflictError: a collection is running; nothing was written.
        ReadOnlyError: the store cannot be written.
        NotFoundError: it is no store any more; nothing was written.
    """
    store = writable(backend)
    if store.stat(STORE_KEY) is None:
        why = f"there is no {STORE_KEY}: it was removed, or emptied, while this process had it open"
        raise NotFoundError(f"store {store.url}", why, "find out what happened to it, and open it again")
    key = lease_key(secrets.token_hex(16))
    try:
        store.create(key, Lease(socket.gethostname(), str(this_process()), now()).encode())
        for marker in store.list("gc/"):
            why = f"a collection is running ({marker.key})"
            raise ConflictError(f"store {store.url}", why, "try again when it has ended")
        yield
    finally:
        delete = getattr(store, "delete", None)
        if delete is not None:
            # A lease left behind is what collection breaks as stale; it must not mask the block's own error.
            with suppress(CkptStoreError):
                Context().run(_delete_soon, delete, key)


def _delete_soon(delete: Callable[[str], object], key: str) -> None:
    """Also when the time of the block is over: a moment is left for this."""
    with deadline(_GRACE_SECONDS):
        delete(key)


def now() -> str:
    """The time in UTC as RFC 3339 with seconds, for receipts and leases."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
