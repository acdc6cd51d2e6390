"""An SQLite file: opened, locked and replaced so that no other process, no crash and no file system spoils it."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, create_engine, event
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from ckptstore.backends.durable import sync_folder
from ckptstore.backends.libc import filesystem_type
from ckptstore.catalogue import storage, tables
from ckptstore.catalogue.errors import AGAIN, REBUILD, CatalogueError
from ckptstore.catalogue.storage import Values
from ckptstore.errors import ConflictError, NotFoundError, ReadOnlyError, RefusedError

_HEADER = 100
"""Length of the header of an SQLite file in bytes."""

_OTHER = "name another file for the catalogue, or remove this one if nobody misses it"

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})

# A write-ahead log needs memory that all processes share and locks that hold, which no network file system promises.
# Only where both are known to be there is it used: ext, xfs, btrfs, f2fs, tmpfs, overlayfs, zfs, bcachefs.
_SHARES_MEMORY = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xCA451A4E})


class SqliteFile:
    """The file at ``path``, of one store; a :class:`~ckptstore.catalogue.storage.Storage`.

    Args:
        path: where it is.
        given: somebody named the file, which may be one of his own; else it lies where only catalogues do.
        scratch: nobody else knows of it, and it is not missed after a crash.
    """

    def __init__(self, path: Path, *, given: bool = False, scratch: bool = False) -> None:
        self.path = path
        self._given = given
        self._scratch = scratch

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    @contextmanager
    def session(self, store: str) -> Iterator[_Session]:
        """See :meth:`Storage.session`. The file cannot be replaced for the time of the block."""
        with _in_use(self.path) if not self._scratch else nullcontext():
            engine = create_engine("sqlite://", creator=lambda: connect(self.path), poolclass=NullPool)
            with engine.connect() as connection:
                session = _Session(connection)
                storage.patiently(lambda: self._prepare(session, store), _is_busy)
                yield session

    @contextmanager
    def replacement(self, store: str) -> Iterator[_Replacement]:
        """See :meth:`Storage.replacement`."""
        new = self.path.with_name(f"{self.path.name}.new")
        if self._given:
            _check_replaceable(self.path)
        with _alone(self.path):
            _remove(new)
            yield _Replacement(self.path, SqliteFile(new, scratch=True))

    def explain(self, error: Exception) -> tuple[str, str] | None:
        """See :meth:`Storage.explain`."""
        if isinstance(error, (SQLAlchemyError, sqlite3.Error)):
            hint = AGAIN if _is_busy(error) else REBUILD
            if self._given and not _is_busy(error):
                with suppress(OSError):
                    hint = REBUILD if _is_replaceable(self.path) else _OTHER
            return str(getattr(error, "orig", error)), hint
        return None

    def _prepare(self, session: _Session, store: str) -> None:
        """Check that the file is a catalogue of this version; make its tables if it is new."""
        writable = is_writable(self.path)
        with session.reading() as connection:
            application, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
            used = connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one()
        new = (application, version, used) == (0, 0, 0) and writable
        if not new:
            if self._given and application != tables.APPLICATION:
                raise _foreign(self.path)
            tables.check(self.name, application, version)
            with session.reading() as connection:
                found = _schema(connection)
            if found != _own_schema():
                names = ", ".join(sorted({name for _, name, _ in found ^ _own_schema()})[:8])
                why = f"its tables are not those of this release: {ascii(names)[1:-1]:.300}"
                raise CatalogueError(f"catalogue {self.name}", why, REBUILD)
        if writable:
            session.set_journal(self.path, scratch=self._scratch)
        if new:
            session.write(lambda connection: _create(connection, store))


class _Session:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begin = "DEFERRED"
        event.listen(connection, "begin", lambda begun: begun.exec_driver_sql(f"BEGIN {self._begin}"))

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        self._begin = "DEFERRED"
        with self._connection.begin():
            yield self._connection

    def write(self, work: Callable[[Connection], object]) -> None:
        """It is a writer's transaction from its first statement. One that begins by reading and writes later fails at
        once if somebody else wrote in between, whatever time-out is set."""

        def attempt() -> None:
            self._begin = "IMMEDIATE"
            with self._connection.begin():
                work(self._connection)

        storage.patiently(attempt, _is_busy)

    def add(self, connection: Connection, table: Table, rows: Sequence[Values]) -> None:
        connection.execute(insert(table).on_conflict_do_nothing(), rows)

    def set_journal(self, path: Path, *, scratch: bool) -> None:
        # Not by way of the engine, which would begin a transaction, in which no journal can be changed.
        raw = self._connection.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        set_journal(raw, path, scratch=scratch)


@dataclass(frozen=True, slots=True)
class _Replacement:
    path: Path
    storage: SqliteFile

    @contextmanager
    def taking_the_place(self) -> Iterator[None]:
        with _unused(self.path):
            yield
            _replace(self.path, self.storage.path)


def is_there(path: Path) -> bool:
    """Whether there is a file. RefusedError if there is something else: no link is followed, no pipe opened."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise RefusedError(f"file {path}", "it is not a regular file", "remove it")
    return True


def _check_replaceable(path: Path) -> None:
    """CatalogueError if the file is none whose place a catalogue may take; NotFoundError if its folder is not there."""
    if not path.parent.is_dir():
        raise NotFoundError(f"folder {path.parent}", "there is no such directory", "make it, or name another place")
    if is_there(path) and not _is_replaceable(path):
        raise _foreign(path)


