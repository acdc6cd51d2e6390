"""A disk that fills up or fails in a whole save or push: what was there stays, and room is all that it takes (B051).

Public sources: bghira/SimpleTuner#2353, pytorch/pytorch#10577, open-mmlab/mmdetection#12069,
facebookresearch/metaseq#53.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import BackendError, CkptStoreError, NoSpaceError, TornRestoreError
from tests.support.invariants import broken, temporaries
from tests.support.syscalls import intercept, is_regular
from tests.support.training import make_training, save_steps

FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """Lets the ``nth`` call go wrong that could fail with the errno ``number``; each once, as a device may."""

    def __init__(self, number: int, nth: int | None = None) -> None:
        self.number, self.nth = number, nth
        self.seen = 0

    def around(self, name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if not self._can_fail(name, arguments):
            return call()
        self.seen += 1
        if self.seen != self.nth:
            return call()
        if name == "close":
            call()  # one that fails closes all the same
        raise OSError(self.number, os.strerror(self.number))

    def _can_fail(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Only what takes room can find none; a temporary that cannot be removed is swept up by the next writer."""
        if name == "unlink":
            return False
        if name == "open":
            return self.number == errno.EIO or bool(arguments[1] & os.O_CREAT)
        if name in ("close", "fsync") and is_regular(arguments[0]):
            return fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        return name != "close"


def failing(disk: Disk) -> pytest.MonkeyPatch:
    patch = pytest.MonkeyPatch()
    intercept(patch, disk.around)
    return patch


def check_message(error: CkptStoreError, number: int, path: Path) -> None:
    message = str(error)
    assert errno.errorcode[number] in message
    assert str(path) in message
    if number in FULL:
        assert type(error) is NoSpaceError
    else:
        assert isinstance(error, BackendError | TornRestoreError)


