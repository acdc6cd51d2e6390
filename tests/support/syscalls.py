"""The calls by which a directory store changes the disk, to record them or to let each of them go wrong."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

CHANGING = (
    "open",
    "mkdir",
    "write",
    "fchmod",
    "fsync",
    "close",
    "link",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "ftruncate",
)
"""Names in :mod:`os` of all calls that a directory store changes anything with, or depends on to have changed it."""

Around = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]
"""Called with a call's name, its arguments, and the call itself; returns what the caller gets."""


def intercept(monkeypatch: pytest.MonkeyPatch, around: Around, names: tuple[str, ...] = CHANGING) -> None:
    """Pass the calls ``names`` of :mod:`os` through ``around``."""
    for name in names:
        monkeypatch.setattr(os, name, _intercepted(name, getattr(os, name), around))


def _intercepted(name: str, real: Callable[..., Any], around: Around) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return around(name, arguments, lambda: real(*arguments, **options))

    return call


def is_regular(fd: int) -> bool:
    """Whether the descriptor is one of a regular file: only those can fail to be closed."""
    return stat.S_ISREG(os.fstat(fd).st_mode)


def path_of(fd: int) -> Path:
    """The path of an open file or folder (Linux)."""
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


def killed_at(nth: int, *, late: bool, work: Callable[[], object]) -> bool:
    """Do ``work`` in a child that is killed with SIGKILL before (``late``: after) its ``nth`` changing call.

    Returns False if the child came to its end without that many calls.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def around(_name: str, _arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
            nonlocal seen
            seen += 1
            if seen == nth and not late:
                os.kill(os.getpid(), signal.SIGKILL)
            mine = seen == nth
            try:
                return call()
            finally:
                if mine:
                    os.kill(os.getpid(), signal.SIGKILL)

        with suppress(BaseException):
            intercept(pytest.MonkeyPatch(), around)
            work()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the work itself failed"
    return False
