"""Folders below one directory, entered name by name, so that no symbolic link is followed on the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptstore.backends.durable import sync
from ckptstore.errors import BackendError, CorruptError

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_FOLDER = frozenset({errno.ENOTDIR, errno.ELOOP})  # a file, or a symbolic link


class Folders:
    """Opens folders below ``path`` (absolute; itself it may be a link). Holds nothing open; safe for threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._durable: set[str] = set()

    @contextmanager
    def opened(self, parts: tuple[str, ...], *, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder ``parts``.

        With ``make``, missing folders are made, and the name of each on the way is durable in the folder above it.

        Raises:
            FileNotFoundError: the folder is absent, and is not to be made.
            CorruptError: something on the way is a file or a symbolic link.
            BackendError: the directory itself is gone. OSError: everything else.
        """
        try:
            fd = os.open(self.path, _OPEN)
        except FileNotFoundError as error:
            raise BackendError(f"store {self.path}", "the directory is gone", "is it mounted, was it moved?") from error
        try:
            for depth, name in enumerate(parts, 1):
                below = self._enter(fd, name, "/".join(parts[:depth]), make=make)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _enter(self, above: int, name: str, walked: str, *, make: bool) -> int:
        try:
            below = self._open_or_make(above, name, walked, make=make)
        except OSError as error:
            if error.errno not in _NO_FOLDER:
                raise
            raise CorruptError(f"{self.path / walked}", "not a folder", "move it out of the store") from error
        if make and walked not in self._durable:
            # Also if it was there before: whoever made it may not have synced its name yet.
            try:
                sync(above)
            except BaseException:
                os.close(below)
                raise
            self._durable.add(walked)
        return below

    def _open_or_make(self, above: int, name: str, walked: str, *, make: bool) -> int:
        try:
            return os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        self._durable.discard(walked)
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
        return os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=above)
