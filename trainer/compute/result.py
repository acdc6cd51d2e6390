"""What one update did, as numbers that every worker of a group must have in common. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EXACT = ("loss", "norm", "coef", "denominator", "rate")


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one update did; all but the byte counts and the time is the same on every worker, bit for bit.

    ``loss`` is in nats per unit of token weight, ``norm`` is before clipping, ``coef`` what gradients were multiplied
    by, ``denominator`` the sum of token weights, ``ms`` wall-clock milliseconds, bytes those of boundary tensors of
    this worker.
    """

    update: int
    loss: float
    norm: float
    coef: float
    denominator: float
    rate: float
    sent_bytes: int = field(compare=False)
    received_bytes: int = field(compare=False)
    ms: float = field(compare=False)

    @property
    def exact(self) -> dict[str, str]:
        """The numbers as hexadecimal floats: the form for evidence, without decimal rounding."""
        return {name: float(getattr(self, name)).hex() for name in EXACT}

    def to_plain(self) -> dict[str, Any]:
        """Plain values for an event or a report: ``exact`` decides, and two of its numbers again for people."""
        return {
            "update": self.update,
            "exact": self.exact,
            "loss": self.loss,
            "norm": self.norm,
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "ms": self.ms,
        }
