"""Keeping a worker inside its host's folder: an audit hook that refuses to open anything of the run outside it.

Several hosts share one machine, and with it one file system. The hook sees what Python code opens, lists, makes, moves
or removes, and it refuses other processes, which would have no hook. It does not see what native code opens by itself
(``torch.save``, the safetensors library, SQLite's ATTACH) nor paths that are relative to a descriptor, so it is a guard
against mistakes and no sandbox.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ckptstore.errors import RefusedError

# Audit events whose arguments at these positions are paths. https://docs.python.org/3/library/audit_events.html
_PATHS = {
    "open": (0,),
    "os.chdir": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.getxattr": (0,),
    "os.link": (0, 1),
    "os.listdir": (0,),
    "os.listxattr": (0,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.removexattr": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.scandir": (0,),
    "os.setxattr": (0,),
    "os.symlink": (0, 1),
    "os.truncate": (0,),
    "os.utime": (0,),
    "shutil.rmtree": (0,),
    "sqlite3.connect": (0,),
}
_PROCESSES = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen")


class IsolationError(RefusedError):
    """A worker reached for a file of the run that is not its host's, or for a process that could."""

    code = "isolation"


class Fence:
    """What is allowed: everything outside ``area``, and inside it only what lies below one of ``allowed``."""

    def __init__(self, area: Path, allowed: Iterable[Path]) -> None:
        self.area = os.path.realpath(area)
        self.allowed = tuple(os.path.realpath(path) for path in allowed)

    def check(self, path: str | bytes | os.PathLike[str]) -> None:
        """Raise IsolationError if ``path``, with all links followed, is out of bounds."""
        real = os.path.realpath(os.fsdecode(path))
        if _below(real, self.area) and not any(_below(real, inside) for inside in self.allowed):
            why = "it belongs to the run, but to another host"
            raise IsolationError(f"path {real}", why, f"a worker of this host uses {', '.join(self.allowed)} only")

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook. Descriptors are let through: to get one of a place out of bounds, it had to be opened."""
        if event in _PROCESSES:
            raise IsolationError(event, "a process that a worker starts would have no fence")
        for position in _PATHS.get(event, ()):
            path = arguments[position] if position < len(arguments) else None
            if isinstance(path, str) and path.startswith("file:") and event == "sqlite3.connect":
                path = unquote(urlsplit(path).path)
            if isinstance(path, str | bytes | os.PathLike):
                self.check(path)


def install(area: Path, allowed: Iterable[Path]) -> None:
    """Put up the fence for the rest of this process's life; it cannot be taken down again."""
    sys.addaudithook(Fence(area, allowed).hook)


def holds(area: Path) -> bool:
    """Whether this process has a fence around ``area``: found out by trying to look into it."""
    try:
        os.listdir(area)
    except IsolationError:
        return True
    return False


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
