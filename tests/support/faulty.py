"""A backend around a backend that goes wrong on order, to test what stands above backends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from ckptstore.backends.protocol import Buffer, PruneBackend, ReadbackMethod, Stat, Traits

Action = Callable[[str], object]
"""Called with the key (for ``list``: the prefix) that an operation is about."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Rule:
    operation: str
    prefix: str
    nth: int | None  # counted from when the rule was made; None: every call
    action: Action
    late: bool
    seen: int = 0


class FaultyBackend:
    """Passes every call on, except where a rule says otherwise. Without rules it is an ordinary backend.

    Damage is done to what comes out and not to what is stored, as a bad cable or a bad cache does it. Safe for threads.
    """

    def __init__(self, inner: PruneBackend) -> None:
        self._inner = inner
        self._rules: list[_Rule] = []
        self._flipped: dict[str, set[int]] = {}
        self._ends: dict[str, int] = {}
        self._lock = Lock()

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    def before(self, operation: str, action: Action, *, nth: int | None = None, prefix: str = "") -> None:
        """Call ``action`` before the ``nth`` call (1: the next; None: each) of ``operation`` on keys with ``prefix``.

        The action may raise (then the call has no effect), sleep, wait for an event, or change the store behind.
        """
        with self._lock:
            self._rules.append(_Rule(operation, prefix, nth, action, late=False))

    def after(self, operation: str, action: Action, *, nth: int | None = None, prefix: str = "") -> None:
        """The same after the call took effect: an action that raises is a lost answer."""
        with self._lock:
            self._rules.append(_Rule(operation, prefix, nth, action, late=True))

    def fail(
        self,
        operation: str,
        error: BaseException,
        *,
        nth: int | None = None,
        prefix: str = "",
        took_effect: bool = False,
    ) -> None:
        """Raise ``error`` in the ``nth`` call (None: in each) of ``operation`` on keys that start with ``prefix``."""

        def raise_it(_key: str) -> None:
            raise error

        if took_effect:
            self.after(operation, raise_it, nth=nth, prefix=prefix)
        else:
            self.before(operation, raise_it, nth=nth, prefix=prefix)

    def flip_bit(self, key: str, bit: int = 0) -> None:
        """Turn over one bit (bit 0 is the lowest of the first byte) in all that is read of ``key``."""
        with self._lock:
            self._flipped.setdefault(key, set()).symmetric_difference_update({bit})

    def truncate(self, key: str, size: int) -> None:
        """Let reads of ``key`` end after its first ``size`` bytes; its stat stays as it is."""
        with self._lock:
            self._ends[key] = size

    def heal(self) -> None:
        """Forget all rules and all damage."""
        with self._lock:
            self._rules.clear()
            self._flipped.clear()
            self._ends.clear()

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._call("get", key, lambda: self._inner.get(key, offset, length))
        return self._damaged(key, offset, data)

    def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
        data, method = self._call("readback", key, lambda: self._inner.readback(key, length))
        return self._damaged(key, 0, data), method

    def stat(self, key: str) -> Stat | None:
        return self._call("stat", key, lambda: self._inner.stat(key))

    def present(self, keys: Collection[str]) -> set[str]:
        """Asks for one key after the other, so that rules about ``stat`` hold."""
        return {key for key in keys if self.stat(key) is not None}

    def list(self, prefix: str) -> Iterator[Stat]:
        return self._call("list", prefix, lambda: self._inner.list(prefix))

    def create(self, key: str, data: Buffer) -> bool:
        return self._call("create", key, lambda: self._inner.create(key, data))

    def replace(self, key: str, data: Buffer) -> None:
        self._call("replace", key, lambda: self._inner.replace(key, data))

    def delete(self, key: str) -> bool:
        return self._call("delete", key, lambda: self._inner.delete(key))

    def _call(self, operation: str, key: str, call: Callable[[], _T]) -> _T:
        due = self._due(operation, key)
        for rule in due:
            if not rule.late:
                rule.action(key)
        result = call()
        for rule in due:
            if rule.late:
                rule.action(key)
        return result

    def _due(self, operation: str, key: str) -> tuple[_Rule, ...]:
        due = []
        with self._lock:
            for rule in self._rules:
                if rule.operation == operation and key.startswith(rule.prefix):
                    rule.seen += 1
                    if rule.nth in (None, rule.seen):
                        due.append(rule)
        return tuple(due)

    def _damaged(self, key: str, offset: int, data: bytes) -> bytes:
        with self._lock:
            bits = tuple(self._flipped.get(key, ()))
            end = self._ends.get(key)
        changed = bytearray(data)
        for bit in bits:
            if 0 <= bit // 8 - offset < len(changed):
                changed[bit // 8 - offset] ^= 1 << bit % 8
        if end is not None:
            del changed[max(0, end - offset) :]
        return bytes(changed)
