"""Remotes: the other stores that a store in a directory knows by name, in ``config.toml`` beside its keys."""

from __future__ import annotations

import fcntl
import os
import re
import stat as modes
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from ckptstore.backends import normalized
from ckptstore.backends.durable import read_range, storage_errors
from ckptstore.backends.folders import Folders
from ckptstore.backends.temporaries import write_local
from ckptstore.errors import ConflictError, MalformedError, NotFoundError, RefusedError, UsageError
from ckptstore.format.keys import is_ref_name
from ckptstore.opening import open_store
from ckptstore.store import Store
from ckptstore.toml import parse_toml

CONFIG = "config.toml"

_LOCK = "config.lock"  # a file of its own, never removed: the other one is replaced whole
_LIMIT = 2**18
_WAIT_SECONDS = 10.0  # a change takes milliseconds; who holds the lock longer was stopped in the middle of one
_POLL_SECONDS = 0.02
_FIX = "mend the file, or remove it and add the remotes again"


def known_remotes(store: Store) -> dict[str, str]:
    """URL by name of the remotes that ``store`` knows, sorted by name.

    Raises:
        RefusedError: the store is in no directory and so keeps none.
        MalformedError: ``config.toml`` is damaged; names the line where that is known.
    """
    return _urls(_Config.read(_folder(store)))


def remotes_of(store: Store) -> dict[str, str]:
    """As :func:`known_remotes`; empty for a store that keeps none."""
    return known_remotes(store) if isinstance(getattr(store.backend, "path", None), Path) else {}


def add_remote(store: Store, name: str, url: str, *, check: bool = True) -> str:
    """Let ``store`` know the store at ``url`` as ``name``; returns the URL as it is kept.

    The path of a directory is kept as an absolute one. What else stands in ``config.toml`` stays.

    Args:
        store: a store in a directory.
        name: formed like the name of a ref.
        url: a path or a URL without credentials.
        check: open the store at ``url`` first.

    Raises:
        UsageError: no name, no URL, or one with credentials, which are not repeated.
        RefusedError: ``store`` keeps no remotes, there is one of that name, or ``url`` leads to ``store`` itself.
        NotFoundError, BackendError: there is no store at ``url``, or it cannot be reached.
    """
    folder = _folder(store)
    kept = _kept_url(_check_name(name), url)
    if normalized(kept) == store.url:
        raise RefusedError(f"remote {name}", f"{store.url} is this store itself", "give the URL of another store")
    if check:
        _check_other(store, name, kept)
    with _locked(folder):
        config = _Config.read(folder)
        if name in config.tables():
            why = f"there is one of that name in {folder / CONFIG}"
            raise RefusedError(f"remote {name}", why, f"ckpt remote remove {name} first, or choose another name")
        config.add(name, kept)
    return kept


def remove_remote(store: Store, name: str) -> None:
    """Forget the remote ``name``. Nothing is changed at the other store.

    Raises:
        NotFoundError: there is none.
        RefusedError, MalformedError: as :func:`known_remotes`.
    """
    folder = _folder(store)
    with _locked(folder):
        config = _Config.read(folder)
        if name not in config.tables():
            raise NotFoundError(f"remote {name:.80}", f"no such remote in {folder / CONFIG}", _listed(config.tables()))
        config.remove(name)


def open_remote(store: Store, name_or_url: str, *, create: bool = False) -> Store:
    """The store that ``store`` knows as this remote, else the one at this URL.

    Args:
        store: what knows the remotes; one that keeps none knows none.
        name_or_url: a remote's name wins over a relative path of the same name, if there is such a remote.
        create: make the store if there is none.

    Raises:
        NotFoundError: there is neither a remote of that name nor a store at that place.
        MalformedError: it could be a name, and ``config.toml`` is damaged.
    """
    known = remotes_of(store) if is_ref_name(name_or_url) else {}
    if name_or_url in known:
        return open_store(known[name_or_url], create=create)
    try:
        return open_store(name_or_url, create=create)
    except NotFoundError as error:
        if not is_ref_name(name_or_url):
            raise
        why = f"no remote of {store.url} has that name, and {error.what} is none: {error.why}"
        raise NotFoundError(f"remote {name_or_url}", why, _listed(known)) from None


