"""The catalogue: a copy in a database of what a store says, for queries.

The store is the truth and the catalogue is an index: nothing is ever decided by it, its failure never fails anything
else, and it can be deleted or rebuilt at any time. Its rows follow from the store's content alone (no times of its own,
no numbering), so a rebuilt one has the same rows as one that was kept up to date.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, delete, except_, select, union

from ckptstore.backends.protocol import ReadBackend
from ckptstore.catalogue import storage, tables
from ckptstore.catalogue.address import storage_of
from ckptstore.catalogue.errors import AGAIN, REBUILD, CatalogueError
from ckptstore.catalogue.inventory import Row, document_rows, receipt_row, receipt_rows, ref_rows
from ckptstore.catalogue.storage import Session, Storage
from ckptstore.errors import CkptStoreError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY, document_key, receipt_key, ref_key
from ckptstore.format.records import RECORD_LIMIT, Receipt
from ckptstore.format.records import Store as StoreHeader
from ckptstore.objects import Objects

_BATCH = 10_000  # rows a statement
_FEW = 8  # documents that are asked for one by one

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
    """The catalogue of one store; use it as a context manager, from one thread at a time.

    It is opened when it is first needed, and made if there is none. A process has one connection at a time: threads
    wait for each other, and nothing open is to be carried over a fork.
    """

    def __init__(self, backend: ReadBackend, storage: Storage) -> None:
        """See :meth:`of`."""
        self._backend = backend
        self._storage = storage
        self._session: Session | None = None
        self._resources = ExitStack()
        self._process = 0

    @staticmethod
    def of(backend: ReadBackend, url: str | None = None) -> Catalogue:
        """The catalogue of the store in ``backend``, which is not opened yet.

        Args:
            backend: where the store is.
            url: an SQLAlchemy URL of a PostgreSQL database, which holds the catalogues of any number of stores, or of
                an SQLite file, which holds one. Without it, ``catalogue.sqlite`` in the store's directory.

        Raises:
            CatalogueError: ``url`` names none, or there is no URL and the store is in no directory.
        """
        return Catalogue(backend, storage_of(backend, url))

    @property
    def name(self) -> str:
        """What it is, without any password."""
        return self._storage.name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        self._session = None
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
                tried.update(wanted)
                for digest in self._there(wanted):
                    self._add(document_rows(objects, digest), unreadable)
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

        The new one takes the old one's place in one step. Processes that use the old one are waited for.
        """
        self.close()
        with (
            self._translated(),
            self._storage.replacement(self._owner()) as new,
            Catalogue(self._backend, new.storage) as catalogue,
        ):
            catalogue.update()
            with new.taking_the_place():
                catalogue.update()  # what came while it was made
                counts = {name: len(rows) for name, rows in catalogue.rows().items()}
                catalogue.close()
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

    def _there(self, wanted: Iterable[str]) -> list[Digest]:
        """Those that may be in the store. Each that is asked for in vain is a request: a partial store lacks many."""
        digests = [Digest.parse(digest) for digest in wanted]
        if not self._backend.traits.network or len(digests) <= _FEW:
            return digests
        present = self._backend.present([document_key(digest) for digest in digests])
        return [digest for digest in digests if document_key(digest) in present]

    def _add(self, rows: Iterable[Row], unreadable: dict[str, str] | None = None) -> None:
        """Add rows that are not there yet, all in one transaction; those of ``unreadable`` are only collected."""
        batches: dict[str, list[dict[str, int | str | None]]] = {}
        for name, values in rows:
            if name != tables.unreadable.name:
                batches.setdefault(name, []).append(values)
            elif unreadable is not None:
                unreadable[str(values["key"])] = str(values["why"])

        def work(connection: Connection) -> None:
            # In the same order by all, who then wait for each other and do not deadlock.
            for name in sorted(batches):
                table = tables.metadata.tables[name]
                key = [column.name for column in table.primary_key]
                ordered = sorted(batches[name], key=lambda row: [row[column] for column in key])
                for start in range(0, len(ordered), _BATCH):
                    self._opened().add(connection, table, ordered[start : start + _BATCH])

        if batches:
            self._opened().write(work)

    def _note_unreadable(self, found: dict[str, str]) -> None:
        with self._reading() as connection:
            before = {row.key: row.why for row in connection.execute(select(tables.unreadable))}

        def work(connection: Connection) -> None:
            connection.execute(delete(tables.unreadable))
            if found:
                rows = [{"key": key, "why": why} for key, why in sorted(found.items())]
                self._opened().add(connection, tables.unreadable, rows)

        if found != before:
            self._opened().write(work)

    # -- opening ------------------------------------------------------------------------------------------------------

    def _reading(self) -> AbstractContextManager[Connection]:
        return self._opened().reading()

    def _opened(self) -> Session:
        if self._session is None:
            self._session = self._open()
        elif self._process != os.getpid():
            raise CatalogueError(f"catalogue {self.name}", "it was opened before a fork", "open it in this process")
        return self._session

    def _open(self) -> Session:
        owner = self._owner()
        with ExitStack() as stack:
            gate = _gate
            if not gate.acquire(timeout=storage.WAIT_SECONDS):
                raise CatalogueError(f"catalogue {self.name}", "another thread of this process uses it", AGAIN)
            stack.callback(gate.release)
            session = stack.enter_context(self._storage.session(owner))
            with session.reading() as connection:
                found = connection.scalar(select(tables.store.c.id))
            if found != owner:
                raise CatalogueError(f"catalogue {self.name}", f"it is of another store ({found!r:.60})", REBUILD)
            self._process = os.getpid()
            self._resources = stack.pop_all()
        return session

    def _owner(self) -> str:
        """The store's id."""
        return StoreHeader.parse(self._backend.get(STORE_KEY, 0, RECORD_LIMIT + 1)).id

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Every error of what is below as a CatalogueError."""
        what = f"catalogue {self.name}"
        try:
            yield
        except CatalogueError:
            raise
        except CkptStoreError as error:
            raise CatalogueError(what, f"{error.what}: {error.why}", error.hint or "see ckpt verify") from error
        except Exception as error:
            explained = self._storage.explain(error)
            if explained is not None:
                # Not chained to what it came from, which may show what it was connected with.
                raise CatalogueError(what, *explained) from None
            if isinstance(error, (OSError, ValueError)):
                raise CatalogueError(what, str(error), REBUILD) from error
            raise
