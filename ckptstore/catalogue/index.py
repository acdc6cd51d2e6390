"""The catalogue: a SQLite copy of what a directory store says, for queries.

The store is the truth and the catalogue is an index: nothing is ever decided by it, its failure never fails anything
else, and it can be deleted or rebuilt at any time. Its rows follow from the store's content alone (no times of its own,
no numbering), so a rebuilt one has the same rows as one that was kept up to date.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from sqlalchemy import (
    Connection,
    create_engine,
    delete,
    event,
    except_,
    insert,
    select,
    union,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from ckptstore.backends.protocol import ReadBackend
from ckptstore.catalogue import sqlitefile, tables
from ckptstore.catalogue.inventory import Row, document_rows, receipt_row, receipt_rows, ref_rows
from ckptstore.errors import CkptStoreError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY, document_key, receipt_key, ref_key
from ckptstore.format.records import RECORD_LIMIT, Receipt
from ckptstore.format.records import Store as StoreHeader
from ckptstore.objects import Objects

T = TypeVar("T")

NAME = "catalogue.sqlite"
_APPLICATION = 0x636B7074  # "ckpt", in the file's header: no other program's database is taken for a catalogue
_VERSION = 1

_REBUILD = "run ckpt catalogue rebuild; the store itself is not affected"
_AGAIN = "try again when the other process is done; the store itself is not affected"


class CatalogueError(CkptStoreError):
    """The catalogue cannot be used. The store can."""

    code: ClassVar[str] = "catalogue"


_gate = threading.RLock()


def _new_gate() -> None:
    global _gate
    _gate = threading.RLock()


os.register_at_fork(after_in_child=_new_gate)  # a thread that held it is not in the child


@dataclass(frozen=True, slots=True)
class Staleness:
    """Keys by which the catalogue differs from its store, sorted.

    ``missing``: refs, receipts and documents that are in the store and not in the catalogue. ``gone``: those of which
    the catalogue has rows and which are no longer in the store.
    """

    missing: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.gone)


class Catalogue:
    """The catalogue of one directory store; use it as a context manager, from one thread at a time.

    It is opened when it is first needed, and made if there is none. A process has one connection at a time: threads
    wait for each other, and nothing open is to be carried over a fork.
    """

    def __init__(self, backend: ReadBackend, path: Path, *, scratch: bool = False) -> None:
        """See :meth:`of`. ``scratch``: a file that nobody else knows and that is not missed after a crash."""
        self.path = path
        self._backend = backend
        self._scratch = scratch
        self._connection: Connection | None = None
        self._resources = ExitStack()
        self._process = 0
        self._begin = "DEFERRED"

    @staticmethod
    def of(backend: ReadBackend) -> Catalogue:
        """The catalogue of the store in ``backend``. CatalogueError if that is no directory: then the store keeps
        none."""
        path = getattr(backend, "path", None)
        if not isinstance(path, Path):
            raise CatalogueError(f"catalogue of {backend.url}", "only a store in a directory keeps one")
        return Catalogue(backend, path / NAME)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        self._connection = None
        with self._translated():
            self._resources.close()

    def add_checkpoint(self, root: Digest) -> None:
        """Bring everything up to date after ``root`` was committed or arrived.

        Raises:
            CatalogueError: that failed, or there is still no row of ``root``.
        """
        self.update()
        with self._translated(), self._reading() as connection:
            if (
                connection.scalar(select(tables.checkpoints.c.root).where(tables.checkpoints.c.root == str(root)))
                is None
            ):
                why = "no ref and no receipt names it, or its document cannot be read"
                raise CatalogueError(f"checkpoint {root.short} in the catalogue", why, f"run ckpt verify {root.short}")

    def add_receipt(self, digest: Digest, receipt: Receipt) -> None:
        """Add a receipt that was just stored; brings everything up to date if its subject is not in here yet."""
        with self._translated():
            self._add([receipt_row(receipt, digest)])
            with self._reading() as connection:
                known = tables.described.subquery()
                subject = select(known.c[0]).where(known.c[0] == str(receipt.subject))
                unknown = connection.scalar(subject) is None
        if unknown:
            self.update()

    def update(self) -> None:
        """Add what is in the store and not in here: refs, receipts, and every document that they lead to.

        An interrupted update leaves nothing wrong behind; the next one goes on.
        """
        with self._translated():
            backend = self._backend
            objects = Objects(backend)
            unreadable: dict[str, str] = {}
            known = self._records()
            for prefix, rows in (("refs/", ref_rows), ("receipts/", receipt_rows)):
                new = (stat.key for stat in backend.list(prefix) if stat.key not in known)
                self._add((row for key in new for row in rows(backend, key)), unreadable)
            tried: set[str] = set()
            while wanted := sorted(self._wanted() - tried):
                for digest in wanted:
                    self._add(document_rows(objects, Digest.parse(digest)), unreadable)
                tried.update(wanted)
            self._note_unreadable(unreadable)

    def stale(self) -> Staleness:
        """By which keys the catalogue differs from its store; reads names only, no document."""
        with self._translated():
            backend = self._backend
            known = self._records()
            present = {stat.key for prefix in ("refs/", "receipts/", "documents/") for stat in backend.list(prefix)}
            records = {key for key in present if not key.startswith("documents/")}
            wanted = {document_key(Digest.parse(digest)) for digest in self._wanted()}
            with self._reading() as connection:
                unreadable = set(connection.scalars(select(tables.unreadable.c.key)))
                described = union(select(tables.described.subquery().c[0]), select(tables.pages.c.digest))
                documents = {document_key(Digest.parse(digest)) for digest in connection.scalars(described)}
            missing = ((records - known) | (wanted & present)) - unreadable
            return Staleness(tuple(sorted(missing)), tuple(sorted((known | documents) - present)))

    def rows(self) -> dict[str, list[tuple[int | str | None, ...]]]:
        """All rows of all tables by table, sorted."""
        with self._translated(), self._reading() as connection:
            found = {}
            for source in (*tables.metadata.sorted_tables, tables.archives):
                rows = [tuple(row) for row in connection.execute(select(source))]
                found[source.name] = sorted(rows, key=lambda row: [(item is not None, item) for item in row])
            return dict(sorted(found.items()))

    def rebuild(self) -> dict[str, int]:
        """Make the catalogue anew from the store, whatever is there now; returns the number of rows by table.

        The new file takes the old one's place in one step. Processes that use the old one are waited for.
        """
        self.close()
        new = self.path.with_name(f"{NAME}.new")
        with self._translated(), sqlitefile.alone(self.path):
            sqlitefile.remove(new)
            with Catalogue(self._backend, new, scratch=True) as catalogue:
                catalogue.update()
                with sqlitefile.unused(self.path):
                    catalogue.update()  # what came while it was made
                    counts = {name: len(rows) for name, rows in catalogue.rows().items()}
                    catalogue.close()
                    sqlitefile.replace(self.path, new)
        return counts

    # -- rows -------------------------------------------------------------------------------------------------------

    def _records(self) -> set[str]:
        """Keys of all refs and receipts of which there are rows."""
        with self._reading() as connection:
            refs = connection.execute(select(tables.refs.c.name, tables.refs.c.generation)).all()
            receipts = connection.execute(select(tables.receipts.c.subject, tables.receipts.c.digest)).all()
        keys = {ref_key(name, generation) for name, generation in refs}
        return keys | {receipt_key(Digest.parse(subject), Digest.parse(digest)) for subject, digest in receipts}

    def _wanted(self) -> set[str]:
        """Digests of documents that rows name and of which there is no row."""
        wanted = except_(select(tables.named.subquery().c[0]), select(tables.described.subquery().c[0]))
        with self._reading() as connection:
            return {digest for digest in connection.scalars(wanted) if digest is not None}

    def _add(self, rows: Iterable[Row], unreadable: dict[str, str] | None = None) -> None:
        """Add rows that are not there yet, all in one transaction; those of ``unreadable`` are only collected."""
        batches: dict[str, list[dict[str, int | str | None]]] = {}
        for name, values in rows:
            if name != tables.unreadable.name:
                batches.setdefault(name, []).append(values)
            elif unreadable is not None:
                unreadable[str(values["key"])] = str(values["why"])

        def work(connection: Connection) -> None:
            for name, batch in batches.items():
                connection.execute(insert(tables.metadata.tables[name]).prefix_with("OR IGNORE"), batch)

        if batches:
            self._write(work)

    def _note_unreadable(self, found: dict[str, str]) -> None:
        with self._reading() as connection:
            before = {row.key: row.why for row in connection.execute(select(tables.unreadable))}

        def work(connection: Connection) -> None:
            connection.execute(delete(tables.unreadable))
            if found:
                connection.execute(insert(tables.unreadable), [{"key": k, "why": why} for k, why in found.items()])

        if found != before:
            self._write(work)

    # -- transactions -------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """One transaction that sees one state of all tables."""
        connection = self._opened()
        self._begin = "DEFERRED"
        with connection.begin():
            yield connection

    def _write(self, work: Callable[[Connection], T]) -> T:
        """Do ``work`` in one transaction, and the whole of it again if another process was in the way.

        It is a writer's from its first statement. One that begins by reading and writes later fails at once if
        somebody else wrote in between, whatever time-out is set.
        """
        connection = self._opened()

        def attempt() -> T:
            self._begin = "IMMEDIATE"
            with connection.begin():
                return work(connection)

        return sqlitefile.patiently(attempt)

    def _opened(self) -> Connection:
        if self._connection is None:
            self._connection = self._open()
        elif self._process != os.getpid():
            raise CatalogueError(f"catalogue {self.path}", "it was opened before a fork", "open it in this process")
        return self._connection

    def _open(self) -> Connection:
        with ExitStack() as stack:
            gate = _gate
            if not gate.acquire(timeout=sqlitefile.WAIT_SECONDS):
                raise CatalogueError(f"catalogue {self.path}", "another thread of this process uses it", _AGAIN)
            stack.callback(gate.release)
            if not self._scratch:
                stack.enter_context(sqlitefile.in_use(self.path))
            engine = create_engine("sqlite://", creator=lambda: sqlitefile.connect(self.path), poolclass=NullPool)
            event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(f"BEGIN {self._begin}"))
            connection = engine.connect()
            stack.callback(connection.close)
            self._process = os.getpid()
            self._connection = connection  # for the transactions of preparing it
            try:
                sqlitefile.patiently(lambda: self._prepare(connection))
            finally:
                self._connection = None
            self._resources = stack.pop_all()
        return connection

    def _prepare(self, connection: Connection) -> None:
        """Check that the file is a catalogue of this store and version; make its tables if it is new."""
        what = f"catalogue {self.path}"
        header = StoreHeader.parse(self._backend.get(STORE_KEY, 0, RECORD_LIMIT + 1))
        writable = sqlitefile.is_writable(self.path)
        with self._reading():
            application, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
            used = connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one()
        new = (application, version, used) == (0, 0, 0) and writable
        if not new and application != _APPLICATION:
            raise CatalogueError(what, "it is no catalogue of this program", _REBUILD)
        if not new and version != _VERSION:
            why = f"it is of version {version}; this release has version {_VERSION}"
            raise CatalogueError(what, why, _REBUILD)
        if writable:
            # Not by way of the engine, which would begin a transaction, in which no journal can be changed.
            raw = connection.connection.driver_connection
            assert isinstance(raw, sqlite3.Connection)
            sqlitefile.set_journal(raw, self.path, scratch=self._scratch)
        if new:
            self._write(lambda connection: _create(connection, header.id))
        with self._reading():
            owner = connection.scalar(select(tables.store.c.id))
        if owner != header.id:
            raise CatalogueError(what, f"it is of another store ({owner!r:.60})", _REBUILD)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Every error of what is below as a CatalogueError."""
        what = f"catalogue {self.path}"
        try:
            yield
        except CatalogueError:
            raise
        except (SQLAlchemyError, sqlite3.Error) as error:
            hint = _AGAIN if sqlitefile.is_busy(error) else _REBUILD
            raise CatalogueError(what, str(getattr(error, "orig", error)), hint) from error
        except CkptStoreError as error:
            raise CatalogueError(what, f"{error.what}: {error.why}", error.hint or "see ckpt verify") from error
        except (OSError, ValueError) as error:
            raise CatalogueError(what, str(error), _REBUILD) from error


def _create(connection: Connection, store: str) -> None:
    """Make the tables, unless another process has just done so."""
    if _pragma(connection, "application_id") == _APPLICATION:
        return
    tables.metadata.create_all(connection, checkfirst=False)
    connection.execute(insert(tables.store), {"id": store})
    connection.exec_driver_sql(f"PRAGMA application_id={_APPLICATION}")
    connection.exec_driver_sql(f"PRAGMA user_version={_VERSION}")


def _pragma(connection: Connection, name: str) -> Any:
    return connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
