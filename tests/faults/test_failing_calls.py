"""Every call that an operation makes may fail, in every way that a system has: it is told as an error of ours with the
errno, nothing that was there is lost, and doing it again completes it (B034, B051).

Public sources: pytorch/pytorch#717, coreweave/tensorizer#82; bghira/SimpleTuner#2353, pytorch/pytorch#10577,
open-mmlab/mmdetection#12069, facebookresearch/metaseq#53.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ckptstore
from ckptstore.catalogue import CatalogueError
from ckptstore.errors import CkptStoreError, NoSpaceError
from tests.support import operations
from tests.support.invariants import broken, temporaries
from tests.support.operations import OPERATIONS, STORES, Work
from tests.support.sweeps import share
from tests.support.syscalls import CHANGING, intercept, is_regular

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as on Linux")

LOOKING = ("stat", "lstat", "fstat", "scandir", "listdir", "pread", "preadv", "fstatvfs", "readlink")
"""Calls by which something is read, in :mod:`os`."""

FULL = (errno.ENOSPC, errno.EDQUOT)
WRITING = (*FULL, errno.EROFS)
"""What no call says that only reads."""

ANY = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENAMETOOLONG, errno.ENOMEM)
"""What any call may say. (ENAMETOOLONG only one with a name.)"""

NAMELESS = ("write", "fchmod", "fsync", "close", "ftruncate", "fstat", "pread", "preadv", "fstatvfs")
OPENS = (errno.EMFILE, errno.ENFILE)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with operations.one_thread():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, threads: None) -> Path:
    return operations.prepare(tmp_path_factory.mktemp("failing"))


class System:
    """Lets the ``nth`` call of the library fail with the errno ``number``, if such a call can; each once."""

    def __init__(self, nth: int | None = None, number: int = 0) -> None:
        self.nth, self.number = nth, number
        self.seen = 0
        self.failed: str | None = None

    def around(self, name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if not _is_of_library(sys._getframe(2)) or not self._counts(name, arguments):
            return call()
        self.seen += 1
        if self.seen != self.nth or not can_fail(name, arguments, self.number):
            return call()
        self.failed = name
        if name == "close":
            call()  # one that fails closes all the same
        raise OSError(self.number, os.strerror(self.number))

    @staticmethod
    def _counts(name: str, arguments: tuple[Any, ...]) -> bool:
        return name != "close" or (
            is_regular(arguments[0]) and fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        )


def can_fail(name: str, arguments: tuple[Any, ...], number: int) -> bool:
    """Whether a system may answer the call with this errno."""
    if number in OPENS:
        return name in ("open", "scandir", "listdir")
    if number == errno.ENAMETOOLONG:
        return name not in NAMELESS
    if number == errno.EACCES:
        return name not in NAMELESS and name not in LOOKING
    if number in WRITING:
        if name == "open":
            return bool(arguments[1] & os.O_CREAT)
        return name in CHANGING and (number == errno.EROFS or name not in ("unlink", "rmdir", "fchmod"))
    return True


def _is_of_library(frame: FrameType | None) -> bool:
    """Whether the library made the call, itself or by way of the standard library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/ckptstore/" in file:
            return True
        if "/tests/" in file or "/site-packages/" in file:
            return False
        frame = frame.f_back
    return False


def failing(system: System) -> pytest.MonkeyPatch:
    patch = pytest.MonkeyPatch()
    intercept(patch, system.around, (*CHANGING, *LOOKING))
    return patch


def calls_of(base: Path, folder: Path, work: Work) -> tuple[object, int]:
    """What undisturbed work comes to, and how many calls it makes that may fail."""
    shutil.copytree(base, folder)
    system = System()
    patch = failing(system)
    try:
        came_to = work(folder)
    finally:
        patch.undo()
    shutil.rmtree(folder)
    return came_to, system.seen


def check_call(base: Path, folder: Path, work: Work, expected: object, nth: int, number: int) -> str | None:
    """Let one call fail. Returns its name if it could, and the work told of it."""
    shutil.copytree(base, folder)
    system = System(nth, number)
    patch = failing(system)
    told = None
    try:
        came_to = work(folder)
    except CkptStoreError as error:
        told = error
    finally:
        patch.undo()
    what = f"call {nth} ({system.failed}) failed with {errno.errorcode[number]}"
    if told is None:
        assert came_to == expected, what
    else:
        # The code or the words: a library in between may have dropped one of them.
        assert errno.errorcode[number] in str(told) or os.strerror(number) in str(told), f"{what}: {told}"
        if number in FULL:
            assert isinstance(told, NoSpaceError | CatalogueError), f"{what}: {told}"  # an index has a kind of its own
    stores = [folder / name for name in STORES if (folder / name / "ckptstore.json").exists()]
    for path in stores:
        assert broken(path) == [], what
        assert temporaries(path) == [] or system.failed in ("unlink", "open"), what
    store, before = ckptstore.open(folder / "store"), ckptstore.open(base / "store")
    for ref in before.refs.names():
        assert before.head(ref) in [record.root for record in store.refs.log(ref)], what
    assert work(folder) == expected, what
    for path in [folder / name for name in STORES if (folder / name / "ckptstore.json").exists()]:
        assert broken(path) == [], what
    shutil.rmtree(folder)
    return system.failed if told is not None else None


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on what a sync does, only on what it answers."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_that_fails_is_told_and_costs_a_second_try(base: Path, tmp_path: Path, name: str) -> None:
    work, chance = OPERATIONS[name], random.Random(name)
    expected, calls = calls_of(base, tmp_path / "whole", work)
    for nth in chance.sample(range(1, calls + 1), 2):
        check_call(base, tmp_path / f"{nth}", work, expected, nth, chance.choice((*ANY, *WRITING)))


@pytest.mark.deep
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_call_that_fails_is_told_and_costs_a_second_try(base: Path, tmp_path: Path, name: str) -> None:
    work, numbers = OPERATIONS[name], (*ANY, *WRITING)
    expected, calls = calls_of(base, tmp_path / "whole", work)
    told = 0
    tried = share(range(1, calls + 1), name)
    for at, nth in enumerate(tried):
        number = numbers[at % len(numbers)]
        told += check_call(base, tmp_path / f"{nth}", work, expected, nth, number) is not None
    print(f"\n{name}: {len(tried)} of {calls} calls, {told} failures told")
    assert told > len(tried) // 30


@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("name", OPERATIONS)
def test_short_reads_and_writes_and_signals_change_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A write may take less than it was given, a read may give less than was asked for, and signals may come in
    between at any time."""
    write, pread = os.write, os.pread
    shutil.copytree(base, tmp_path / "whole")
    expected = OPERATIONS[name](tmp_path / "whole")
    monkeypatch.setattr(os, "write", lambda fd, piece: write(fd, piece[:777]))
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 999), offset))
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: None)
    timer = signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        shutil.copytree(base, tmp_path / "short")
        assert OPERATIONS[name](tmp_path / "short") == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
    monkeypatch.undo()
    for store in STORES:
        if (tmp_path / "short" / store).exists():
            assert broken(tmp_path / "short" / store) == []