def save(path: Path, disk: Disk) -> tuple[ckptstore.Digest | None, list[CkptStoreError]]:
    """The next checkpoint, with each call tried twice by one and the same process; what failed in the first tries."""
    training = make_training()
    run = ckptstore.open(path).run("main", **training.objects())
    errors: list[CkptStoreError] = []

    def again(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except CkptStoreError as error:
            errors.append(error)
            return work()

    patch = failing(disk)
    try:
        step = again(run.resume)
        training.step()
        again(lambda: run.save(step + 1, metrics={"loss": 0.5}))
        again(run.close)
    finally:
        patch.undo()
    return run.root, errors


def push(path: Path, disk: Disk) -> tuple[ckptstore.Digest | None, list[CkptStoreError]]:
    """What ``path`` holds as ``main``, sent to a store beside it; tried twice."""
    store, far = ckptstore.open(path), path.with_name("far")
    errors: list[CkptStoreError] = []
    patch = failing(disk)
    try:
        for _ in range(2):
            try:
                ckptstore.push(store, ckptstore.open(far, create=True), store.resolve("main"), ref="main")
                break
            except CkptStoreError as error:
                errors.append(error)
    finally:
        patch.undo()
    return ckptstore.open(far).head("main"), errors


Work = Callable[[Path, Disk], tuple[ckptstore.Digest | None, list[CkptStoreError]]]
WORKS = pytest.mark.parametrize("work", [save, push])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two checkpoints."""
    path = tmp_path_factory.mktemp("disk") / "store"
    save_steps(ckptstore.open(path, create=True), "main", make_training(), 2)
    return path


def check_disk(base: Path, folder: Path, work: Work, number: int, step: int, start: int) -> None:
    """Let every ``step``th call fail, and see that nothing is lost, and that the second try comes to the same."""
    before = ckptstore.open(base).head("main")
    shutil.copytree(base, folder / "whole" / "store")
    whole = Disk(number)
    expected, errors = work(folder / "whole" / "store", whole)
    assert errors == []
    told = 0
    for nth in range(start, whole.seen + 1, step):
        path = folder / f"{nth}" / "store"
        shutil.copytree(base, path)
        root, errors = work(path, Disk(number, nth))
        assert root == expected
        for error in errors:
            check_message(error, number, path.parent)
        told += len(errors)
        for store in path.parent.iterdir():
            assert broken(store) == []
            assert temporaries(store) == []
        assert ckptstore.open(path).verify(before or "main").ok
        shutil.rmtree(path.parent)
    assert told >= (whole.seen - start) // step // 3


@WORKS
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_call_that_fails_costs_a_second_try_and_nothing_else(
    base: Path, tmp_path: Path, work: Work, number: int
) -> None:
    check_disk(base, tmp_path, work, number, 67 if number == errno.EIO else 23, 1 + number % 7)


@pytest.mark.deep
@WORKS
@pytest.mark.parametrize("number", [*FULL, errno.EIO], ids=errno.errorcode.get)
def test_each_call_that_fails_costs_a_second_try_and_nothing_else(
    base: Path, tmp_path: Path, work: Work, number: int
) -> None:
    check_disk(base, tmp_path, work, number, 1, 1)


def test_metrics_that_found_no_room_leave_nothing_committed(base: Path, tmp_path: Path) -> None:
    """They are kept before the ref moves, so a save that failed for them can be done again."""
    shutil.copytree(base, tmp_path / "store")
    store = ckptstore.open(tmp_path / "store")
    before = store.head("main")
    training = make_training()
    with store.run("main", **training.objects()) as run:
        step = run.resume()
        training.step()
        shutil.rmtree(tmp_path / "store" / "receipts")
        (tmp_path / "store" / "receipts").write_bytes(b"")
        with pytest.raises(CkptStoreError, match="receipts"):
            run.save(step + 1, metrics={"loss": 0.5})
        assert store.head("main") == before
        (tmp_path / "store" / "receipts").unlink()
        root = run.save(step + 1, metrics={"loss": 0.5})
    assert [receipt.operation for receipt in store.receipts(root)].count("metrics") == 1


MOUNTED = """
import os, shutil, subprocess, sys
from pathlib import Path
import torch
import ckptstore
from ckptstore.errors import CkptStoreError
from tests.support.invariants import broken, temporaries
from tests.support.training import make_training

torch.set_num_threads(int(sys.argv[4]))
base, place, rooms = Path(sys.argv[1]), Path(sys.argv[2]), map(int, sys.argv[3].split(","))
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], check=True)
for room in rooms:
    path, rest = place / "store", place / "rest"
    shutil.copytree(base, path)
    before = ckptstore.open(path).head("main")
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_bsize
    rest.write_bytes(bytes(free - room))
    training = make_training()
    with ckptstore.open(path).run("main", **training.objects()) as run:
        step = run.resume()
        training.step()
        try:
            run.save(step + 1, metrics={"loss": 0.5})
            print(room, "saved")
        except CkptStoreError as error:
            assert "ENOSPC" in str(error) and str(path) in str(error), error
            assert broken(path) == [] and temporaries(path) == []
            assert ckptstore.open(path).head("main") == before
            rest.unlink()
            run.save(step + 1, metrics={"loss": 0.5})
            print(room, "saved again")
        rest.unlink(missing_ok=True)
    assert broken(path) == [], broken(path)
    with ckptstore.open(path).catalogue() as catalogue:
        catalogue.update()
        assert not catalogue.stale()
    shutil.rmtree(path)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_save_to_a_disk_that_is_really_full(base: Path, tmp_path: Path) -> None:
    """Also the catalogue's own calls find no room, which fails no save."""
    private = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*private, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("no private mounts here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [str(base), str(tmp_path), "0,90000,150000,400000", str(torch.get_num_threads())]
    done = subprocess.run(
        [*private, sys.executable, "-c", MOUNTED, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    outcomes = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert outcomes[0] == "saved again"
    assert outcomes[-1] == "saved"
