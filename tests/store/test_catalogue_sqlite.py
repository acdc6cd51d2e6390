"""A catalogue that is an SQLite file in the store's directory: damaged, locked, replaced, read-only."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.catalogue import CatalogueError, sqlitefile, storage
from ckptstore.format.digest import Digest
from ckptstore.format.keys import ref_key
from ckptstore.format.records import Receipt
from ckptstore.leases import now
from ckptstore.store import Store
from tests.support.backends import run_without_privilege
from tests.support.training import commit_state, seed_everything

Rows = dict[str, list[tuple[int | str | None, ...]]]

NFS = 0x6969
REBUILD = "ckpt catalogue rebuild"


@pytest.fixture(autouse=True)
def _no_other_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_CATALOGUE", raising=False)


def rows(store: Store) -> Rows:
    with store.catalogue() as catalogue:
        return catalogue.rows()


def rebuilt(store: Store) -> Rows:
    store.catalogue().rebuild()
    return rows(store)


def file_of(store: Store) -> Path:
    return Path(store.backend.path, "catalogue.sqlite")  # type: ignore[attr-defined]


def model(value: float = 0.0) -> nn.Module:
    seed_everything()
    module = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    with torch.no_grad():
        module[1].bias.fill_(value)
    return module


def commit(store: Store, step: int, ref: str = "main") -> Digest:
    return commit_state(store, ref, [ckptstore.TrainingState(model=model(step))], step)


def receipt(operation: str, subject: Digest) -> Receipt:
    return Receipt(operation, subject, None, 1, 2, 3, "direct", now(), "somewhere")


def test_a_store_that_is_not_in_a_directory_keeps_none(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    commit(store, 1)
    assert caplog.records == []
    with pytest.raises(CatalogueError, match="directory"):
        store.catalogue()


class TestDamage:
    """Fault B082: optuna/optuna#815; treeverse/dvc#1918."""

    @pytest.mark.parametrize("damage", ["garbage", "half", "flipped-header", "another-program", "another-version"])
    def test_a_damaged_catalogue_fails_no_commit_and_is_rebuilt(
        self, disk_store: Store, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        for step in range(1, 4):
            commit(disk_store, step)
        path = file_of(disk_store)
        data = path.read_bytes()
        if damage == "garbage":
            path.write_bytes(os.urandom(len(data)))
        elif damage == "half":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "flipped-header":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        else:
            connection = sqlite3.connect(path)
            number = "application_id = 5" if damage == "another-program" else "user_version = 99"
            connection.execute(f"PRAGMA {number}")
            connection.close()
        with pytest.raises(CatalogueError, match=REBUILD):
            rows(disk_store)
        caplog.clear()
        root = commit(disk_store, 4)
        assert disk_store.head("main") == root
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("ckptstore", logging.WARNING)
        assert REBUILD in record.getMessage()
        found = rebuilt(disk_store)
        assert [row[1] for row in found["refs"]] == [1, 2, 3, 4]
        caplog.clear()
        commit(disk_store, 5)
        assert caplog.records == []
        assert rows(disk_store) == rebuilt(disk_store)

    @pytest.mark.parametrize("loss", ["deleted", "empty", "older"])
    def test_a_lost_or_old_catalogue_is_filled_up_by_the_next_commit(self, disk_store: Store, loss: str) -> None:
        first = commit(disk_store, 1)
        path = file_of(disk_store)
        older = path.read_bytes()
        second = commit(disk_store, 2)
        if loss == "deleted":
            path.unlink()
        else:
            path.write_bytes(b"" if loss == "empty" else older)
        with disk_store.catalogue() as catalogue:
            stale = catalogue.stale()
        assert ref_key("main", 2) in stale.missing
        assert (ref_key("main", 1) in stale.missing) == (loss != "older")
        assert stale.gone == ()
        third = commit(disk_store, 3)
        assert {row[0] for row in rows(disk_store)["checkpoints"]} == {str(first), str(second), str(third)}
        assert rows(disk_store) == rebuilt(disk_store)

    def test_the_catalogue_of_another_store_is_refused(self, disk_store: Store, tmp_path: Path) -> None:
        other = ckptstore.open(tmp_path / "other", create=True)
        commit(disk_store, 1)
        commit(other, 1)
        shutil.copy(file_of(other), file_of(disk_store))
        with pytest.raises(CatalogueError, match="another store"):
            rows(disk_store)
        assert len(rebuilt(disk_store)["refs"]) == 1

    @pytest.mark.parametrize("obstacle", ["folder", "link", "pipe"])
    def test_nothing_is_written_through_what_is_no_file(
        self, disk_store: Store, tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = file_of(disk_store)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(b"")
        {"folder": path.mkdir, "link": lambda: path.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(path)}[obstacle]()
        root = commit(disk_store, 1)
        assert disk_store.head("main") == root
        assert "not a regular file" in caplog.text
        assert elsewhere.read_bytes() == b""

    def test_verify_does_not_ask_the_catalogue(self, disk_store: Store) -> None:
        root = commit(disk_store, 1)
        connection = sqlite3.connect(file_of(disk_store))
        with connection:
            connection.execute("DELETE FROM shards")
            connection.execute("UPDATE objects SET size = 1")
        connection.close()
        assert disk_store.verify("main").ok
        assert disk_store.checkpoint(root).step == 1

    def test_a_rebuild_that_died_leaves_the_next_one_nothing_to_trip_over(self, disk_store: Store) -> None:
        commit(disk_store, 1)
        before = rows(disk_store)
        path = file_of(disk_store)
        path.with_name(f"{path.name}.new").write_bytes(b"half a file")
        path.with_name(f"{path.name}-wal").write_bytes(b"the log of something else")
        assert rebuilt(disk_store) == before
        assert not path.with_name(f"{path.name}.new").exists()


class TestJournal:
    def journal(self, store: Store) -> str:
        connection = sqlite3.connect(file_of(store))
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        connection.close()
        return str(mode)

    def test_there_is_no_write_ahead_log_on_a_network_file_system(
        self, disk_store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault B082 again: a write-ahead log needs memory that all processes share."""
        monkeypatch.setattr(sqlitefile, "filesystem_type", lambda _fd: 0xEF53)
        commit(disk_store, 1)
        assert self.journal(disk_store) == "wal"
        monkeypatch.setattr(sqlitefile, "filesystem_type", lambda _fd: NFS)
        commit(disk_store, 2)
        assert self.journal(disk_store) == "delete"
        assert len(rows(disk_store)["refs"]) == 2
        monkeypatch.setattr(sqlitefile, "filesystem_type", lambda _fd: None)
        assert rebuilt(disk_store) == rows(disk_store)
        assert self.journal(disk_store) == "delete"

    def test_nothing_but_the_file_and_its_lock_is_left_behind(self, disk_store: Store) -> None:
        commit(disk_store, 1)
        path = file_of(disk_store)
        assert sorted(p.name for p in path.parent.glob("catalogue*")) == [path.name, f"{path.name}.lock"]


class TestOthers:
    def test_a_rebuild_waits_for_those_who_use_the_old_file(
        self, disk_store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit(disk_store, 1)
        monkeypatch.setattr(storage, "WAIT_SECONDS", 0.05)
        with disk_store.catalogue() as catalogue:
            before = catalogue.rows()
            with pytest.raises(CatalogueError, match="try again"):
                disk_store.catalogue().rebuild()
            assert catalogue.rows() == before
        disk_store.catalogue().rebuild()

    def test_a_writer_that_never_ends_costs_a_warning_and_no_commit(
        self, disk_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        commit(disk_store, 1)
        monkeypatch.setattr(storage, "WAIT_SECONDS", 0.05)
        blocker = sqlite3.connect(file_of(disk_store), isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        root = commit(disk_store, 2)
        blocker.close()
        assert disk_store.head("main") == root
        assert "locked" in caplog.text
        commit(disk_store, 3)
        assert rows(disk_store) == rebuilt(disk_store)


READER = """
import sys, ckptstore
from ckptstore.catalogue import CatalogueError
store = ckptstore.open(sys.argv[1])
try:
    with store.catalogue() as catalogue:
        print(len(catalogue.rows()["checkpoints"]), bool(catalogue.stale()))
        catalogue.update()
    catalogue.rebuild()
except CatalogueError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="drops root's capabilities")
class TestReadOnly:
    def read(self, store: Store, allow: Callable[[Path], None]) -> list[str]:
        folder = Path(store.backend.path)  # type: ignore[attr-defined]
        folder.chmod(0o555)
        allow(folder)
        try:
            done = run_without_privilege(READER, store.url)
        finally:
            folder.chmod(0o755)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    def test_a_catalogue_in_a_read_only_store_can_be_asked(self, disk_store: Store) -> None:
        commit(disk_store, 1)
        answer, error = self.read(disk_store, lambda folder: file_of(disk_store).chmod(0o444))
        assert answer == "1 False"
        assert "catalogue" in error

    def test_without_a_catalogue_a_read_only_store_says_so(self, disk_store: Store) -> None:
        commit(disk_store, 1)
        file_of(disk_store).unlink()
        (error,) = self.read(disk_store, lambda folder: None)
        assert "there is none" in error

    def test_a_catalogue_that_may_not_be_written_fails_no_receipt(self, disk_store: Store) -> None:
        root = commit(disk_store, 1)
        file_of(disk_store).chmod(0o444)
        program = (
            "import sys, ckptstore\n"
            "from ckptstore.format.records import Receipt\n"
            "store = ckptstore.open(sys.argv[1])\n"
            "root = store.head('main')\n"
            "store.add_receipt(Receipt('note', root, None, 0, 0, 0, 'none', 'then', 'here'))\n"
        )
        done = run_without_privilege(program, disk_store.url)
        assert done.returncode == 0
        assert "readonly database" in done.stderr
        assert len(disk_store.receipts(root)) == 1
