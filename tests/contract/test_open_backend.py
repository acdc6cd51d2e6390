"""A store's URL names one backend, and every other text is refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends import open_backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import NotFoundError, RefusedError, UsageError


@pytest.mark.parametrize("name", ["plain", "with space", "per%20cent", "que?ry#x", "umläut", "a:b"])
def test_a_path_and_the_url_of_what_it_opened_name_the_same_store(tmp_path: Path, name: str) -> None:
    backend = open_backend(tmp_path / name, create=True)
    backend.create("ckptstore.json", b"{}")
    assert open_backend(backend.url).get("ckptstore.json") == b"{}"
    assert open_backend(str(tmp_path / name)).url == backend.url
    assert backend.url.startswith("file:///")


def test_a_relative_path_stays_what_it_was_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backend = open_backend("store", create=True)
    monkeypatch.chdir("/")
    assert backend.create("ckptstore.json", b"")
    assert (tmp_path / "store" / "ckptstore.json").exists()


def test_opening_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such directory"):
        open_backend(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotFoundError, match="not a directory"):
        open_backend(tmp_path / "file")
    with pytest.raises(RefusedError, match="not a directory"):
        open_backend(tmp_path / "file", create=True)
    with pytest.raises(NotFoundError):
        open_backend("memory:never-made")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_creating_opens_what_is_there(tmp_path: Path) -> None:
    for url in (tmp_path / "a" / "b" / "c", "memory:test-creating-opens"):
        open_backend(url, create=True).create("a", b"kept")
        assert open_backend(url, create=True).get("a") == b"kept"
        assert open_backend(url).get("a") == b"kept"


def test_memory_is_shared_by_name_only() -> None:
    one = open_backend("memory:test-shared", create=True)
    assert open_backend("memory:test-shared") is one
    assert one.url == "memory:test-shared"
    assert MemoryBackend("test-shared") is not one
    assert open_backend("memory:test-shared-too", create=True) is not one


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a\0b",
        "s3://user:secret@bucket/prefix",
        "http://host/x",
        "file://host/x",
        "file:///x?y",
        "file:///x#y",
        "memory:",
        "memory:a/b",
        "memory:" + "x" * 65,
    ],
)
def test_any_other_url_is_refused_in_one_line_without_credentials(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        open_backend(url, create=True)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_importing_backends_is_light() -> None:
    program = (
        "import sys, ckptstore.backends; print(*(m for m in ('torch', 'numpy', 'sqlalchemy') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_file_is_no_place_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RefusedError, match="not a directory"):
        open_backend(tmp_path / "file", create=True)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", [".git", "my notes.txt", "notes"])
def test_a_folder_with_other_files_is_no_place_for_a_new_store(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(RefusedError, match="it has files"):
        ckptstore.open(tmp_path, create=True)
