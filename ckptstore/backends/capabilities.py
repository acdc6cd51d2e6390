"""What an endpoint honours of what its protocol promises."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

from ckptstore.backends.protocol import ReadBackend

CHECKED, KEPT, IGNORED = "checked", "kept", "ignored"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an endpoint was seen to honour.

    Args:
        conditional_create: of two writers that create one key the second is refused, so refs can be moved.
        checksums: a SHA-256 that goes with an object is ``checked`` on arrival, only ``kept``, or ``ignored``.
        ranged_get: a part of an object can be asked for.
        versioning: old versions are kept.
        object_lock: objects can be held against deletion.
        list_in_order: listings are in the order of the keys' bytes.
    """

    conditional_create: bool
    checksums: str
    ranged_get: bool
    versioning: bool
    object_lock: bool
    list_in_order: bool

    def plain(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)

    @staticmethod
    def of(plain: object) -> Capabilities | None:
        """Capabilities of plain values; None if they are not, for instance those of another release."""
        if not isinstance(plain, dict) or set(plain) != set(Capabilities.__slots__):
            return None
        if any(type(value) is not (str if name == "checksums" else bool) for name, value in plain.items()):
            return None
        return Capabilities(**plain)


class Endpoint(ReadBackend, Protocol):
    """A backend behind a server, of which it is not known what it honours until somebody tries."""

    capabilities: Capabilities | None

    def probe(self) -> Capabilities:
        """Try it now, with a few requests that leave nothing behind. ReadOnlyError if nothing may be written."""
        ...
