"""A SQLite file: opened, locked and replaced so that no other process, no crash and no file system spoils it."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ckptstore.backends.durable import sync_folder
from ckptstore.backends.libc import filesystem_type
from ckptstore.errors import ConflictError, NotFoundError, ReadOnlyError, RefusedError

T = TypeVar("T")

WAIT_SECONDS = 10.0
"""How long to wait for other processes."""

_POLL_SECONDS = 0.01
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})

# A write-ahead log needs memory that all processes share and locks that hold, which no network file system promises.
# Only where both are known to be there is it used: ext, xfs, btrfs, f2fs, tmpfs, overlayfs, zfs, bcachefs.
_SHARES_MEMORY = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xCA451A4E})

_AGAIN = "try again when the other process is done"


def is_there(path: Path) -> bool:
    """Whether there is a file. RefusedError if there is something else: no link is followed, no pipe opened."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise RefusedError(f"file {path}", "it is not a regular file", "remove it")
    return True


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
    return sqlite3.connect(
        f"{path.as_uri()}?{options}", uri=True, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False
    )


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


def patiently(work: Callable[[], T]) -> T:
    """What ``work`` returns, which is done again from its start while another process is in its way, for a while."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return work()
        except Exception as error:
            if not is_busy(error) or time.monotonic() >= end:
                raise
            time.sleep(_POLL_SECONDS)


def is_busy(error: Exception) -> bool:
    """Whether another connection was in the way; also of an error that wraps SQLite's as its ``orig``."""
    cause = getattr(error, "orig", error)
    return isinstance(cause, sqlite3.Error) and getattr(cause, "sqlite_errorcode", 0) & 0xFF in _BUSY


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Keep the file from being replaced for the time of the block. ConflictError if it is being replaced for long.

    Where no lock can be made nobody can replace the file either, and no lock is needed.
    """
    with _locked(_beside(path, ".lock"), fcntl.LOCK_SH):
        yield


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Be the only process that replaces the file for the time of the block. ConflictError if another one is."""
    with _locked(_beside(path, ".rebuild.lock"), fcntl.LOCK_EX):
        yield


@contextmanager
def unused(path: Path) -> Iterator[None]:
    """Wait until nobody uses the file, and keep everybody from it for the time of the block. ConflictError if somebody
    goes on using it."""
    with _locked(_beside(path, ".lock"), fcntl.LOCK_EX):
        yield


def replace(path: Path, new: Path) -> None:
    """Let the closed database ``new`` take the place of ``path``, durably; only while it is :func:`unused`.

    After a crash there is the old one, none, or the new one, and never one with another's log.
    """
    remove(path)
    with open(new, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
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
        end = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ConflictError(f"lock {path}", "somebody else holds it", _AGAIN) from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)
