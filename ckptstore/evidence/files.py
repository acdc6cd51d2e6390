"""Local files as evidence needs them: regular files only, links never followed, foreign errors translated."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from blake3 import blake3

from ckptstore.errors import BackendError, NoSpaceError, NotFoundError, ReadOnlyError, RefusedError
from ckptstore.format.digest import Digest

PIECE = 2**20

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn an OSError into the error of ours that it is, about ``what``."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(what, f"{_name(error)} is not there") from error
    except FileExistsError as error:
        raise RefusedError(what, f"{_name(error)} exists already", "nothing is ever overwritten") from error
    except OSError as error:
        why = f"{errno.errorcode.get(error.errno or 0, 'error')} ({error.strerror or error}) at {_name(error)}"
        if error.errno == errno.ELOOP:
            raise RefusedError(what, f"{_name(error)} is a symbolic link", "name the file itself") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(what, why, "free some space or raise the quota, then run it again") from error
        raise (ReadOnlyError if error.errno == errno.EROFS else BackendError)(what, why) from error


def _name(error: OSError) -> str:
    name = error.filename
    return ascii(os.fsdecode(name) if isinstance(name, bytes) else name) if name is not None else "the file"


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading, never waiting for a pipe or device. ``follow`` allows ``path`` to be a link.

    Raises:
        RefusedError: it is something else.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RefusedError(str(path), "not a regular file", "only the bytes of regular files are evidence")
    return os.fdopen(fd, "rb")


def regular_size(path: Path) -> int:
    """Size in bytes of a regular file. Raises as :func:`open_regular`."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def create(path: Path) -> BinaryIO:
    """A new file, open for writing. OSError if the name is taken."""
    return os.fdopen(os.open(path, _NEW, 0o644), "wb")


def sync(file: BinaryIO) -> None:
    """Flush a file to where it is kept."""
    file.flush()
    os.fsync(file.fileno())


def publish(partial: Path, target: Path) -> None:
    """Give a finished file its name, if that is free, durably. OSError if the name is taken."""
    try:
        os.link(partial, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # FAT and some network mounts: take the name with an empty file of our own, then replace that.
        os.close(os.open(target, _NEW, 0o600))
        os.replace(partial, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def copy(file: BinaryIO, size: int, *sinks: Callable[[bytes], object]) -> tuple[int, str, Digest]:
    """Pass up to ``size`` bytes on to ``sinks``, in pieces. Returns how many there were, and their digests."""
    sha, digest = sha256(), blake3()
    left = size
    while left and (piece := file.read(min(left, PIECE))):
        for sink in (sha.update, digest.update, *sinks):
            sink(piece)
        left -= len(piece)
    return size - left, sha.hexdigest(), Digest(digest.digest())


class Below:
    """New regular files below one folder, which is created if it is absent.

    Every step down is taken from the open folder above it and follows no link, so nothing outside is reached whatever
    lies or appears there. Paths are relative and already checked (no empty, ``.`` or ``..`` component).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._top = -1

    def __enter__(self) -> Self:
        with translated(f"folder {self._folder}"):
            with suppress(FileExistsError):
                self._folder.mkdir()
            self._top = self._enter(self._folder, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._top)

    def require_free(self, path: str) -> None:
        """Raise RefusedError if the target exists, or if a folder on the way to it is a link or no folder."""
        with self._about(path), self._parent(path, make=False) as parent:
            if parent is not None:
                with suppress(FileNotFoundError):
                    os.stat(_last(path), dir_fd=parent, follow_symlinks=False)
                    raise RefusedError(f"{self._folder}", f"{path!a} exists already", "unpack into a new folder")

    def create(self, path: str) -> BinaryIO:
        """The new file of mode 0644, open for writing, its folders created. RefusedError as :meth:`require_free`."""
        with self._about(path), self._parent(path, make=True) as parent:
            fd = os.open(_last(path), _NEW, 0o644, dir_fd=parent)
            os.fchmod(fd, 0o644)  # whatever the umask is
            return os.fdopen(fd, "wb")

    def remove(self, path: str) -> None:
        """Remove a file that :meth:`create` made."""
        with self._about(path), self._parent(path, make=False) as parent:
            if parent is not None:
                os.unlink(_last(path), dir_fd=parent)

    @contextmanager
    def _about(self, path: str) -> Iterator[None]:
        with translated(f"{path!a} below {self._folder}"):
            yield

    @contextmanager
    def _parent(self, path: str, *, make: bool) -> Iterator[int | None]:
        """The open folder that ``path`` lies in; None if it is not there and not to be made."""
        here = os.dup(self._top)
        try:
            for part in path.encode().split(b"/")[:-1]:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=here)
                try:
                    inner = self._enter(part, here)
                except FileNotFoundError:
                    yield None
                    return
                os.close(here)
                here = inner
            yield here
        finally:
            os.close(here)

    def _enter(self, name: bytes | Path, above: int | None) -> int:
        try:
            return os.open(name, _FOLDER, dir_fd=above)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                shown = os.fsdecode(name)
                raise RefusedError(
                    f"{self._folder}", f"{shown!a} is a link or no folder", "unpack into a new folder"
                ) from None
            raise


def _last(path: str) -> bytes:
    return path.encode().rpartition(b"/")[2]
