"""Pinning: keep a checkpoint whatever refs and policies say, list what is kept so, and end it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

from ckptstore.collection.facts import Facts
from ckptstore.collection.reach import Reach, kind_of
from ckptstore.endpoints import capabilities
from ckptstore.errors import CorruptError, NotFoundError, RefusedError, UsageError
from ckptstore.findings import Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import pin_key, pin_prefix
from ckptstore.format.records import Pin
from ckptstore.leases import publish
from ckptstore.pins import HoldingBackend, holding, read_pin
from ckptstore.store import Store
from ckptstore.threads import in_threads

DEFAULT_REASON = "to be kept"


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin that is there.

    Args:
        root: what it keeps.
        key: its own key.
        pin: scope and reason.
        until: until when the endpoint holds it and what it keeps against deletion, in UTC; None if it does not.
    """

    root: Digest
    key: str
    pin: Pin
    until: datetime | None = None


def list_pins(store: Store, root: Digest | None = None) -> list[Pinned]:
    """All pins of a store, or those on ``root``, sorted by what they keep.

    Raises:
        CorruptError: one cannot be read; names it.
    """
    holder = holding(store.backend)
    found = []
    for stat in store.backend.list("pins/" if root is None else pin_prefix(root)):
        until = None if holder is None else holder.held_until(stat.key)
        kept = Digest.parse(stat.key.split("/")[1])
        found.append(Pinned(kept, stat.key, read_pin(store.backend, stat.key), until))
    return found


def pin(
    store: Store,
    root: Digest,
    *,
    shards: Collection[int] | None = None,
    reason: str = DEFAULT_REASON,
    until: datetime | None = None,
) -> Pinned:
    """Keep a checkpoint, or some shards of it, whatever refs and policies say, until the pin is removed.

    Args:
        store: the store.
        root: the checkpoint; or a tree, a preparation or a shard, which is kept with all that it needs.
        shards: only these.
        reason: for people.
        until: let the endpoint of the store hold every key of the closure and the pin against deletion until then
            (object lock, mode GOVERNANCE). A key that is held longer stays so.

    Raises:
        RefusedError: ``until``, and the store has no object lock; nothing was written.
        UsageError: a time that is over, no such shard, or an empty reason.
        CorruptError, NotFoundError: documents of the closure cannot be read; nothing was written.
        ConflictError: a collection is running; nothing was written.
        BackendError: the store failed. If keys were to be held, some may be: do it again.
    """
    what = f"pin on {root.short}"
    if not reason:
        raise UsageError(what, "its reason is empty")
    if shards is not None and not shards:
        raise UsageError(what, "no shard is named", "leave the shards out to keep all of them")
    record = Pin(None if shards is None else tuple(sorted(set(shards))), reason)
    holder = None if until is None else _able_to_hold(store, what, until)
    with store.lease():
        keys = _needed(store, root, record.shards)
        key = pin_key(root, secrets.token_hex(16))
        publish(store.backend, key, record.encode())
        if holder is not None and until is not None:
            hold = _holds(holder, until)
            for _ in in_threads(hold, keys, store.backend.traits.threads):
                pass
            hold(key)
    return Pinned(root, key, record, until)


def unpin(store: Store, root: Digest) -> list[Pinned]:
    """Remove all pins on ``root``; returns them. What nothing else keeps then goes with the next collection.

    Pins that cannot be read are removed, too.

    Raises:
        NotFoundError: there is none.
        RefusedError: the endpoint holds one; nothing was removed.
        ReadOnlyError: the store cannot be written.
    """
    what = f"pins on {root.short}"
    keys = [stat.key for stat in store.backend.list(pin_prefix(root))]
    if not keys:
        raise NotFoundError(what, f"there are none in {store.url}", "ckpt pin --list lists all")
    holder = holding(store.backend)
    found = []
    for key in keys:
        until = None if holder is None else holder.held_until(key)
        if until is not None and until > datetime.now(UTC):
            hint = "wait until then, or let an administrator end the retention (s3:BypassGovernanceRetention)"
            raise RefusedError(what, f"{key} is held until {until:%Y-%m-%dT%H:%M:%SZ}", hint)
        try:
            record = read_pin(store.backend, key)
        except (CorruptError, NotFoundError):
            record = Pin(None, "it could not be read")
        found.append(Pinned(root, key, record))
    with store.lease():
        for item in found:
            store.backend.delete(item.key)
    return found


def _able_to_hold(store: Store, what: str, until: datetime) -> HoldingBackend:
    if until.tzinfo is None or until <= datetime.now(UTC):
        raise UsageError(what, f"{until.isoformat()} is no time in the future, with its zone")
    honoured = capabilities(store.backend)
    if honoured is None or not honoured.object_lock:
        why = f"{store.url} has no object lock, so that nothing there can be held until a time"
        hint = "pin without it, or use a bucket that was made with object lock (ckpt endpoint --probe looks again)"
        raise RefusedError(what, why, hint)
    return cast(HoldingBackend, store.backend)


def _holds(backend: HoldingBackend, until: datetime) -> Callable[[str], None]:
    def hold(key: str) -> None:
        backend.hold(key, until)

    return hold


def _needed(store: Store, root: Digest, shards: Collection[int] | None) -> list[str]:
    """The keys that a pin keeps. Raises what is wrong with a document."""
    data = store.objects.document(root, Place(part=f"document {root.short}"))
    assert data is not None
    if kind_of(data) == "checkpoint":
        files = not Facts(store.backend, store.id, {root}).without_files(root)
        return [key for key, _ in store.closure(root, shards, files=files).sizes()]
    if shards is not None:
        raise UsageError(f"pin on {root.short}", "it is no checkpoint and has no shards of which some could be kept")
    return Reach.keys_below(store.objects, root)
