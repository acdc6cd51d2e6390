"""Who did it, and to which store: what a receipt of a readback says besides its figures.

A URL may lead to another store tomorrow, and a store may move: so a receipt names the store by the id in its header.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Sequence

from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import MalformedError, NotFoundError
from ckptstore.format import values
from ckptstore.format.canonical import Json
from ckptstore.format.keys import STORE_KEY
from ckptstore.format.records import RECORD_LIMIT, Receipt
from ckptstore.format.records import Store as StoreHeader


def this_actor() -> str:
    """``user@host`` of this process; a user without a name is ``uid-<number>``."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container that runs under any number
        user = f"uid-{os.geteuid()}"
    return f"{user}@{socket.gethostname()}".encode("utf-8", "backslashreplace").decode()


def store_id(backend: ReadBackend) -> str | None:
    """The id in the header of a store (32 hex digits), None if there is no header that can be understood."""
    try:
        return StoreHeader.parse(backend.get(STORE_KEY, 0, RECORD_LIMIT + 1)).id
    except (MalformedError, NotFoundError):
        return None


def store_of(receipt: Receipt) -> str | None:
    """The id of the store that a receipt tells of, None if it does not say."""
    try:
        plain = None if receipt.details is None else values.plain_from_json(receipt.details, "receipt details")
    except MalformedError:
        return None
    store = plain.get("store") if isinstance(plain, dict) else None
    return store if isinstance(store, str) else None


def readback_details(
    store: str | None,
    *,
    max_age_seconds: int = 0,
    versions: Sequence[str | None] | None = None,
    read: Sequence[bool] | None = None,
) -> dict[str, Json]:
    """The typed ``details`` of the receipt of a readback (verify, push, pull) made by this process now.

    Args:
        store: id of the store whose bytes were read, see :func:`store_id`.
        max_age_seconds: how old an earlier readback of the same version of an object may be to count in place of a new
            one; 0: everything was read now.
        versions: where the backend keeps versions, the id of the one that was read of each key of the closure, sorted
            by key; None for a key that was not read.
        read: for each key of the closure, sorted, whether it was read now; None: all of them, or ``versions`` tell.
    """
    plain: dict[str, object] = {"by": this_actor(), "max_age_seconds": max_age_seconds}
    if store is not None:
        plain["store"] = store
    if versions is not None:
        plain["versions"] = list(versions)
    if read is not None:
        plain["read"] = bits(read)
    typed = values.to_json(plain, "readback")
    assert isinstance(typed, dict)
    return typed


def bits(flags: Sequence[bool]) -> bytes:
    """Eight flags a byte, the first one lowest."""
    packed = bytearray((len(flags) + 7) // 8)
    for index, flag in enumerate(flags):
        packed[index // 8] |= flag << index % 8
    return bytes(packed)
