"""Digests: plain BLAKE3-256 for everything stored, BLAKE3 ``derive_key`` contexts for every Merkle node (F-10,
F-11)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blake3 import blake3

from ckptstore.errors import MalformedError

_TEXT = re.compile(r"(?:b3:)?([0-9a-f]{64})")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """32 bytes of BLAKE3. Prints as ``b3:<64 lowercase hex digits>``, the bytes in order."""

    raw: bytes

    def __post_init__(self) -> None:
        if type(self.raw) is not bytes or len(self.raw) != 32:
            raise MalformedError("digest", "a digest is exactly 32 bytes")

    def __hash__(self) -> int:
        return hash(self.raw)  # half the time of the one that would be made, and sets are full of digests

    @staticmethod
    def of(data: Buffer) -> Digest:
        """Plain BLAKE3-256 of ``data``: what ``b3sum`` prints."""
        return Digest(blake3(data).digest())

    @staticmethod
    def parse(text: object) -> Digest:
        """The digest written as ``b3:<hex>`` or as bare hex. MalformedError for anything else."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise MalformedError(f"digest {text!r:.80}", "not b3: and 64 lowercase hex digits")
        return Digest(bytes.fromhex(match[1]))

    @property
    def hex(self) -> str:
        """64 lowercase hex digits, as in keys."""
        return self.raw.hex()

    @property
    def short(self) -> str:
        """The first 12 hex digits, for people."""
        return self.raw.hex()[:12]

    def __str__(self) -> str:
        return f"b3:{self.raw.hex()}"


def derive(context: str, *parts: bytes) -> bytes:
    """32 bytes of BLAKE3 in ``derive_key`` mode under ``context`` over the parts joined."""
    return blake3(b"".join(parts), derive_key_context=context).digest()
