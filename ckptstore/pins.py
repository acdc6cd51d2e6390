"""Pins: what a store is asked to keep besides its refs, and which shards a partial store holds."""

from __future__ import annotations

from collections.abc import Iterator

from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import CorruptError, MalformedError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import pin_prefix
from ckptstore.format.records import RECORD_LIMIT, Pin


def pins(backend: ReadBackend, root: Digest) -> Iterator[Pin]:
    """The pins on ``root``. CorruptError if one cannot be read: nobody knows then what is to be kept."""
    for stat in backend.list(pin_prefix(root)):
        try:
            yield Pin.parse(backend.get(stat.key, 0, RECORD_LIMIT + 1))
        except MalformedError as error:
            raise CorruptError(f"pin {stat.key}", str(error), "remove it, or pull again to pin again") from None


def pinned_shards(backend: ReadBackend, root: Digest) -> tuple[int, ...] | None:
    """The shards of ``root`` that pins keep, sorted; None if there is no pin, or one keeps the whole checkpoint."""
    found = list(pins(backend, root))
    kept: set[int] = set()
    for pin in found:
        if pin.shards is None:
            return None
        kept.update(pin.shards)
    return tuple(sorted(kept)) if found else None
