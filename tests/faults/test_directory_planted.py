"""What others put into a store's directory is refused by name, never followed, and hangs nothing (B065).

Public sources: treeverse/dvc#1599, #799.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.backends.directory import DirectoryBackend
from ckptstore.backends.durable import write_file_durably
from ckptstore.errors import BackendError, CkptStoreError, CorruptError, NotFoundError, RefusedError, UsageError
from tests.support.backends import quarantined_files, run_without_privilege

NAME = "ab" * 32
KEY = f"objects/ab/{NAME}"


@pytest.fixture
def backend(tmp_path: Path) -> DirectoryBackend:
    backend = DirectoryBackend.create_root(tmp_path / "store")
    backend.create(KEY, b"stored")
    (tmp_path / "outside").write_bytes(b"not yours")
    return backend


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)  # a socket's path may be too long otherwise
        try:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


PLANTS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parents[3] / "outside"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "pipe": lambda path: os.mkfifo(path),
    "socket": plant_socket,
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_nothing_but_a_regular_file_is_read_or_written(tmp_path: Path, backend: DirectoryBackend, plant: str) -> None:
    """F-137."""
    path = tmp_path / "store" / KEY
    path.unlink()
    PLANTS[plant](path)
    calls: list[Callable[[], object]] = [
        lambda: backend.get(KEY),
        lambda: backend.readback(KEY),
        lambda: backend.stat(KEY),
        lambda: backend.create(KEY, b"new"),
    ]
    if plant != "folder":  # an empty folder is only a prefix
        calls.append(lambda: list(backend.list("objects/")))
    for call in calls:
        with pytest.raises(CorruptError, match=NAME):
            call()
    assert (tmp_path / "outside").read_bytes() == b"not yours"
    if plant == "folder":
        with pytest.raises(CkptStoreError, match=NAME):
            backend.delete(KEY)
    backend.replace(KEY, b"good")  # a repair puts the thing aside, as it is
    assert backend.get(KEY) == b"good"
    assert len(os.listdir(tmp_path / "store" / "quarantine")) == 1
    assert (tmp_path / "outside").read_bytes() == b"not yours"


@pytest.mark.parametrize("folder", ["objects", "objects/ab"])
def test_no_folder_is_reached_through_a_link(tmp_path: Path, backend: DirectoryBackend, folder: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(tmp_path / "store" / folder, elsewhere)
    (tmp_path / "store" / folder).symlink_to(elsewhere)
    for call in (backend.get, backend.readback, backend.stat, backend.delete):
        with pytest.raises(CorruptError, match=f"store/{folder}"):
            call(KEY)
    with pytest.raises(CorruptError, match=f"store/{folder}"):
        backend.create("objects/ab/new", b"")
    with pytest.raises(CorruptError, match=f"store/{folder}"):
        list(backend.list(""))
    assert (tmp_path / "store" / "tmp").exists()
    assert os.listdir(tmp_path / "store" / "tmp") == []


def test_the_store_itself_may_be_reached_through_a_link(tmp_path: Path, backend: DirectoryBackend) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    assert DirectoryBackend(tmp_path / "link").get(KEY) == b"stored"


def test_a_file_where_a_folder_belongs_is_named(tmp_path: Path, backend: DirectoryBackend) -> None:
    for call in (backend.get, backend.stat):
        with pytest.raises(CorruptError, match="not a folder"):
            call(f"{KEY}/below")
    with pytest.raises(CorruptError, match="not a folder"):
        backend.create(f"{KEY}/below", b"")


@pytest.mark.parametrize("name", [".DS_Store", "with space", "ümlaut", "line\nbreak"])
def test_a_listing_names_what_is_no_key(tmp_path: Path, backend: DirectoryBackend, name: str) -> None:
    (tmp_path / "store" / "objects" / name).write_bytes(b"")
    with pytest.raises(CorruptError, match="not the name of a key"):
        list(backend.list(""))
    assert list(backend.list("documents/")) == []


def test_local_files_are_neither_keys_nor_listed(tmp_path: Path, backend: DirectoryBackend) -> None:
    local = ["config.toml", "catalogue.sqlite", "catalogue.sqlite-wal", "lock", "writers.lock"]
    for name in local:
        (tmp_path / "store" / name).write_bytes(b"x")
    (tmp_path / "store" / "quarantine").mkdir()
    (tmp_path / "store" / "lost+found").mkdir()
    (tmp_path / "store" / "tmp" / "half").write_bytes(b"x")
    (tmp_path / "store" / "objects" / "ab" / ".nfs0000000000000001").write_bytes(b"x")
    assert [found.key for found in backend.list("")] == [KEY]
    assert list(backend.list("tmp/")) == list(backend.list("quarantine/")) == []
    for name in [*local, "tmp/half", "quarantine/x"]:
        for call in (backend.get, backend.stat, backend.delete, backend.readback):
            with pytest.raises(UsageError):
                call(name)
        with pytest.raises(UsageError):
            backend.create(name, b"")


def test_stored_files_are_read_only_and_have_one_name(tmp_path: Path, backend: DirectoryBackend) -> None:
    before = os.umask(0o077)
    try:
        backend.create("objects/cd/new", b"new")
        backend.replace(KEY, b"good")
    finally:
        os.umask(before)
    for key in (KEY, "objects/cd/new"):
        found = (tmp_path / "store" / key).lstat()
        assert stat.S_IMODE(found.st_mode) == 0o444
        assert found.st_nlink == 1
    assert quarantined_files(backend, KEY) == [b"stored"]


def test_a_file_written_out_of_a_store_shares_nothing_with_it(tmp_path: Path, backend: DirectoryBackend) -> None:
    exported = tmp_path / "export" / "deep" / "file"
    assert write_file_durably(exported, [backend.get(KEY), b"!"]) == 7
    assert exported.stat().st_nlink == 1
    assert exported.stat().st_ino != (tmp_path / "store" / KEY).stat().st_ino
    with exported.open("ab") as file:  # writable, and the store does not notice
        file.write(b"edited")
    assert backend.get(KEY) == b"stored"


def test_a_file_is_written_out_at_once_and_never_over_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report"

    def interrupted() -> object:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file_durably(target, interrupted())  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []
    write_file_durably(target, [b"one"])
    with pytest.raises(RefusedError, match="exists"):
        write_file_durably(target, [b"two"])
    assert target.read_bytes() == b"one"
    write_file_durably(target, [b"three"], replace=True)
    assert target.read_bytes() == b"three"

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(1, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    write_file_durably(tmp_path / "stick", [b"four"])
    assert (tmp_path / "stick").read_bytes() == b"four"
    assert sorted(os.listdir(tmp_path)) == ["report", "stick"]
    monkeypatch.setattr(os.path, "lexists", lambda _path: False)  # it appears between the look and the naming
    with pytest.raises(RefusedError, match="exists"):
        write_file_durably(target, [b"five"])
    monkeypatch.undo()
    assert target.read_bytes() == b"three"
    assert sorted(os.listdir(tmp_path)) == ["report", "stick"]


READ_ONLY = """
import sys
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.errors import ReadOnlyError

