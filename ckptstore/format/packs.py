"""Packs: where short chunks lie follows from the content alone (F-37 to F-39).

Per shard and role, in entry order, the first occurrence of each chunk, next-fit up to 16 MiB. A pack also ends after
a path whose
BLAKE3 has its first byte & 63 = 0, so that an inserted tensor moves the packs up to the next such path and no further.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.format.digest import Digest
from ckptstore.format.tensors import CHUNK


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a short chunk lies: byte range ``[offset, offset + length)`` of pack number ``pack`` of its role."""

    pack: int
    offset: int
    length: int


def ends_pack(path: str) -> bool:
    """Whether a pack ends after this path's chunk, whatever its fill."""
    return Digest.of(path.encode()).raw[0] & 63 == 0


class PackLayout:
    """Gives the short chunks of one shard and role their slots, in entry order. Writers and readers share this rule."""

    __slots__ = ("_offset", "_pack", "slots")

    def __init__(self) -> None:
        self.slots: dict[Digest, Slot] = {}
        self._pack = 0
        self._offset = 0

    def place(self, path: str, digest: Digest, length: int) -> bool:
        """Place the short chunk of ``path``; False if an equal chunk has a slot already."""
        new = digest not in self.slots
        if new:
            if self._offset and self._offset + length > CHUNK:
                self._pack, self._offset = self._pack + 1, 0
            self.slots[digest] = Slot(self._pack, self._offset, length)
            self._offset += length
        if self._offset and ends_pack(path):
            self._pack, self._offset = self._pack + 1, 0
        return new

    def packs(self) -> list[dict[Digest, Slot]]:
        """The slots of each pack by chunk digest, in order."""
        packs: list[dict[Digest, Slot]] = []
        for digest, slot in self.slots.items():
            if slot.pack == len(packs):
                packs.append({})
            packs[slot.pack][digest] = slot
        return packs

    def lengths(self) -> list[int]:
        """Length in bytes of each pack, in order."""
        return [sum(slot.length for slot in slots.values()) for slots in self.packs()]
