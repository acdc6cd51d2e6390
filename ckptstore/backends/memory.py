"""A backend in this process's memory: for tests, and for stores that are packed or pushed before the process ends."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator
from threading import Lock

from ckptstore.backends.protocol import Buffer, ReadbackMethod, Stat, Traits, check_key, check_prefix
from ckptstore.backends.window import window
from ckptstore.errors import NotFoundError, UsageError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class MemoryBackend:
    """Keys to bytes in a dictionary, lost with the process. Safe for threads."""

    def __init__(self, name: str | None = None) -> None:
        """An empty backend of its own; ``name`` (default: a nonce) is only for messages, see :func:`named`."""
        self._name = name if name is not None else f"unnamed-{secrets.token_hex(4)}"
        self._stored: dict[str, bytes] = {}
        self._quarantined: tuple[tuple[str, bytes], ...] = ()
        self._lock = Lock()

    @property
    def url(self) -> str:
        """``memory:<name>``."""
        return f"memory:{self._name}"

    @property
    def traits(self) -> Traits:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        return Traits()

    @property
    def quarantined(self) -> tuple[tuple[str, bytes], ...]:
        """(Key, bytes) of all that :meth:`replace` has put aside, oldest first."""
        with self._lock:
            return self._quarantined

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        data = self._found(key)
        start, stop = window(len(data), offset, length)
        return data[start:stop]

    def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`. The method is always MEMORY."""
        return self.get(key, 0, length), ReadbackMethod.MEMORY

    def stat(self, key: str) -> Stat | None:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        check_key(key)
        with self._lock:
            data = self._stored.get(key)
        return None if data is None else Stat(key, len(data))

    def present(self, keys: Collection[str]) -> set[str]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        return {key for key in keys if self.stat(key) is not None}

    def list(self, prefix: str) -> Iterator[Stat]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`. Lists what is there at the call."""
        check_prefix(prefix)
        with self._lock:
            return iter([Stat(key, len(data)) for key, data in sorted(self._stored.items()) if key.startswith(prefix)])

    def create(self, key: str, data: Buffer) -> bool:
        """See :class:`~ckptstore.backends.protocol.WriteBackend`."""
        check_key(key)
        ours = bytes(data)
        with self._lock:
            if key in self._stored:
                return False
            self._stored[key] = ours
            return True

    def replace(self, key: str, data: Buffer) -> None:
        """See :class:`~ckptstore.backends.protocol.RepairBackend`. An absent key is created."""
        check_key(key)
        ours = bytes(data)
        with self._lock:
            if key in self._stored:
                self._quarantined += ((key, self._stored[key]),)
            self._stored[key] = ours

    def delete(self, key: str) -> bool:
        """See :class:`~ckptstore.backends.protocol.PruneBackend`."""
        check_key(key)
        with self._lock:
            return self._stored.pop(key, None) is not None

    def _found(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            data = self._stored.get(key)
        if data is None:
            raise NotFoundError(f"key {key}", f"not in {self.url}", "ckpt repair gets it from another copy")
        return data


_named: dict[str, MemoryBackend] = {}
_named_lock = Lock()


def named(name: str, *, create: bool) -> MemoryBackend:
    """The backend that this process shares under ``name``, made if it is missing and ``create`` is true.

    Raises:
        UsageError: ``name`` is not 1 to 64 of ``[A-Za-z0-9._-]``.
        NotFoundError: there is none of this name, and ``create`` is false.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"store memory:{name}", "a name in memory is 1 to 64 of [A-Za-z0-9._-]", "choose another")
    with _named_lock:
        if name not in _named:
            if not create:
                why = "this process holds no such store, and no other process can see one"
                raise NotFoundError(f"store memory:{name}", why, "create it first, in this process")
            _named[name] = MemoryBackend(name)
        return _named[name]
