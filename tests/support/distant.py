"""Backends at the other end of a network, and what may be wrong with them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.protocol import Buffer, ReadbackMethod, Traits
from ckptstore.format.keys import STORE_KEY
from ckptstore.format.records import Store as StoreHeader
from tests.support.faulty import FaultyBackend


class Distant(MemoryBackend):
    """Memory at the other end of a network."""

    @property
    def traits(self) -> Traits:
        return Traits(threads=8, network=True)


class Liar(FaultyBackend):
    """Says of all keys that they are there, or that none is."""

    def __init__(self, inner: MemoryBackend, *, there: bool) -> None:
        super().__init__(inner)
        self._there = there

    def present(self, keys: Collection[str]) -> set[str]:
        return set(keys) if self._there else set()


class Framing(Distant):
    """Stores an upload as it came over the wire, chunk by chunk with a checksum behind (B069)."""

    def create(self, key: str, data: Buffer) -> bool:
        return super().create(key, self.framed(bytes(data)) if key.startswith("objects/") else data)

    def replace(self, key: str, data: Buffer) -> None:
        super().replace(key, self.framed(bytes(data)))

    def framed(self, data: bytes) -> bytes:
        pieces = [data[start : start + 65536] for start in range(0, len(data), 65536)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        return body + b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"


class SignedFraming(Framing):
    def framed(self, data: bytes) -> bytes:
        return b"%x;chunk-signature=%s\r\n%s\r\n0;chunk-signature=%s\r\n\r\n" % (
            len(data),
            b"ab" * 32,
            data,
            b"cd" * 32,
        )


def made(backend: MemoryBackend) -> MemoryBackend:
    """The backend with the header of a store."""
    backend.create(STORE_KEY, StoreHeader("5" * 32).encode())
    return backend


class Keeping(Distant):
    """Keeps versions: each key has the id of its present one."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count(1)
        self._present: dict[str, str] = {}
        self._read: dict[str, str] = {}

    def create(self, key: str, data: Buffer) -> bool:
        created = super().create(key, data)
        if created:
            self._present[key] = f"version-{next(self._numbers)}"
        return created

    def replace(self, key: str, data: Buffer) -> None:
        super().replace(key, data)
        self._present[key] = f"version-{next(self._numbers)}"

    def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
        data = self.get(key, 0, length)
        self._read[key] = self._present[key]
        return data, ReadbackMethod.SERVER

    def versions(self, keys: Collection[str]) -> dict[str, str]:
        return {key: self._present[key] for key in keys if key in self._present}

    def versions_read(self) -> dict[str, str]:
        return dict(self._read)
