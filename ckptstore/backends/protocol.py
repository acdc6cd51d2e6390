"""What a backend is: keys to bytes, without meaning.

Four small types, so that a signature says what a function may do to data: :class:`ReadBackend` reads,
:class:`WriteBackend` adds create-if-absent, :class:`RepairBackend` adds replacing, :class:`PruneBackend` adds deleting.
Digest checks live above backends. One contract suite (tests/contract) runs over every backend and every wrapper.

Keys are ``/``-separated relative names made of ``[A-Za-z0-9._-]`` components (docs/format.md section 1); a backend
refuses any other with :class:`~ckptstore.errors.UsageError`, on the way in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ckptstore.errors import UsageError

Buffer = bytes | bytearray | memoryview

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_MAX_KEY = 512


@dataclass(frozen=True, slots=True)
class Stat:
    """A stored key and its size in bytes."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Traits:
    """What callers have to know of a backend to use it well.

    ``threads``: calls at a time that are worth making. ``network``: bytes pass a network, which can change them, so a
    mismatch is read again before stored bytes are called wrong; and what lies at the other end was read back before a
    ref names it.
    """

    threads: int = 4
    network: bool = False


class ReadbackMethod(Enum):
    """How far down a readback reached; only methods with ``reaches_medium`` may be called *verified*."""

    DIRECT = "direct"  # O_DIRECT: around the page cache
    DROPPED = "fsync-dropped"  # fsync + DONTNEED, and mincore showed no resident page before the read
    SERVER = "server-read"  # read again from a server; what it read from is its own affair
    MEMORY = "memory"  # the medium is this process's memory
    CACHED = "cached"  # may have come from the page cache

    @property
    def reaches_medium(self) -> bool:
        """True if bytes read this way came from where they are kept."""
        return self is not ReadbackMethod.CACHED


class ReadBackend(Protocol):
    """Reading. All methods raise BackendError (or a subclass) for failures below, and may be called from several
    threads."""

    @property
    def url(self) -> str:
        """Where this is, without credentials; for messages and receipts."""
        ...

    @property
    def traits(self) -> Traits:
        """How to use it well."""
        ...

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes ``[offset, offset + length)`` of ``key``, fewer if it ends before. NotFoundError if absent."""
        ...

    def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
        """The first ``length`` bytes (default all) read from the medium as far as possible, and how. NotFoundError
        if absent."""
        ...

    def stat(self, key: str) -> Stat | None:
        """Size of ``key``, or None if absent. A hint, never proof of content."""
        ...

    def present(self, keys: Collection[str]) -> set[str]:
        """Those of ``keys`` that may be there; what is left out was absent a moment ago. A hint, in few round trips."""
        ...

    def list(self, prefix: str) -> Iterator[Stat]:
        """All keys that start with ``prefix`` (empty, or ending in ``/``), sorted by key. Temporaries are never
        listed."""
        ...


class WriteBackend(ReadBackend, Protocol):
    """Reading and adding."""

    def create(self, key: str, data: Buffer) -> bool:
        """Publish ``data`` as ``key`` if the key is absent: atomic and durable when it returns True.

        Returns False, with nothing changed, if the key exists (whatever its bytes). After an error the key is either
        absent or whole. Raises NoSpaceError, ReadOnlyError, BackendError.
        """
        ...


class RepairBackend(WriteBackend, Protocol):
    """Reading, adding, and replacing what was just read and found wrong."""

    def replace(self, key: str, data: Buffer) -> None:
        """Put the present bytes of ``key`` aside (quarantine) and publish ``data`` in their place, atomic and
        durable."""
        ...


class PruneBackend(RepairBackend, Protocol):
    """All of the above and deleting: for collection, and for a writer's own lease."""

    def delete(self, key: str) -> bool:
        """Remove ``key`` durably. Returns whether it was there."""
        ...


def check_key(key: str) -> str:
    """Return ``key`` if it is a legal key, else raise UsageError."""
    if len(key) > _MAX_KEY or not _KEY.fullmatch(key):
        raise UsageError(f"key {key!r}", "not a legal key", "keys are relative, /-separated [A-Za-z0-9._-] names")
    return key


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` if it is empty or a legal key followed by ``/``, else raise UsageError."""
    if prefix and not (prefix.endswith("/") and _KEY.fullmatch(prefix[:-1])):
        raise UsageError(f"prefix {prefix!r}", "not a legal prefix", "a prefix is empty or ends in /")
    return prefix
