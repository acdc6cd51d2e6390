"""Where the rows of a catalogue lie: what an SQLite file and a PostgreSQL database have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from sqlalchemy import Connection, Table

WAIT_SECONDS = 10.0
"""How long to wait for other processes."""

POLL_SECONDS = 0.01

Values: TypeAlias = Mapping[str, int | str | None]
"""A row by column."""


class Session(Protocol):
    """An open connection to the tables of one store; of one thread at a time, and of the process that opened it."""

    def reading(self) -> AbstractContextManager[Connection]:
        """One transaction that sees one state of all tables."""
        ...

    def write(self, work: Callable[[Connection], object]) -> None:
        """Do ``work`` in one transaction, and the whole of it again if another process was in the way, for a while."""
        ...

    def add(self, connection: Connection, table: Table, rows: Sequence[Values]) -> None:
        """Add those of the rows (at least one) of whose key there is none yet."""
        ...


class Replacement(Protocol):
    """New tables, beside those that are in use, to be filled and to take their place."""

    @property
    def storage(self) -> Storage:
        """The new tables; there are none until it is opened."""
        ...

    def taking_the_place(self) -> AbstractContextManager[None]:
        """Wait until nobody uses the old tables, and keep everybody from them for the time of the block; at its end the
        new ones are in their place. No session of them is open by then."""
        ...


class Storage(Protocol):
    """The tables of a catalogue, wherever they are. A store is named by its id."""

    @property
    def name(self) -> str:
        """What it is, without any password."""
        ...

    def session(self, store: str) -> AbstractContextManager[Session]:
        """Open the tables; make them if there are none and that is allowed.

        Raises:
            CatalogueError: what is there is no catalogue, or of another version.
        """
        ...

    def replacement(self, store: str) -> AbstractContextManager[Replacement]:
        """What makes the tables anew, whatever is there now; only one process at a time, and others are waited for.

        Left without :meth:`Replacement.taking_the_place`, and after a crash, the old ones are as they were.
        """
        ...

    def explain(self, error: Exception) -> tuple[str, str] | None:
        """Why this error of what is below came about, and what to do next, without any password; None if it is not from
        there."""
        ...


def patiently(work: Callable[[], object], in_the_way: Callable[[Exception], bool]) -> None:
    """Do ``work``, again and again while it fails by an error that says that another process is ``in_the_way``, for a
    while."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            work()
        except Exception as error:
            if not in_the_way(error) or time.monotonic() >= end:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return
