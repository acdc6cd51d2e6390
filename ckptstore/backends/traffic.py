"""What goes over a wire: requests by operation, and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests by operation (each attempt counts), and bytes of bodies sent and received."""

    requests: Mapping[str, int]
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def total(self) -> int:
        """All requests."""
        return sum(self.requests.values())

    def since(self, before: Traffic) -> Traffic:
        """What came after ``before``."""
        names = {name: count - before.requests.get(name, 0) for name, count in self.requests.items()}
        return Traffic(
            MappingProxyType({name: count for name, count in names.items() if count}),
            self.sent_bytes - before.sent_bytes,
            self.received_bytes - before.received_bytes,
        )


class TrafficMeter:
    """Counts traffic; safe for threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests: Counter[str] = Counter()
        self._sent = 0
        self._received = 0

    def request(self, operation: str, sent: int) -> None:
        """One attempt at an operation goes out."""
        with self._lock:
            self._requests[operation] += 1
            self._sent += sent

    def received(self, size: int) -> None:
        """Bytes of a body came in."""
        with self._lock:
            self._received += size

    @property
    def traffic(self) -> Traffic:
        """All of it so far."""
        with self._lock:
            return Traffic(MappingProxyType(dict(sorted(self._requests.items()))), self._sent, self._received)
