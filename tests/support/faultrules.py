"""When the fault proxy takes which action, and its log."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.support.faultactions import Action
from tests.support.http1 import Request


@dataclass
class Rule:
    """When an action is taken: on requests of ``method`` in whose target ``path`` is found and that ``when`` accepts.

    Of those the first ``skip`` are left alone, then ``times`` are taken (None: all), each with ``probability`` as drawn
    from ``seed``. ``hits`` counts those taken.
    """

    action: Action
    method: str | None = None
    path: str = ""
    when: Callable[[Request], bool] = lambda request: True
    skip: int = 0
    times: int | None = None
    probability: float = 1.0
    seed: int = 0
    hits: int = 0
    _draw: Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._draw = Random(self.seed)

    def takes(self, request: Request) -> bool:
        """Whether the action is taken on ``request``; counts it."""
        if self.method not in (None, request.method) or not re.search(self.path, request.target):
            return False
        if (self.times is not None and self.hits >= self.times) or not self.when(request):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self._draw.random() >= self.probability:
            return False
        self.hits += 1
        return True


@dataclass
class Exchange:
    """One request that came to the proxy, and what became of it."""

    method: str
    target: str
    faults: tuple[str, ...]
    """Names of the actions taken on it."""
    status: int | None = None
    """Status that the client got; None while there is none or if it got no answer."""
    request_bytes: int = 0
    """Size of the request's body, as far as it was read."""
    response_bytes: int = 0
    """Size of the answer's body that was handed to the client's connection."""
    under_way: bool = True
    """Whether it is still being read, served or answered."""
