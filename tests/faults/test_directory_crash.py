"""A writer that is killed leaves no partial object behind, wherever it was (B050, B053).

Public sources: vllm-project/speculators#739, huggingface/transformers#35580; plur-ai/plur#796,
tinyhumansai/opencompany#1049, daintreehq/daintree#6053, open-mercato/cezar#70.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends.directory import DirectoryBackend
from ckptstore.backends.owners import Liveness, Owner, this_process
from tests.support.backends import quarantined_files
from tests.support.syscalls import intercept, killed_at, path_of

KEY = "objects/ab/" + "ab" * 32
OLD = b"old" * 1000
NEW = b"new" * 500_000  # two pieces

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def temporaries(path: Path) -> list[str]:
    return sorted(os.listdir(path / "tmp")) if (path / "tmp").exists() else []


def crashes(tmp_path: Path, prepare: Callable[[DirectoryBackend], object], late: bool, work: str) -> list[Path]:
    """Stores in which ``work`` (create, replace, delete) on KEY was killed at each of its changing calls in turn."""
    stores = []
    for nth in count(1):
        path = tmp_path / f"{nth}"
        prepare(DirectoryBackend.create_root(path))
        backend = DirectoryBackend(path)
        arguments = (KEY,) if work == "delete" else (KEY, NEW)
        if not killed_at(nth, late=late, work=lambda: getattr(backend, work)(*arguments)):  # noqa: B023 - called at once
            break
        stores.append(path)
    assert len(stores) >= 5
    return stores


@linux
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_create_killed_anywhere_leaves_the_key_absent_or_whole(tmp_path: Path, late: bool) -> None:
    outcomes = set()
    for path in crashes(tmp_path, lambda backend: backend.create("a", b"earlier"), late, "create"):
        backend = DirectoryBackend(path)
        listed = {found.key: found.size for found in backend.list("")}
        assert listed in ({"a": 7}, {"a": 7, KEY: len(NEW)})
        outcomes.add(len(listed))
        if KEY in listed:
            assert backend.get(KEY) == NEW
        left = temporaries(path)
        assert backend.remove_stale_temporaries() == tuple(left)
        assert temporaries(path) == []
        assert backend.create(KEY, NEW) is (KEY not in listed)
        assert backend.get(KEY) == NEW
    assert outcomes == {1, 2}


@linux
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_replace_killed_anywhere_leaves_the_old_or_the_new_bytes(tmp_path: Path, late: bool) -> None:
    outcomes = set()
    for path in crashes(tmp_path, lambda backend: backend.create(KEY, OLD), late, "replace"):
        backend = DirectoryBackend(path)
        data = backend.get(KEY)
        assert data in (OLD, NEW)
        outcomes.add(data)
        if data == NEW:
            assert quarantined_files(backend, KEY) == [OLD]
        backend.replace(KEY, NEW)
        assert backend.get(KEY) == NEW
        assert OLD in quarantined_files(backend, KEY)
    assert outcomes == {OLD, NEW}


@linux
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_delete_killed_anywhere_leaves_the_key_whole_or_absent(tmp_path: Path, late: bool) -> None:
    for path in crashes(tmp_path, lambda backend: backend.create(KEY, OLD), late, "delete"):
        backend = DirectoryBackend(path)
        found = backend.stat(KEY)
        if found is not None:
            assert backend.get(KEY) == OLD
        assert backend.delete(KEY) is (found is not None)


def test_a_process_killed_at_a_random_moment_leaves_only_whole_objects(tmp_path: Path) -> None:
    program = """
import itertools, sys
from ckptstore.backends.directory import DirectoryBackend
backend = DirectoryBackend.create_root(sys.argv[1])
print("ready", flush=True)
for number in itertools.count():
    backend.create(f"objects/ab/{number:064x}", bytes([number % 256]) * (1 << 20))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for round_ in range(3):
        path = tmp_path / f"{round_}"
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, env=environment
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.05 + 0.037 * round_)
            child.send_signal(signal.SIGKILL)
        backend = DirectoryBackend(path)
        for found in backend.list(""):
            assert found.size == 1 << 20
            assert backend.get(found.key) == bytes([int(found.key[-64:], 16) % 256]) * (1 << 20)
        backend.remove_stale_temporaries()
        assert temporaries(path) == []