backend = DirectoryBackend(sys.argv[1])
key = sys.argv[2]
assert backend.get(key) == backend.readback(key)[0] == b"stored"
assert backend.readback(key)[1].value in ("direct", "fsync-dropped", "cached", "server-read")
assert [found.key for found in backend.list("")] == [key]
assert backend.stat(key).size == 6
assert backend.create(key, b"other") is False
for change in (lambda: backend.create("objects/ab/new", b""), lambda: backend.create("new/ab", b""),
               lambda: backend.replace(key, b"good"), lambda: backend.delete(key)):
    try:
        change()
        raise SystemExit("changed")
    except ReadOnlyError as error:
        print(error)
"""


def test_a_directory_that_may_only_be_read_works_for_reading(tmp_path: Path, backend: DirectoryBackend) -> None:
    folders = [tmp_path / "store", *(path for path in (tmp_path / "store").rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = run_without_privilege(READ_ONLY, str(backend.path), KEY)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("EACCES" in line and str(backend.path) in line for line in lines)
    assert backend.get(KEY) == b"stored"


UNREADABLE = """
import sys
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.errors import BackendError, NotFoundError

backend = DirectoryBackend(sys.argv[1])
for read in (backend.get, backend.readback, backend.stat, lambda key: list(backend.list(""))):
    try:
        read(sys.argv[2])
        raise SystemExit("read")
    except NotFoundError:
        raise SystemExit("called missing")
    except BackendError as error:
        print(error)
"""


def test_what_may_not_be_read_is_not_called_missing(tmp_path: Path, backend: DirectoryBackend) -> None:
    folder = tmp_path / "store" / "objects" / "ab"
    folder.chmod(0)
    try:
        done = run_without_privilege(UNREADABLE, str(backend.path), KEY)
    finally:
        folder.chmod(0o755)
    assert done.returncode == 0, done.stderr + done.stdout
    assert all("EACCES" in line for line in done.stdout.splitlines())


def test_a_store_that_went_away_is_not_an_empty_one(tmp_path: Path, backend: DirectoryBackend) -> None:
    (tmp_path / "store").rename(tmp_path / "moved")
    for call in (backend.get, backend.stat, backend.readback, backend.delete, lambda key: backend.create(key, b"")):
        with pytest.raises(BackendError, match="is gone") as failed:
            call(KEY)
        assert not isinstance(failed.value, NotFoundError)
    with pytest.raises(BackendError, match="is gone"):
        list(backend.list(""))
    assert not (tmp_path / "store").exists()
