"""Files that are whole and on the device before they have a name.

The order is always the same: write a temporary, fsync it, close it, give it its name, fsync the folder. An error in any
of the first three discards the temporary, and an fsync that failed is never tried again: the kernel may have dropped
the pages that it could not write, and would then report success over bytes that are gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptstore.backends.beside import temporary_beside
from ckptstore.backends.libc import start_writeback
from ckptstore.backends.protocol import Buffer
from ckptstore.errors import BackendError, NoSpaceError, ReadOnlyError, RefusedError

PIECE = 1 << 20
"""Bytes written before their writeback is started."""

NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""What link(2) says on a file system without hard links, for a source that is ours."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_CHECK = "check the device and the mount (dmesg), then run it again"
_OPEN_FILES = "close files or raise the limit (ulimit -n, fs.file-max), then run it again"
_HINTS = {
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: _OPEN_FILES,
    errno.ENAMETOOLONG: "put it where the path is shorter",
    errno.ESTALE: "the server of this mount has another file system there now: mount it again",
    errno.EXDEV: "all folders of a store, tmp too, have to be on one file system",
    errno.EACCES: "check the owner and the mode of the files and folders on the way",
}
_READ_PIECE = 64 << 20
_FULL_FSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: its fsync stops at the drive's cache


@contextmanager
def storage_errors(what: str, path: str | os.PathLike[str], *, needed: int | None = None) -> Iterator[None]:
    """Raise an OSError of the block as an error of ours that names ``what``, the errno and ``path``.

    ``needed`` is the number of bytes that were to be written (0 for names alone); None says that the block only reads.

    Raises:
        NoSpaceError: the device or the quota is full.
        ReadOnlyError: writing is not allowed.
        BackendError: everything else.
    """
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        why = f"{errno.errorcode.get(number, 'error')} ({error.strerror or error}) at {os.fspath(path)}"
        if needed is not None and number in _FULL:
            why = f"{why}, {needed} bytes needed" if needed else why
            hint = "free space or raise the quota and run it again: what is stored already is kept and used"
            raise NoSpaceError(what, why, hint) from error
        if needed is not None and number in _NOT_WRITABLE:
            hint = "check the owner and the mode of the folder and how it is mounted; reading works without"
            raise ReadOnlyError(what, why, hint) from error
        raise BackendError(what, why, _HINTS.get(number, _CHECK)) from error


def sync(fd: int) -> None:
    """Return when everything written to the file or the folder ``fd`` is on the device."""
    if _FULL_FSYNC is not None:
        fcntl.fcntl(fd, _FULL_FSYNC)
    else:
        os.fsync(fd)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in the folder ``path`` durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(fd)
    finally:
        os.close(fd)


def make_folders(path: str | os.PathLike[str]) -> None:
    """Make the folder ``path`` and those above it that are missing, durably: each new name is synced in its parent.

    Raises OSError; FileExistsError if ``path`` is something else than a folder.
    """
    folder = Path(os.path.abspath(path))
    missing: list[Path] = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        with suppress(FileExistsError):  # somebody else was faster; their sync of the parent may be still to come
            os.mkdir(folder)
        if not folder.is_dir():
            raise FileExistsError(errno.EEXIST, "not a folder", str(folder))
        sync_folder(folder.parent)


def write_all(fd: int, data: Buffer, offset: int = 0) -> int:
    """Write all of ``data`` at the file position, which is ``offset``, and start its writeback. Returns the new offset.

    A write that takes less than it was given is continued. Raises OSError.
    """
    rest = memoryview(data).cast("B")
    while rest:
        piece = rest[:PIECE]
        start = offset
        while piece:
            taken = os.write(fd, piece)
            if taken <= 0:
                raise OSError(errno.EIO, "the write took no bytes")
            piece = piece[taken:]
            offset += taken
        start_writeback(fd, start, offset - start)
        rest = rest[offset - start :]
    return offset


def read_range(fd: int, start: int, stop: int) -> bytes:
    """Bytes ``[start, stop)`` of ``fd``, fewer if the file ends before; short reads are continued. Raises OSError."""
    pieces: list[bytes] = []
    while start < stop:
        piece = os.pread(fd, min(stop - start, _READ_PIECE), start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write_temporary(
    what: str, path: str | os.PathLike[str], pieces: Iterable[Buffer], *, mode: int, folder_fd: int | None = None
) -> int:
    """Write ``pieces`` to the new file ``path``, sync and close it. Returns its size in bytes.

    The file is made in the open folder ``folder_fd`` if that is given, else where ``path`` says. It has ``mode`` and is
    on the device when this returns; after any error it is gone.

    Raises:
        NoSpaceError, ReadOnlyError, BackendError: ``what`` failed; and whatever ``pieces`` raises.
    """
    name = os.fspath(path) if folder_fd is None else os.path.basename(path)
    size = 0
    with storage_errors(what, path, needed=0):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)
    try:
        try:
            for piece in pieces:
                with storage_errors(what, path, needed=size + memoryview(piece).nbytes):
                    size = write_all(fd, piece, size)
            with storage_errors(what, path, needed=size):
                os.fchmod(fd, mode)
                sync(fd)
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                os.close(fd)
            raise
        with storage_errors(what, path, needed=size):
            os.close(fd)  # network file systems report a full disk or quota here
    except BaseException:
        discard(name, folder_fd=folder_fd)
        raise
    return size


def discard(name: str, *, folder_fd: int | None = None) -> None:
    """Remove a temporary. A failure is not reported: a stale temporary is invisible, and swept up later."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder_fd)


def write_file_durably(
    path: str | os.PathLike[str], pieces: Iterable[Buffer], *, mode: int = 0o644, replace: bool = False
) -> int:
    """Write an ordinary file outside a store (an export, a report) so that it is never seen half written.

    The bytes go to a temporary beside ``path``, are synced, and get their name at once; the folder is made if it is
    missing. The file is a copy of its own and shares nothing with a store, so it may be writable. Returns its size in
    bytes.

    Raises:
        RefusedError: ``path`` exists, and ``replace`` is false; it is as it was.
        NoSpaceError, ReadOnlyError, BackendError: it could not be written; ``path`` is as it was.
    """
    target = Path(os.path.abspath(path))
    what = f"writing {target}"
    refusal = RefusedError(what, "it exists already", "choose another name, or remove it first")
    if not replace and os.path.lexists(target):
        raise refusal
    with storage_errors(what, target.parent, needed=0):
        make_folders(target.parent)
    temporary = temporary_beside(target)
    size = write_temporary(what, temporary, pieces, mode=mode)
    try:
        with storage_errors(what, target, needed=size):
            if replace:
                os.replace(temporary, target)
            elif not give_new_name(temporary, target):
                raise refusal
            sync_folder(target.parent)
    finally:
        discard(str(temporary))
    return size


def give_new_name(temporary: Path, target: Path) -> bool:
    """Name ``temporary`` ``target`` too, or return False if that name is taken."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        # FAT and some network mounts: take the name with an empty file of our own, then replace that.
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        os.replace(temporary, target)
    return True
