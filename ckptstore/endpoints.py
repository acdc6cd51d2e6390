"""What the endpoint of a store honours: as a receipt in the store says, else found out by trying, and recorded there.

A ref is moved by creating a key that must not exist. An endpoint that answers "created" to two writers would let both
believe that their checkpoint is the head, so its refs are moved only in a store that is said to have a single writer.
"""

from __future__ import annotations

from typing import cast

from ckptstore.backends.capabilities import Capabilities, Endpoint
from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY, feature_key, receipt_key, receipt_prefix
from ckptstore.format.records import RECEIPT_LIMIT, RECORD_LIMIT, Receipt
from ckptstore.leases import now
from ckptstore.objects import writable

PROBE = "probe"
"""Operation of the receipt that records capabilities; its subject is the digest of the store's header."""

SINGLE_WRITER = "single-writer"
"""Feature of a store whose users promise that one process at a time writes to it."""


def capabilities(backend: ReadBackend) -> Capabilities | None:
    """What the endpoint of a store honours; None if the store is not behind one (a directory, memory).

    Raises:
        ReadOnlyError: nobody has recorded it, and these credentials cannot find out.
    """
    if not hasattr(backend, "probe"):
        return None
    endpoint = cast(Endpoint, backend)
    if endpoint.capabilities is None:
        endpoint.capabilities = _recorded(backend) or record(backend)
    return endpoint.capabilities


def recorded(backend: ReadBackend) -> Capabilities | None:
    """The same as far as it is known without trying and without writing; None also if nobody recorded it."""
    if not hasattr(backend, "probe"):
        return None
    return cast(Endpoint, backend).capabilities or _recorded(backend)


def record(backend: ReadBackend) -> Capabilities:
    """Find out what the endpoint of a store honours, and leave a receipt about it."""
    found = cast(Endpoint, backend).probe()
    header = _header(backend)
    receipt = Receipt(
        PROBE, header, None, 0, 0, 0, "none", now(), backend.url, details=values.to_json(found.plain(), PROBE)
    )
    data = receipt.encode()
    writable(backend).create(receipt_key(header, Digest.of(data)), data)
    return found


def require_exclusive(backend: ReadBackend, what: str) -> None:
    """RefusedError unless of two writers that move a ref of this store one must lose."""
    found = capabilities(backend)
    if found is None or found.conditional_create or is_single_writer(backend):
        return
    why = (
        f"{backend.url} overwrites what it was asked to create only if absent: two writers would both be told that "
        "they moved the ref, and one checkpoint would drop out of its history"
    )
    hint = "use an endpoint with conditional writes, or make the store with ckpt init --single-writer and keep to one"
    raise RefusedError(what, why, hint)


def is_single_writer(backend: ReadBackend) -> bool:
    """Whether the store was made for one writer at a time."""
    return backend.stat(feature_key(SINGLE_WRITER)) is not None


def _recorded(backend: ReadBackend) -> Capabilities | None:
    """The newest record of capabilities in the store."""
    newest: tuple[str, Capabilities] | None = None
    for stat in backend.list(receipt_prefix(_header(backend))):
        data = backend.get(stat.key, 0, RECEIPT_LIMIT + 1)
        if not stat.key.endswith(Digest.of(data).hex):
            continue
        try:
            receipt = Receipt.parse(data)
            plain = None if receipt.details is None else values.from_json(receipt.details, PROBE)
        except MalformedError:
            continue
        found = Capabilities.of(plain)
        if receipt.operation == PROBE and found is not None and (newest is None or newest[0] < receipt.time):
            newest = receipt.time, found
    return newest[1] if newest else None


def _header(backend: ReadBackend) -> Digest:
    return Digest.of(backend.get(STORE_KEY, 0, RECORD_LIMIT + 1))
