"""The run's memory: entries on disk, each durable before anything is done that builds on it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from ckptstore.errors import MalformedError
from trainer.errors import of_system
from trainer.recovery.entries import LINE_LIMIT, Entry, encode, parse
from trainer.workers.events import utc_now


class RunJournal:
    """Appends entries to ``path``; made if it is absent.

    A line that was cut off by its writer's end was never built on, and is removed when the journal is opened. One
    process at a time may write it; the caller sees to that.

    Raises:
        MalformedError: a line that was written whole is no entry.
        BackendError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self.last_time = ""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._load()
            _sync_folder(path.parent)
        except OSError as error:
            raise of_system(error, f"journal {path}") from error

    def append(self, entry: Entry) -> None:
        """Write an entry; it is durable when this returns. BackendError if it cannot be."""
        time = utc_now()
        try:
            view = memoryview(encode(entry, time))
            while view:
                view = view[os.write(self._file, view) :]
            _sync(self._file)
        except OSError as error:
            raise of_system(error, f"journal {self.path}") from error
        self.entries.append(entry)
        self.last_time = time

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _load(self) -> None:
        whole = 0
        with open(self._file, "rb", closefd=False) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE_LIMIT + 1), b""), 1):
                if not line.endswith(b"\n") and len(line) <= LINE_LIMIT:
                    break
                try:
                    self.last_time, entry = parse(line)
                except MalformedError as error:
                    hint = "the journal was changed by something else; train anew in another folder"
                    raise MalformedError(f"{self.path} line {number}", error.why, hint) from None
                self.entries.append(entry)
                whole += len(line)
        os.ftruncate(self._file, whole)


def _sync(descriptor: int) -> None:
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone stops at the disk's cache
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make the name of a new file durable as well."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
