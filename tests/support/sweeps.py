"""Sweeps over many points that are alike: each call, each request, each cell of a table.

Tests marked ``deep`` try every ``EVERY``-th point, the third if that variable is not set; with ``EVERY=1`` they try
them all. Which point comes first follows from the name of the sweep, so that those of a table do not all leave out the
same ones. An odd number meets both of what takes turns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")

EVERY = int(os.environ.get("EVERY", "3"))


def share(points: Sequence[T], name: str) -> Sequence[T]:
    """The points that a sweep called ``name`` tries: at least one, if there is any."""
    return points[crc32(name.encode()) % min(EVERY, len(points) or 1) :: EVERY]
