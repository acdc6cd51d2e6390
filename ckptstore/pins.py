"""Pins: what a store is asked to keep besides its refs, and which shards a partial store holds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Protocol, cast

from ckptstore.backends.protocol import ReadBackend
from ckptstore.endpoints import recorded
from ckptstore.errors import CorruptError, MalformedError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import pin_prefix
from ckptstore.format.records import RECORD_LIMIT, Pin
from ckptstore.objects import undamaged


class HoldingBackend(ReadBackend, Protocol):
    """A backend that can hold keys against deletion until a time."""

    def hold(self, key: str, until: datetime) -> None:
        """Hold ``key`` until ``until``; one that is held longer stays so."""
        ...

    def held_until(self, key: str) -> datetime | None:
        """Until when ``key`` is held, None if it is not or is not there."""
        ...


def read_pin(backend: ReadBackend, key: str) -> Pin:
    """The pin under a key. CorruptError if it cannot be read: nobody knows then what is to be kept."""
    try:
        return undamaged(backend, lambda: Pin.parse(backend.get(key, 0, RECORD_LIMIT + 1)))
    except MalformedError as error:
        raise CorruptError(f"pin {key}", str(error), f"ckpt repair {key.split('/')[1]} puts it right") from None


def pins(backend: ReadBackend, root: Digest) -> Iterator[Pin]:
    """The pins on ``root``. CorruptError if one cannot be read: nobody knows then what is to be kept."""
    for stat in backend.list(pin_prefix(root)):
        yield read_pin(backend, stat.key)


def pinned_shards(backend: ReadBackend, root: Digest) -> tuple[int, ...] | None:
    """The shards of ``root`` that pins keep, sorted; None if there is no pin, or one keeps the whole checkpoint."""
    found = list(pins(backend, root))
    kept: set[int] = set()
    for pin in found:
        if pin.shards is None:
            return None
        kept.update(pin.shards)
    return tuple(sorted(kept)) if found else None


def holding(backend: ReadBackend) -> HoldingBackend | None:
    """The backend as one whose keys may be held; None if it cannot hold any, as far as that is recorded."""
    if not hasattr(backend, "held_until"):
        return None
    honoured = recorded(backend)
    return cast(HoldingBackend, backend) if honoured is None or honoured.object_lock else None
