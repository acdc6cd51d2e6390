"""Work in threads with a bounded number of items in flight, so that memory is bounded too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

S = TypeVar("S")
R = TypeVar("R")


def in_threads(work: Callable[[S], R], items: Iterable[S], threads: int | None = None) -> Iterator[R]:
    """Results of ``work`` over ``items`` in their order, with a bounded number in flight, so that memory is bounded
    too."""
    count = threads or min(4, os.cpu_count() or 1)
    source = iter(items)
    with ThreadPoolExecutor(count) as pool:
        pending = [pool.submit(work, item) for item in islice(source, 2 * count)]
        try:
            while pending:
                yield pending.pop(0).result()
                pending.extend(pool.submit(work, item) for item in islice(source, 1))
        finally:
            for future in pending:
                future.cancel()