class _Config:
    """The file as text and as values; every change is written whole, durably, at once."""

    def __init__(self, path: Path, text: str, values: dict[str, Any], mode: int) -> None:
        self._path = path
        self._text = text
        self._values = values
        self._mode = mode

    @classmethod
    def read(cls, folder: Path) -> _Config:
        """The file in ``folder``, empty if there is none. MalformedError if it is damaged."""
        path = folder / CONFIG
        found = _read(path)
        if found is None:
            return cls(path, "", {}, 0o644)
        data, mode = found
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise MalformedError(f"{path}, line {line}", "not UTF-8", _FIX) from None
        return cls(path, text, parse_toml(text, f"{path}", _FIX), mode)

    def tables(self) -> dict[str, dict[str, Any]]:
        """The table of each remote, whatever is in it."""
        found = self._values.get("remotes", {})
        if not isinstance(found, dict):
            raise self._malformed("remotes", "it is no table of remotes")
        for name, table in found.items():
            if not isinstance(table, dict):
                raise self._malformed(name, f"remote {name!r:.80} is no table")
        return found

    def url(self, name: str) -> str:
        """The URL of a remote, checked."""
        url = self.tables()[name].get("url")
        if not isinstance(url, str):
            raise self._malformed(name, f"remote {name!r:.80} has no url")
        if not is_ref_name(name):
            raise self._malformed(name, f"remote {name!r:.80} is not named like a ref")
        try:
            normalized(url)
        except (UsageError, RefusedError) as error:
            raise self._malformed(name, f"remote {name}: {error.why}") from None
        return url

    def add(self, name: str, url: str) -> None:
        """Write the file with one remote more; it is appended, so that comments stay."""
        values = {**self._values, "remotes": {**self.tables(), name: {"url": url}}}
        end = "" if not self._text else "\n" if self._text.endswith("\n") else "\n\n"
        self._write(f"{self._text}{end}{tomli_w.dumps({'remotes': {name: {'url': url}}})}", values)

    def remove(self, name: str) -> None:
        """Write the file without a remote; its lines are cut out, so that comments elsewhere stay."""
        rest = {other: table for other, table in self.tables().items() if other != name}
        values = {**self._values, "remotes": rest}
        if not rest:
            del values["remotes"]
        key = re.escape(name)
        table = re.compile(
            rf"""^[ \t]*\[[ \t]*remotes[ \t]*\.[ \t]*(["']?){key}\1[ \t]*\].*\n(?:(?![ \t]*\[).*\n)*""", re.M
        )
        text, times = table.subn(_comments_at_the_end, self._text if self._text.endswith("\n") else f"{self._text}\n")
        text = text.strip("\n")
        self._write(f"{text}\n" if text and times == 1 else "", values)

    def _write(self, text: str, values: dict[str, Any]) -> None:
        """Write ``text`` if it says ``values``, else, where people have put the tables otherwise, ``values`` alone."""
        try:
            same = parse_toml(text, f"{self._path}", _FIX) == values
        except MalformedError:
            same = False
        data = (text if same else tomli_w.dumps(values)).encode()
        write_local(Folders(self._path.parent), CONFIG, data, mode=self._mode)

    def _malformed(self, name: str, why: str) -> MalformedError:
        lines = [number for number, line in enumerate(self._text.splitlines(), 1) if name in line.partition("#")[0]]
        return MalformedError(f"{self._path}{f', line {lines[0]}' if lines else ''}", why, _FIX)


def _comments_at_the_end(table: re.Match[str]) -> str:
    """What stands between the last value of a table and the next one belongs to that."""
    lines = table[0].splitlines(keepends=True)
    while lines and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        lines.pop()
    return table[0][len("".join(lines)) :]


def _read(path: Path) -> tuple[bytes, int] | None:
    """The bytes of a configuration and the mode of its file, None if there is none."""
    with storage_errors(f"reading {path}", path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(fd)
            if not modes.S_ISREG(found.st_mode):
                raise MalformedError(f"{path}", "it is not a regular file", _FIX)
            data = read_range(fd, 0, _LIMIT + 1)
        finally:
            os.close(fd)
    if len(data) > _LIMIT:
        raise MalformedError(f"{path}", f"longer than {_LIMIT:,} bytes", _FIX)
    return data, modes.S_IMODE(found.st_mode)


def _urls(config: _Config) -> dict[str, str]:
    return {name: config.url(name) for name in sorted(config.tables())}


def _kept_url(name: str, url: str) -> str:
    """``url`` as it stands in the file: not depending on where one is, and without a credential."""
    try:
        found = normalized(url)
    except (UsageError, RefusedError) as error:
        raise type(error)(f"remote {name}", f"{error.what}: {error.why}", error.hint) from None
    if found.startswith("memory:"):
        raise UsageError(f"remote {name}", "a store in memory is gone with its process", "give a directory or a bucket")
    kept = found if "://" in url else os.path.abspath(url)
    try:
        kept.encode()
    except UnicodeEncodeError:
        raise UsageError(f"remote {name}", "its path is not UTF-8, as the file is", f"give it as {found}") from None
    return kept


def _check_other(store: Store, name: str, url: str) -> None:
    """NotFoundError if there is no store at ``url``, RefusedError if it is ``store``, reached another way."""
    try:
        other = open_store(url)
    except NotFoundError as error:
        hint = "make one there with ckpt init first, or add it with --no-check"
        raise NotFoundError(f"remote {name}", f"{error.what}: {error.why}", hint) from None
    if other.id == store.id:
        why = f"{other.url} has the id of {store.url}: it is this store itself, or a plain copy of its files"
        raise RefusedError(f"remote {name}", why, "make a store there with ckpt init, and push to it")


def _check_name(name: str) -> str:
    if not is_ref_name(name):
        why = "a remote is named like a ref: [a-z0-9][a-z0-9._-]{0,63} and not a hex number of 4 digits or more"
        raise UsageError(f"remote {name!r:.80}", why, "choose another name")
    return name


def _listed(names: dict[str, Any]) -> str:
    return f"remotes: {', '.join(sorted(names)) or 'none'}; ckpt remote add makes one known"


def _folder(store: Store) -> Path:
    path = getattr(store.backend, "path", None)
    if not isinstance(path, Path):
        why = "only a store in a directory keeps remotes"
        raise RefusedError(f"remotes of {store.url}", why, "give the URL itself, or work from a store in a directory")
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else changes the remotes meanwhile. ConflictError if somebody else holds the lock for long."""
    path = folder / _LOCK
    with storage_errors(f"changing {folder / CONFIG}", path, needed=0):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with storage_errors(f"changing {folder / CONFIG}", path):
            _wait_for(fd, path)
        yield
    finally:
        with suppress(OSError):  # nothing was written there
            os.close(fd)


def _wait_for(fd: int, path: Path) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                why = f"another process has held {path} for {_WAIT_SECONDS:g} s"
                raise ConflictError("changing the remotes", why, "find out whether it hangs, and try again") from None
        time.sleep(_POLL_SECONDS)