def test_processes_that_race_for_one_key_have_one_winner(tmp_path: Path) -> None:
    keys = [f"refs/main/{number:016d}" for number in range(40)]
    DirectoryBackend.create_root(tmp_path / "store")
    children = []
    gate, opener = os.pipe()
    for name in ("one", "two"):
        child = os.fork()
        if child == 0:
            try:
                os.close(opener)
                os.read(gate, 1)  # returns in both at once, when the parent closes its end
                backend = DirectoryBackend(tmp_path / "store")
                mine = [key for key in keys if backend.create(key, name.encode() * 1000)]
                (tmp_path / name).write_text("\n".join(mine))
            finally:
                os._exit(0)
        children.append(child)
    os.close(gate)
    os.close(opener)
    for child in children:
        os.waitpid(child, 0)
    won = {name: set((tmp_path / name).read_text().split()) for name in ("one", "two")}
    assert won["one"] | won["two"] == set(keys)
    assert not won["one"] & won["two"]
    backend = DirectoryBackend(tmp_path / "store")
    for name, theirs in won.items():
        assert {backend.get(key) for key in theirs} <= {name.encode() * 1000}


class Disk:
    """What a crash that drops everything unsynced would leave, derived from the calls of a writer (Linux).

    The strictest reading of the rules: a file's bytes are safe after an fsync of it, a name after an fsync of its
    folder, and either may reach the device earlier.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._unsynced: dict[int, int] = {}  # inode -> bytes written since its last fsync
        self._names: dict[Path, set[str]] = {}  # folder -> names in it that are not durable

    def around(self, name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        result = call()
        if name == "write":
            inode = os.fstat(arguments[0]).st_ino
            self._unsynced[inode] = self._unsynced.get(inode, 0) + result
            self.calls.append("write")
        elif name == "fsync":
            path = path_of(arguments[0])
            if path.is_dir():
                self._names.pop(path, None)
                self.calls.append(f"sync {path.name}/")
            else:
                self._unsynced.pop(os.fstat(arguments[0]).st_ino, None)
                self.calls.append("sync file")
        return result

    def named(self, folder: Path, name: str) -> None:
        """``name`` has come to be in ``folder``: what it names must be safe already, for the name may be so at once."""
        path = folder / name
        self._names.setdefault(folder, set()).add(name)
        self.calls.append(f"name {folder.name}/{name[:8]}")
        if path.is_file():
            assert path.stat().st_ino not in self._unsynced, f"{path} has a name before its bytes are safe"

    @property
    def unsafe(self) -> dict[Path, set[str]]:
        return {folder: names for folder, names in self._names.items() if folder.name != "tmp"}


@linux
@pytest.mark.parametrize("work", ["create", "replace"])
def test_bytes_are_synced_before_they_have_a_name_and_the_name_before_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """F-135."""
    disk = Disk()
    link, mkdir, rename = os.link, os.mkdir, os.rename

    def linked(source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool) -> None:
        link(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        disk.named(path_of(dst_dir_fd), name)

    def renamed(source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        rename(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        disk.named(path_of(dst_dir_fd), name)

    def made(name: Any, *arguments: Any, dir_fd: int | None = None) -> None:
        mkdir(name, *arguments, dir_fd=dir_fd)
        above = path_of(dir_fd) if dir_fd is not None else Path(name).parent
        disk.named(above, Path(name).name)

    if work == "replace":
        DirectoryBackend.create_root(tmp_path / "a" / "b").create(KEY, OLD)
    intercept(monkeypatch, disk.around, ("write", "fsync"))
    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "mkdir", made)
    backend = DirectoryBackend.create_root(tmp_path / "a" / "b")
    getattr(backend, work)(KEY, NEW)
    monkeypatch.undo()

    assert disk.unsafe == {}
    end = ["write", "write", "sync file", "name ab/abababab", "sync ab/"]
    if work == "replace":
        end[3:3] = ["name quarantine/objects+", "sync quarantine/"]
    else:
        named = [call for call in disk.calls if call.startswith("name")]
        assert named[:4] == [f"name {tmp_path.name}/a", "name a/b", "name b/objects", "name objects/ab"]
    assert disk.calls[-len(end) :] == end
    assert backend.get(KEY) == NEW


@linux
def test_a_deleted_name_is_synced_away_before_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DirectoryBackend.create_root(tmp_path / "store")
    backend.create(KEY, OLD)
    calls: list[str] = []

    def around(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        calls.append(name if name == "unlink" else f"sync {path_of(arguments[0]).name}/")
        return call()

    intercept(monkeypatch, around, ("unlink", "fsync"))
    assert backend.delete(KEY)
    assert calls == ["unlink", "sync ab/"]


@linux
def test_a_folder_that_another_process_made_is_synced_before_its_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = DirectoryBackend.create_root(tmp_path / "store")
    (tmp_path / "store" / "objects" / "ab").mkdir(parents=True)  # made a moment ago, and synced by nobody
    synced = []

    def around(_name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        synced.append(path_of(arguments[0]).name)
        return call()

    intercept(monkeypatch, around, ("fsync",))
    backend.create(KEY, b"")
    assert {"store", "objects", "ab"} <= set(synced)
    synced.clear()
    assert DirectoryBackend(tmp_path / "store").create(KEY, b"") is False
    assert {"store", "objects", "ab"} <= set(synced)  # "it exists" is as durable as "it is ours"


@linux
def test_temporaries_of_the_living_stay_and_those_of_the_dead_go(tmp_path: Path) -> None:
    backend = DirectoryBackend.create_root(tmp_path / "store")
    assert backend.remove_stale_temporaries() == ()
    backend.create("a", b"")
    folder = tmp_path / "store" / "tmp"
    here = this_process()
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        gone = Owner(here.boot, here.namespace, child.pid, 1)
    names = {
        "alive": f"{here}.0123456789abcdef",
        "gone": f"{gone}.0123456789abcdef",
        "number used again": f"{Owner(here.boot, here.namespace, here.pid, here.started + 1)}.0123456789abcdef",
        "other boot": f"{Owner('f' * 16, here.namespace, 1, 1)}.0123456789abcdef",
        "other boot, long ago": f"{Owner('f' * 16, here.namespace, 2, 1)}.0123456789abcdef",
        "not ours": "notes",
    }
    for name in names.values():
        (folder / name).write_bytes(b"half")
    os.utime(folder / names["other boot, long ago"], (0, 0))
    stale = {names["gone"], names["number used again"], names["other boot, long ago"]}
    assert set(backend.remove_stale_temporaries()) == stale
    assert set(os.listdir(folder)) == set(names.values()) - stale
    assert [found.key for found in backend.list("")] == ["a"]


@linux
def test_an_owner_is_its_text_and_knows_whether_it_runs() -> None:
    here = this_process()
    assert Owner.parse(str(here)) == here
    assert here.liveness() is Liveness.ALIVE
    assert Owner.parse("anything") is None
    assert Owner("0" * 16, 0, here.pid, here.started).liveness() is Liveness.UNKNOWN
    child = os.fork()
    if child == 0:
        os._exit(0)
    while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    assert Owner(here.boot, here.namespace, child, here.started).liveness() is Liveness.DEAD  # a zombie writes no more
    os.waitpid(child, 0)


def test_writers_never_share_a_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DirectoryBackend.create_root(tmp_path / "store")
    names: list[str] = []

    def around(_name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        names.append(arguments[0])
        return call()

    intercept(monkeypatch, around, ("link",))
    for number in range(10):
        backend.create(f"a/{number}", b"")
    assert len(set(names)) == 10
    child = os.fork()
    if child == 0:
        names.clear()
        backend.create("a/child", b"")
        os._exit(0 if str(os.getpid()) in names[0].split("-") else 1)
    assert os.waitpid(child, 0)[1] == 0
