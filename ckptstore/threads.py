"""Work in threads with a bounded number of items in flight, so that memory is bounded too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from ckptstore.backends.deadline import Scope, check, scope

S = TypeVar("S")
R = TypeVar("R")


def in_threads(work: Callable[[S], R], items: Iterable[S], threads: int | None = None) -> Iterator[R]:
    """Results of ``work`` over ``items`` in their order, ``threads`` at a time and a bounded number in flight.

    If one fails, or nobody takes the results any more, those under way are told to give up.

    Args:
        work: called in the threads.
        items: taken in the caller's thread.
        threads: how many at a time (default: one for each processor, 4 at most).
    """
    count = threads or min(4, os.cpu_count() or 1)
    source = iter(items)
    mine = scope()
    pending: list[Future[R]] = []
    pool = ThreadPoolExecutor(count)
    try:
        pending.extend(_started(pool, mine, work, item) for item in islice(source, 2 * count))
        while pending:
            check("the next object")
            yield pending.pop(0).result()
            pending.extend(_started(pool, mine, work, item) for item in islice(source, 1))
    finally:
        mine.give_up()  # first, or an interrupt would wait for every request that hangs
        pool.shutdown(cancel_futures=True)


def _started(pool: ThreadPoolExecutor, mine: Scope, work: Callable[[S], R], item: S) -> Future[R]:
    """``work`` on its way; where no thread can be had (a limit, or the interpreter is ending), it is done here."""
    try:
        return pool.submit(mine.context().run, work, item)
    except RuntimeError:
        done: Future[R] = Future()
        try:
            done.set_result(mine.context().run(work, item))
        except BaseException as error:
            done.set_exception(error)
        return done
