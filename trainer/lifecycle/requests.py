"""What a run asks of the operator's server: requests by operation and bytes, by phase and by who asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptstore import Store

CONTROLLER, HOSTS = "controller", "hosts"


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of ``party`` in one phase, each attempt counted, and the bytes of their bodies."""

    phase: str
    party: str
    operations: Mapping[str, int]
    sent_bytes: int
    received_bytes: int


class Ledger:
    """Requests by phase. It stays empty for a store of which nothing is asked over a wire."""

    def __init__(self) -> None:
        self.entries: list[Requests] = []
        self._seen = _Tally()
        self._hosts = _Tally()

    def fetched(self, operations: Mapping[str, int], sent_bytes: int, received_bytes: int) -> None:
        """A process of a host has asked for this in the phase that is not closed yet."""
        self._hosts += _Tally(Counter(operations), sent_bytes, received_bytes)

    def close(self, phase: str, store: Store) -> None:
        """A phase is over: what its hosts asked for, and what this process asked of ``store`` since the last one."""
        traffic = store.traffic
        if traffic is not None:
            now = _Tally(Counter(traffic.requests), traffic.sent_bytes, traffic.received_bytes)
            for party, tally in ((CONTROLLER, now - self._seen), (HOSTS, self._hosts)):
                if tally.operations:
                    self.entries.append(Requests(phase, party, tally.operations, tally.sent, tally.received))
            self._seen = now
        self._hosts = _Tally()


@dataclass(frozen=True, slots=True)
class _Tally:
    operations: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0

    def __add__(self, other: _Tally) -> _Tally:
        return _Tally(self.operations + other.operations, self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: _Tally) -> _Tally:
        return _Tally(self.operations - other.operations, self.sent - other.sent, self.received - other.received)
