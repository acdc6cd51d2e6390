"""The lock of a directory store: the kernel knows who lives, whatever clocks and process numbers say.

Writers hold the file ``lock`` shared, a collection holds it alone. The kernel gives a lock back when the last process
that has it open is gone, so that a lock which is free proves that whoever held it has ended. A fork would keep its
parent's locks for as long as the child lives; so a child closes them first, which takes nothing from the parent.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import TracebackType

from ckptstore.backends.durable import storage_errors
from ckptstore.errors import CorruptError

LOCK = "lock"

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MODE = 0o666  # less the umask: whoever may write to the store may lock it
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EIO})

_held: set[int] = set()
_held_lock = Lock()


class StoreLock:
    """A lock that is held until it is closed. ``honoured`` is False where the file system has none to give: then this
    stands for nothing, and leases alone say who lives."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._pid = os.getpid()

    @property
    def honoured(self) -> bool:
        """Whether the kernel keeps others out."""
        return self._fd is not None

    def close(self) -> None:
        """Let go. In a child of the process that took it, nothing happens: its copy was closed when it was forked."""
        fd, self._fd = self._fd, None
        if fd is None or self._pid != os.getpid():
            return
        with _held_lock:
            _held.discard(fd)
        with suppress(OSError):
            os.close(fd)  # and never LOCK_UN, which would unlock every copy

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def lock_folder(path: Path, *, exclusive: bool) -> StoreLock | None:
    """The lock of the store in the folder ``path``; None if somebody else has it now, and that excludes us.

    Raises:
        CorruptError: what lies under its name is no regular file.
        ReadOnlyError, NoSpaceError, BackendError: it cannot be made or opened.
    """
    place = path / LOCK
    with storage_errors(f"locking store {path}", place, needed=0):
        fd = _opened(place)
        if fd is None:
            return StoreLock(None)
        with _held_lock:
            _held.add(fd)
        lock = StoreLock(fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _no_file(place)
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if error.errno in _BUSY:
                return None
            if error.errno in _NO_LOCKS:
                return StoreLock(None)
            raise
        except BaseException:
            lock.close()
            raise
        return lock


def _opened(place: Path) -> int | None:
    """A descriptor of the lock file, made if it is missing. None: there is one that this user may not open at all."""
    try:
        return os.open(place, os.O_RDWR | os.O_CREAT | _OPEN, _MODE)  # over NFS only what is open for writing is locked
    except PermissionError:
        if not os.path.lexists(place):
            raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_file(place) from error
        raise
    try:
        return os.open(place, os.O_RDONLY | _OPEN)
    except PermissionError:
        return None


def _no_file(place: Path) -> CorruptError:
    return CorruptError(f"lock of the store, {place}", "it is not a regular file", "move it out of the store")


def _close_in_child() -> None:
    global _held_lock
    _held_lock = Lock()  # another thread of the parent may have had it
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
