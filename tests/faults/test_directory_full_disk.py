"""Short writes, full disks and failing devices: all bytes land, or none do and the message says why (B034, B051).

Public sources: pytorch/pytorch#717, coreweave/tensorizer#82; bghira/SimpleTuner#2353, pytorch/pytorch#10577,
open-mmlab/mmdetection#12069, facebookresearch/metaseq#53.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends.directory import DirectoryBackend
from ckptstore.backends.durable import write_file_durably
from ckptstore.errors import BackendError, NoSpaceError, ReadOnlyError
from tests.support.syscalls import intercept, is_regular

KEY = "objects/ab/" + "ab" * 32
DATA = bytes(range(256)) * 9000  # three pieces, the last one short

Work = Callable[[DirectoryBackend], object]


@pytest.fixture
def backend(tmp_path: Path) -> DirectoryBackend:
    backend = DirectoryBackend.create_root(tmp_path / "store")
    backend.create("objects/ab/earlier", b"earlier")
    return backend


def test_short_writes_and_reads_are_continued(backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pread, preadv = os.write, os.pread, os.preadv

    def short_preadv(fd: int, rooms: list[memoryview], offset: int) -> int:
        return min(preadv(fd, [rooms[0][:8192]], offset), 5000)  # ends inside a page, where O_DIRECT may not go on

    data = DATA[:100_001]
    monkeypatch.setattr(os, "write", lambda fd, piece: write(fd, piece[:1000]))
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 1000), offset))
    assert backend.create(KEY, data)
    method = backend.readback(KEY)[1]
    monkeypatch.setattr(os, "preadv", short_preadv)
    assert backend.get(KEY) == data
    assert backend.get(KEY, 999, 50_000) == data[999:50_999]
    assert backend.readback(KEY) == (data, method)
    write_file_durably(backend.path.parent / "export", [data[:5000], data[5000:]])
    monkeypatch.undo()
    assert (backend.path.parent / "export").read_bytes() == backend.get(KEY) == data


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda fd, piece: 0)
    with pytest.raises(BackendError, match="EIO"):
        backend.create(KEY, DATA)
    assert backend.stat(KEY) is None


def test_signals_interrupt_nothing(backend: DirectoryBackend) -> None:
    received = 0

    def handler(_number: int, _frame: object) -> None:
        nonlocal received
        received += 1

    before = signal.signal(signal.SIGALRM, handler)
    timer = signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for number in range(12):
            key = f"objects/cd/{number}"
            assert backend.create(key, DATA)
            assert backend.get(key) == DATA
            assert backend.readback(key)[0] == DATA
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
    assert received > 0


def failing_at(nth: int, number: int, name: str) -> Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]:
    """Let the ``nth`` call ``name`` fail with the errno ``number``; a close that fails closes all the same."""
    seen = 0

    def around(_name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal seen
        if name == "close" and not is_regular(arguments[0]):
            return call()
        seen += 1
        if seen == nth:
            if name == "close":
                call()
            raise OSError(number, os.strerror(number))
        return call()

    return around


@pytest.mark.parametrize("work", ["create", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["open", "mkdir", "write", "fchmod", "fsync", "close", "link", "rename"])
def test_whatever_call_fails_the_key_is_absent_or_whole_and_a_retry_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, work: str
) -> None:
    failures = 0
    for nth in count(1):
        backend = DirectoryBackend.create_root(tmp_path / f"{nth}")
        backend.create("a", b"earlier")
        if work == "replace":
            backend.create(KEY, b"bad")
        backend = DirectoryBackend(tmp_path / f"{nth}")
        with monkeypatch.context() as patch:
            intercept(patch, failing_at(nth, number, name), (name,))
            try:
                getattr(backend, work)(KEY, DATA)
            except BackendError as error:
                failed = error
            else:
                break
        failures += 1
        assert type(failed) is (BackendError if number == errno.EIO else NoSpaceError)
        message = str(failed)
        assert errno.errorcode[number] in message
        assert str(backend.path) in message
        assert KEY in message
        if name == "write" and number != errno.EIO:
            assert f"{len(DATA)} bytes needed" in message
        assert os.listdir(backend.path / "tmp") == []
        assert backend.get("a") == b"earlier"
        found = backend.stat(KEY)
        assert (backend.get(KEY) if found else None) in (None, b"bad", DATA)
        if work == "replace":
            backend.replace(KEY, DATA)
        else:
            backend.create(KEY, DATA)
        assert backend.get(KEY) == DATA
    assert failures > 0 or (name, work) in {("rename", "create"), ("link", "replace"), ("mkdir", "replace")}


@pytest.mark.parametrize("name", ["write", "fsync", "close"])
def test_no_failed_write_sync_or_close_is_tried_again(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """F-136."""
    calls = 0

    def around(_name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal calls
        if not is_regular(arguments[0]):
            return call()
        calls += 1
        if name == "close":
            call()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    intercept(monkeypatch, around, (name,))
    with pytest.raises(BackendError, match="EIO"):
        backend.create(KEY, DATA)
    monkeypatch.undo()
    assert calls == 1
    assert backend.stat(KEY) is None
    assert os.listdir(backend.path / "tmp") == []


def test_a_device_that_refuses_early_writeback_fails_the_write(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ckptstore.backends.durable.start_writeback", refuse)
    with pytest.raises(NoSpaceError, match="bytes needed"):
        backend.create(KEY, DATA)
    assert backend.stat(KEY) is None
    assert os.listdir(backend.path / "tmp") == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_system_without_hard_links_is_read_only_and_says_so(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ReadOnlyError, match="no hard links"):
        backend.create(KEY, DATA)
    assert backend.get("objects/ab/earlier") == b"earlier"
    assert os.listdir(backend.path / "tmp") == []
    backend.replace("objects/ab/earlier", b"good")  # a repair needs none
    assert backend.get("objects/ab/earlier") == b"good"


def test_a_file_size_limit_stops_a_write_and_leaves_nothing(backend: DirectoryBackend) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, hard))
    try:
        with pytest.raises(BackendError, match="EFBIG"):
            backend.create(KEY, DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert backend.stat(KEY) is None
    assert os.listdir(backend.path / "tmp") == []
    assert backend.create(KEY, DATA)


MOUNTED = """
import subprocess, sys
from pathlib import Path
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.errors import NoSpaceError, ReadOnlyError

path = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], check=True)
backend = DirectoryBackend.create_root(path / "store")
stored = 0
try:
    while True:
        backend.create(f"objects/ab/{stored}", bytes([stored]) * 700_000)
        stored += 1
except NoSpaceError as error:
    print(error)
assert stored == 5, stored
assert [found.size for found in backend.list("")] == [700_000] * 5
assert list((path / "store" / "tmp").iterdir()) == []
assert all(backend.get(f"objects/ab/{n}") == bytes([n]) * 700_000 for n in range(5))
assert backend.readback("objects/ab/0")[1].value == "cached"  # memory is no medium
assert backend.readback("objects/ab/0")[0] == bytes(700_000)
assert backend.delete("objects/ab/0")
assert backend.create("objects/ab/5", bytes(700_000))

subprocess.run(["mount", "-o", "remount,ro", path], check=True)
backend = DirectoryBackend(path / "store")
assert backend.create("objects/ab/5", b"") is False
for write in (backend.create, backend.replace):
    try:
        write("objects/cd/6", b"data")
        raise SystemExit("written")
    except ReadOnlyError as error:
        print(error)
try:
    backend.delete("objects/ab/5")
    raise SystemExit("deleted")
except ReadOnlyError as error:
    print(error)
assert len(list(backend.list("objects/"))) == 5
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_disk_that_is_really_full_or_really_read_only(tmp_path: Path) -> None:
    private = ["unshare", "--user", "--map-root-user", "--mount"]
    mountable = "mount -t tmpfs none " + str(tmp_path)
    if subprocess.run([*private, "sh", "-c", mountable], capture_output=True).returncode:
        pytest.skip("no private mounts here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*private, sys.executable, "-c", MOUNTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    full, *read_only = done.stdout.splitlines()
    assert "ENOSPC" in full
    assert "700000 bytes needed" in full
    assert str(tmp_path / "store" / "tmp") in full
    assert len(read_only) == 3
    assert all("EROFS" in line for line in read_only)


def test_the_folder_that_may_not_be_written_is_the_one_that_is_named(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails after the temporary was written is not the temporaries' fault."""

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ReadOnlyError, match=r"Permission denied.* at .*/refs/main/0000000000000001") as caught:
        backend.create("refs/main/0000000000000001", b"record")
    assert "/tmp/" not in str(caught.value).replace(str(backend.path), "")
    assert not list(Path(backend.path, "tmp").iterdir())