def _is_replaceable(path: Path) -> bool:
    """Whether a file is a catalogue, or has no content: a process that made one may have died over it.

    What a database says of itself stands in its first 100 bytes (sqlite.org/fileformat.html, 1.3). One of a single page
    has no table.
    """
    with open(path, "rb") as stream:
        head = stream.read(_HEADER)
    application, page = int.from_bytes(head[68:72], "big"), int.from_bytes(head[16:18], "big")
    is_new = application == 0 and path.stat().st_size <= page
    return not head or (head[:16] == b"SQLite format 3\0" and (is_new or application == tables.APPLICATION))


def _foreign(path: Path) -> CatalogueError:
    return CatalogueError(f"catalogue {path}", "it is no catalogue of this program, and stays as it is", _OTHER)


def is_writable(path: Path) -> bool:
    """Whether this process may write the file and beside it, where SQLite keeps its journal."""
    return os.access(path.parent, os.W_OK) and (not is_there(path) or os.access(path, os.W_OK))


def connect(path: Path) -> sqlite3.Connection:
    """A connection that begins transactions only when it is told to; it makes the file if it may and there is none.

    Raises:
        NotFoundError: there is none, and it cannot be made.
        RefusedError: it is not a regular file.
    """
    options = "mode=rwc"
    if not is_writable(path):
        if not is_there(path):
            raise NotFoundError(f"file {path}", "there is none, and its folder cannot be written", "use a copy")
        log = _beside(path, "-wal")
        # Without a log nobody is writing: then it is read as it is, which needs no file beside it.
        options = "mode=ro" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"
    connection = sqlite3.connect(
        f"{path.as_uri()}?{options}",
        uri=True,
        timeout=storage.WAIT_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA trusted_schema=OFF")  # what a file defines runs no function with an effect
    connection.execute("PRAGMA cell_size_check=ON")
    return connection


def set_journal(connection: sqlite3.Connection, path: Path, *, scratch: bool) -> None:
    """A write-ahead log where that is safe, else a rollback journal; for a ``scratch`` file nothing that survives a
    crash.

    Raises:
        RefusedError: SQLite keeps another kind.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        shares = filesystem_type(folder) in _SHARES_MEMORY
    finally:
        os.close(folder)
    mode, synchronous = ("wal", "NORMAL") if shares else ("delete", "FULL")
    if scratch:
        mode, synchronous = "memory", "OFF"
    (actual,) = connection.execute("PRAGMA journal_mode").fetchone()
    if actual != mode:
        (actual,) = connection.execute(f"PRAGMA journal_mode={mode}").fetchone()
    if actual != mode:
        raise RefusedError(f"file {path}", f"its journal stays {actual!r} where {mode!r} is needed")
    connection.execute(f"PRAGMA synchronous={synchronous}")


def _is_busy(error: Exception) -> bool:
    """Whether another connection was in the way; also of an error that wraps SQLite's as its ``orig``."""
    cause = getattr(error, "orig", error)
    return isinstance(cause, sqlite3.Error) and getattr(cause, "sqlite_errorcode", 0) & 0xFF in _BUSY


@contextmanager
def _in_use(path: Path) -> Iterator[None]:
    """Keep the file from being replaced for the time of the block. ConflictError if it is being replaced for long.

    Where no lock can be made nobody can replace the file either, and no lock is needed.
    """
    with _locked(_beside(path, ".lock"), fcntl.LOCK_SH):
        yield


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Be the only process that replaces the file for the time of the block. ConflictError if another one is."""
    with _locked(_beside(path, ".rebuild.lock"), fcntl.LOCK_EX):
        yield


@contextmanager
def _unused(path: Path) -> Iterator[None]:
    """Wait until nobody uses the file, and keep everybody from it for the time of the block. ConflictError if somebody
    goes on using it."""
    with _locked(_beside(path, ".lock"), fcntl.LOCK_EX):
        yield


def _replace(path: Path, new: Path) -> None:
    """Let the closed database ``new`` take the place of ``path``, durably; only while it is :func:`_unused`.

    After a crash there is the old one, none, or the new one, and never one with another's log.
    """
    _remove(path)
    with open(new, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def _remove(path: Path) -> None:
    """Remove a database with what lies beside it; first the file itself, without which the rest means nothing."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        _beside(path, suffix).unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@contextmanager
def _locked(path: Path, mode: int) -> Iterator[None]:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        if mode == fcntl.LOCK_EX:
            raise ReadOnlyError(f"file {path}", f"{error.strerror}", "do this where the store can be written") from None
        try:
            descriptor = os.open(path, os.O_RDONLY | flags)
        except OSError:
            yield
            return
    try:
        end = time.monotonic() + storage.WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ConflictError(f"lock {path}", "somebody else holds it", AGAIN) from None
                time.sleep(storage.POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _create(connection: Connection, store: str) -> None:
    """Make the tables, unless another process has just done so."""
    if _pragma(connection, "application_id") == tables.APPLICATION:
        return
    tables.create(connection, store)
    connection.exec_driver_sql(f"PRAGMA application_id={tables.APPLICATION}")
    connection.exec_driver_sql(f"PRAGMA user_version={tables.VERSION}")


def _schema(connection: Connection) -> frozenset[tuple[str, str, str]]:
    """(Kind, name, definition) of tables, views, indexes and triggers. One more could change what a query says."""
    rows = connection.exec_driver_sql("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return frozenset((f"{kind}", f"{name}", f"{definition}") for kind, name, definition in rows)


@cache
def _own_schema() -> frozenset[tuple[str, str, str]]:
    """What a catalogue has that was made now."""
    engine = create_engine("sqlite://", poolclass=NullPool)
    with engine.connect() as connection, connection.begin():
        tables.create(connection, "")
        return _schema(connection)


def _pragma(connection: Connection, name: str) -> Any:
    return connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
