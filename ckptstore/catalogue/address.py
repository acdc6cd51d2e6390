"""From the URL of a catalogue to where its rows lie."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from ckptstore.backends.protocol import ReadBackend
from ckptstore.catalogue.errors import CatalogueError
from ckptstore.catalogue.postgres import Postgres
from ckptstore.catalogue.sqlitefile import SqliteFile
from ckptstore.catalogue.storage import Storage

NAME = "catalogue.sqlite"

_SUPPORTED = "give an SQLAlchemy URL such as postgresql+psycopg://user@host/database or sqlite:////absolute/path"


def storage_of(backend: ReadBackend, url: str | None) -> Storage:
    """The storage that ``url`` names; without one the file in the store's own directory.

    Raises:
        CatalogueError: ``url`` names none, or there is no URL and the store is in no directory. It does not repeat the
            URL, which may hold a password.
    """
    if url:
        return _named(url)
    path = getattr(backend, "path", None)
    if not isinstance(path, Path):
        hint = "name one with CKPT_CATALOGUE, or make the query in a copy"
        raise CatalogueError(f"catalogue of {backend.url}", "only a store in a directory keeps one of its own", hint)
    return SqliteFile(path / NAME)


def _named(text: str) -> Storage:
    try:
        url = make_url(text)
        kind, _, driver = url.drivername.partition("+")
    except (ArgumentError, ValueError):
        raise CatalogueError("catalogue", "what names it is no URL", _SUPPORTED) from None
    if kind == "postgresql" and driver in ("", "psycopg"):
        return Postgres(url.set(drivername="postgresql+psycopg"))
    if kind == "sqlite" and not driver:
        return SqliteFile(_path_of(url), given=True)
    raise CatalogueError("catalogue", f"{url.drivername!r:.40} is no kind of URL that can be used", _SUPPORTED)


def _path_of(url: URL) -> Path:
    path = url.database or ""
    if url.host or url.query or path in ("", ":memory:") or path.startswith("file:"):
        raise CatalogueError("catalogue", "a URL of SQLite names a file and nothing else", _SUPPORTED)
    return Path(path).absolute()
