"""A backend around a backend that counts what is asked of it, so that a figure such as "bytes read" is measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from threading import Lock

from ckptstore.backends.protocol import Buffer, PruneBackend, ReadbackMethod, Stat, Traits

OPERATIONS = ("get", "readback", "stat", "present", "list", "create", "replace", "delete")


@dataclass(frozen=True, slots=True)
class Tally:
    """``calls`` begun, also those that failed, and ``bytes`` that really went through: returned, or published."""

    calls: int = 0
    bytes: int = 0


class CountingBackend:
    """Passes every call on and counts it by operation and key (``list``: by prefix). Safe for threads.

    Bytes of ``get`` and ``readback`` are those returned, of ``create`` those that it published (none if the key was
    there), of ``replace`` those published; ``stat``, ``list`` and ``delete`` move none.
    """

    def __init__(self, inner: PruneBackend) -> None:
        self._inner = inner
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._lock = Lock()

    @property
    def url(self) -> str:
        """The URL of what is counted."""
        return self._inner.url

    @property
    def traits(self) -> Traits:
        """The traits of what is counted."""
        return self._inner.traits

    def total(self, *operations: str, prefix: str = "") -> Tally:
        """Sum over the ``operations`` (default: all) on keys that start with ``prefix``."""
        chosen = self._chosen(operations, prefix)
        return Tally(sum(tally.calls for _, tally in chosen), sum(tally.bytes for _, tally in chosen))

    def by_key(self, *operations: str, prefix: str = "") -> dict[str, Tally]:
        """Sums over the ``operations`` (default: all) for each key that starts with ``prefix``, sorted by key."""
        sums: dict[str, Tally] = {}
        for key, tally in sorted(self._chosen(operations, prefix), key=lambda item: item[0]):
            before = sums.get(key, Tally())
            sums[key] = Tally(before.calls + tally.calls, before.bytes + tally.bytes)
        return sums

    def reset(self) -> None:
        """Forget all counts."""
        with self._lock:
            self._tallies.clear()

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        self._count("get", key, calls=1)
        data = self._inner.get(key, offset, length)
        self._count("get", key, size=len(data))
        return data

    def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        self._count("readback", key, calls=1)
        data, method = self._inner.readback(key, length)
        self._count("readback", key, size=len(data))
        return data, method

    def stat(self, key: str) -> Stat | None:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        self._count("stat", key, calls=1)
        return self._inner.stat(key)

    def present(self, keys: Collection[str]) -> set[str]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`. Counted as one call for each key."""
        for key in keys:
            self._count("present", key, calls=1)
        return self._inner.present(keys)

    def list(self, prefix: str) -> Iterator[Stat]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        self._count("list", prefix, calls=1)
        return self._inner.list(prefix)

    def create(self, key: str, data: Buffer) -> bool:
        """See :class:`~ckptstore.backends.protocol.WriteBackend`."""
        self._count("create", key, calls=1)
        created = self._inner.create(key, data)
        if created:
            self._count("create", key, size=memoryview(data).nbytes)
        return created

    def replace(self, key: str, data: Buffer) -> None:
        """See :class:`~ckptstore.backends.protocol.RepairBackend`."""
        self._count("replace", key, calls=1)
        self._inner.replace(key, data)
        self._count("replace", key, size=memoryview(data).nbytes)

    def delete(self, key: str) -> bool:
        """See :class:`~ckptstore.backends.protocol.PruneBackend`."""
        self._count("delete", key, calls=1)
        return self._inner.delete(key)

    def _count(self, operation: str, key: str, *, calls: int = 0, size: int = 0) -> None:
        with self._lock:
            before = self._tallies.get((operation, key), Tally())
            self._tallies[operation, key] = Tally(before.calls + calls, before.bytes + size)

    def _chosen(self, operations: tuple[str, ...], prefix: str) -> tuple[tuple[str, Tally], ...]:
        unknown = set(operations).difference(OPERATIONS)
        if unknown:
            raise ValueError(f"no such operation: {', '.join(sorted(unknown))}")
        with self._lock:
            return tuple(
                (key, tally)
                for (operation, key), tally in self._tallies.items()
                if (not operations or operation in operations) and key.startswith(prefix)
            )
