"""PostgreSQL: one database for the catalogues of many stores, each in a schema of its own, for all hosts that use them.

Every transaction says its own settings, so that it means the same behind a pooler that gives each another connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from sqlalchemy import (
    ARRAY,
    URL,
    BigInteger,
    Column,
    Connection,
    Engine,
    MetaData,
    Table,
    bindparam,
    create_engine,
    event,
    func,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from ckptstore.catalogue import deadline, storage, tables
from ckptstore.catalogue.deadline import Deadline
from ckptstore.catalogue.errors import AGAIN, REBUILD, CatalogueError
from ckptstore.catalogue.storage import Values
from ckptstore.errors import BackendError, RefusedError

# What libpq is told, unless the URL says otherwise: seconds, but for tcp_user_timeout in milliseconds.
_DEFAULTS = {
    "client_encoding": "utf8",
    "connect_timeout": "5",
    "fallback_application_name": "ckptstore",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
_SECRETS = ("password", "sslpassword", "oauth_client_secret")

_READING = "REPEATABLE READ, READ ONLY"
_WRITING = "READ COMMITTED, READ WRITE"

# In each schema, to tell that it is a catalogue. Whoever uses the tables holds a lock on this one.
_mark = Table("catalogue", MetaData(), Column("application", BigInteger), Column("version", BigInteger))

_SERVER = "see that the server runs and that the URL is right; the store itself is not affected"
_RIGHTS = "its role needs the right to do that; the store itself is not affected"

# By SQLSTATE or its class: https://www.postgresql.org/docs/current/errcodes-appendix.html
_IN_THE_WAY = frozenset({"40001", "40P01"})  # a serialization failure, a deadlock
_HINTS = {
    **dict.fromkeys(("40", "55", "57014"), AGAIN),
    **dict.fromkeys(("", "08", "28", "3D", "53", "57"), _SERVER),
    **dict.fromkeys(("25", "42501"), _RIGHTS),
}

_THERE = text(
    "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = :schema), EXISTS (SELECT FROM pg_class JOIN pg_namespace"
    " ON pg_namespace.oid = relnamespace WHERE nspname = :schema AND relname = :mark AND relkind = 'r')"
)
# Views outside the schema that are made of what is in it.
_DEPENDENTS = text(
    "SELECT DISTINCT outside.nspname || '.' || viewed.relname FROM pg_depend"
    " JOIN pg_rewrite ON classid = 'pg_rewrite'::regclass AND pg_rewrite.oid = objid"
    " JOIN pg_class viewed ON viewed.oid = ev_class JOIN pg_namespace outside ON outside.oid = viewed.relnamespace"
    " JOIN pg_class used ON refclassid = 'pg_class'::regclass AND used.oid = refobjid"
    " JOIN pg_namespace inside ON inside.oid = used.relnamespace"
    " WHERE inside.nspname = :schema AND outside.nspname <> :schema ORDER BY 1"
)


class Postgres:
    """A database, reached by psycopg; a :class:`~ckptstore.catalogue.storage.Storage`.

    The tables of a store are in the schema ``ckptstore_<id>``.
    """

    def __init__(self, url: URL, *, new: bool = False) -> None:
        """``new``: not the tables that are in use, but those that are to take their place."""
        self._url = url
        self._new = new

    @property
    def name(self) -> str:
        """The URL without password and options."""
        url = self._url
        return URL.create("postgresql", url.username, None, url.host, url.port, url.database).render_as_string()

    @contextmanager
    def session(self, store: str) -> Iterator[_Session]:
        """See :meth:`Storage.session`. Between its transactions it keeps nobody from anything."""
        with self._connected(store) as session:
            storage.patiently(lambda: self._prepare(session, store), _is_in_the_way)
            yield session

    @contextmanager
    def replacement(self, store: str) -> Iterator[_Replacement]:
        """See :meth:`Storage.replacement`. It is one transaction, from the lock that keeps off others who would do the
        same until the new tables are in their place."""
        new = Postgres(self._url, new=True)
        with self._connected(store) as session, session.transaction(_WRITING) as connection:
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout TO 0")  # filling takes its time
            _lock(connection, "rebuild", session.schema)
            with new._connected(store) as other, other.transaction(_WRITING) as preparing:
                preparing.exec_driver_sql(f'DROP SCHEMA IF EXISTS "{other.schema}" CASCADE')
            yield _Replacement(new, connection, session.schema, other.schema)

    def explain(self, error: Exception) -> tuple[str, str] | None:
        """See :meth:`Storage.explain`."""
        if not isinstance(error, SQLAlchemyError):
            return None
        cause = getattr(error, "orig", None)
        primary = getattr(getattr(cause, "diag", None), "message_primary", None)
        state = _state(error)
        hint = _HINTS.get(state, _HINTS.get(state[:2], REBUILD)) if cause else REBUILD
        return self._without_secrets(str(primary or cause or error)), hint

    @contextmanager
    def _connected(self, store: str) -> Iterator[_Session]:
        with self._connect() as connection:
            yield _Session(connection, f"ckptstore_{store}{'_new' if self._new else ''}")

    def _connect(self) -> Connection:
        what = f"catalogue {self.name}"
        try:
            return _engine(self._url).connect()
        except SQLAlchemyError:
            raise
        except ImportError as error:
            why = f"psycopg cannot be loaded: {' '.join(str(error).split())}"
            raise CatalogueError(what, why, "pip install 'ckptstore[postgres]'") from None
        except Exception as error:  # whatever the driver makes of the options in a URL
            why = self._without_secrets(f"it cannot be connected with: {error}")
            raise CatalogueError(what, why, "see the options in its URL") from None

    def _without_secrets(self, message: str) -> str:
        line = " ".join(message.split())
        for secret in _secrets(self._url):
            line = line.replace(secret, "***")
        return line

    def _prepare(self, session: _Session, store: str) -> None:
        """Check that the schema is a catalogue of this version; make it if there is none."""
        what = f"{self.name}, schema {session.schema}"
        with session.transaction(_READING) as connection:
            encoding = connection.scalar(text("SELECT current_setting('server_encoding')"))
            there, marked = _there(connection, session.schema)
        if encoding != "UTF8":
            raise CatalogueError(f"catalogue {self.name}", f"its encoding is {encoding}", "make a database with UTF8")
        if not there:
            with session.transaction(_WRITING) as connection:
                _create(connection, session.schema, store)
        elif not marked:
            tables.check(what, None, None)
        with session.reading() as connection:
            ((application, version),) = connection.execute(select(_mark.c.application, _mark.c.version)).all()
        tables.check(what, application, version)


class _Session:
    def __init__(self, connection: Connection, schema: str) -> None:
        self.schema = schema
        self._connection = connection
        self._deadline: Deadline = connection.info[Deadline]
        self._deadline.lift()
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.listen(connection, name, lambda *_: self._deadline.put_off())
        event.listen(connection, "after_cursor_execute", lambda *_: self._deadline.lift())

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self.transaction(_READING, whole=True) as connection:
            yield connection

    def write(self, work: Callable[[Connection], object]) -> None:
        def attempt() -> None:
            with self.transaction(_WRITING, whole=True) as connection:
                work(connection)

        storage.patiently(attempt, _is_in_the_way)

    def add(self, connection: Connection, table: Table, rows: Sequence[Values]) -> None:
        # One statement with a list for each column: a statement for each row takes three times as long.
        names = [column.name for column in table.columns]
        lists = (bindparam(column.name, type_=ARRAY(column.type)) for column in table.columns)
        given = select(func.unnest(*lists).table_valued(*names).render_derived())
        statement = insert(table).from_select(names, given).on_conflict_do_nothing()
        connection.execute(statement, {name: [row[name] for row in rows] for name in names})

    @contextmanager
    def transaction(self, mode: str, *, whole: bool = False) -> Iterator[Connection]:
        """``whole``: the tables are there, and are not replaced until it ends."""
        settings = [
            f"SET TRANSACTION ISOLATION LEVEL {mode}",
            f'SET LOCAL search_path TO "{self.schema}"',
            f"SET LOCAL lock_timeout TO {round(storage.WAIT_SECONDS * 1000)}",
        ]
        if whole:
            # A lock of its own statement is no query: the one state that a reader sees is that after it was got.
            settings.append(f"LOCK TABLE {_mark.name} IN ACCESS SHARE MODE")
        if self._connection.invalidated:
            raise BackendError("connection", "it broke", AGAIN)  # another one would have no deadline
        try:
            with self._connection.begin():
                self._connection.exec_driver_sql("; ".join(settings))
                yield self._connection
        except SQLAlchemyError:
            if self._deadline.passed:
                why = f"no answer in {deadline.ANSWER_SECONDS:g} seconds"
                raise BackendError("server", why, _SERVER) from None
            raise
        finally:
            self._deadline.lift()


@dataclass(frozen=True, slots=True)
class _Replacement:
    storage: Postgres
    connection: Connection
    old: str
    new: str

    @contextmanager
    def taking_the_place(self) -> Iterator[None]:
        _lock(self.connection, "create", self.old)  # nobody makes it while there is none
        dependents = self.connection.scalars(_DEPENDENTS, {"schema": self.old}).all()
        if dependents:
            why = f"views hang on it, and would go with the old tables: {', '.join(dependents)}"
            raise RefusedError(f"schema {self.old}", why, "drop them, and make them again afterwards")
        if _there(self.connection, self.old) == (True, True):
            self.connection.exec_driver_sql(f'LOCK TABLE "{self.old}".{_mark.name} IN ACCESS EXCLUSIVE MODE')
        yield
        self.connection.exec_driver_sql(f'DROP SCHEMA IF EXISTS "{self.old}" CASCADE')
        self.connection.exec_driver_sql(f'ALTER SCHEMA "{self.new}" RENAME TO "{self.old}"')


def _create(connection: Connection, schema: str, store: str) -> None:
    """Make the schema and its tables, unless another process has just done so."""
    _lock(connection, "create", schema)
    if _there(connection, schema)[0]:
        return
    connection.exec_driver_sql(f'CREATE SCHEMA "{schema}"')
    tables.create(connection, store)
    _mark.create(connection, checkfirst=False)
    connection.execute(insert(_mark), {"application": tables.APPLICATION, "version": tables.VERSION})


def _there(connection: Connection, schema: str) -> tuple[bool, bool]:
    """Whether there is such a schema, and whether a mark is in it."""
    there, marked = connection.execute(_THERE, {"schema": schema, "mark": _mark.name}).one()
    return there, marked


def _lock(connection: Connection, purpose: str, schema: str) -> None:
    """Be the only transaction that does this, whether the schema is there or not."""
    number = int.from_bytes(sha256(f"ckptstore {purpose} {schema}".encode()).digest()[:8], "big", signed=True)
    connection.execute(select(func.pg_advisory_xact_lock(number)))


def _state(error: Exception) -> str:
    """The SQLSTATE of what the driver said, or nothing."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""


def _is_in_the_way(error: Exception) -> bool:
    return _state(error) in _IN_THE_WAY


@cache
def _engine(url: URL) -> Engine:
    """Asks a server of what kind it is once a process, and not at every commit. It keeps no connection."""
    told = {name: value for name, value in _DEFAULTS.items() if name not in url.query}
    engine = create_engine(
        url.update_query_dict(told),
        connect_args={"prepare_threshold": None},  # a pooler does not know of prepared statements
        use_native_hstore=False,
        hide_parameters=True,
        poolclass=NullPool,
    )

    def watch(connection: Any, record: Any) -> None:
        record.info[Deadline] = Deadline(connection.fileno())

    def end(connection: Any, record: Any) -> None:
        if found := record.info.pop(Deadline, None):
            found.close()

    event.listen(engine, "connect", watch, insert=True)  # before it is asked anything
    event.listen(engine, "close", end)
    return engine


def _secrets(url: URL) -> Iterator[str]:
    """What of a URL must not be shown."""
    for value in (url.password, *(url.query.get(name) for name in _SECRETS)):
        yield from filter(None, [value] if isinstance(value, str) else value or ())
