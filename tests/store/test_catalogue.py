"""The catalogue is an index: it says what the store says, it can be dropped, and nothing ever fails because of it."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.catalogue import CatalogueError, sqlitefile
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, object_key, receipt_key, ref_key
from ckptstore.format.records import Receipt
from ckptstore.leases import now
from ckptstore.store import Store
from tests.support.backends import run_without_privilege
from tests.support.training import commit_state, make_training, save_steps, seed_everything

Rows = dict[str, list[tuple[int | str | None, ...]]]

NFS = 0x6969
REBUILD = "ckpt catalogue rebuild"


def rows(store: Store) -> Rows:
    with store.catalogue() as catalogue:
        return catalogue.rows()


def rebuilt(store: Store) -> Rows:
    store.catalogue().rebuild()
    return rows(store)


def file_of(store: Store) -> Path:
    return store.catalogue().path


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


class TestRows:
    def test_a_run_keeps_its_catalogue_up_to_date(self, disk_store: Store) -> None:
        roots = save_steps(disk_store, "main", make_training(), 3)
        found = rows(disk_store)
        chain = {row[0]: row[1:3] for row in found["checkpoints"]}
        assert chain == {
            str(roots[0]): (1, None),
            str(roots[1]): (2, str(roots[0])),
            str(roots[2]): (3, str(roots[1])),
        }
        assert [row[:3] for row in found["refs"]] == [("main", n + 1, str(root)) for n, root in enumerate(roots)]
        assert sorted(row[0] for row in found["receipts"]) == sorted(map(str, roots))
        assert rebuilt(disk_store) == found

    def test_receipts_of_metrics_and_readbacks_are_in_it(self, disk_store: Store) -> None:
        training = make_training()
        with disk_store.run("main", **training.objects()) as run:
            root = run.save(0, metrics={"loss": 0.5})
        found = rows(disk_store)
        assert sorted(row[2] for row in found["receipts"] if row[0] == str(root))[0] == "metrics"
        assert len(found["receipts"]) == 2
        assert rebuilt(disk_store) == found

    def test_tensors_and_objects_are_those_of_the_closures(self, disk_store: Store) -> None:
        roots = [commit(disk_store, 1), commit(disk_store, 2)]
        found = rows(disk_store)
        needed = {(key, need.length) for root in roots for key, need in disk_store.closure(root).objects.items()}
        assert set(found["objects"]) == needed
        stored = {(stat.key, stat.size) for stat in disk_store.backend.list("objects/")}
        assert needed == stored
        tensors = [
            (str(ref.digest), '["weight"]', entry.path, "f32", str(list(entry.shape)).replace(" ", ""))
            for root in roots
            for view in disk_store.closure(root).shards.values()
            for ref in view.shard.pages
            for entry in view.tensors()
        ]
        assert [row[:5] for row in found["tensors"]] == sorted(tensors)

    def test_equal_pages_of_two_checkpoints_are_stored_once(self, disk_store: Store) -> None:
        commit(disk_store, 1, "a")
        commit(disk_store, 1, "b")
        found = rows(disk_store)
        assert len(found["pages"]) == len(found["shards"]) == len(found["checkpoints"]) == 1
        assert len(found["tensors"]) == 4
        assert len(found["refs"]) == 2

    def test_shards_ties_and_receipts_of_workers_are_in_it(self, disk_store: Store) -> None:
        seed_everything()
        first, second = nn.Module(), nn.Module()
        first.a, second.b = nn.Linear(400, 200), nn.Linear(200, 400)
        root = commit_state(disk_store, "main", [ckptstore.TrainingState(model=m) for m in (first, second)], 1)
        found = rows(disk_store)
        assert [row[:2] for row in found["checkpoint_shards"]] == [(str(root), 0), (str(root), 1)]
        assert sorted(row[1:3] for row in found["shards"]) == [(0, 2), (1, 2)]
        assert [row[2] for row in found["receipts"]] == ["shard", "shard"]
        assert rebuilt(disk_store) == found

    def test_files_preparations_and_archives_are_in_it(self, disk_store: Store, tmp_path: Path) -> None:
        folder = tmp_path / "files"
        folder.mkdir()
        (folder / "a.txt").write_text("1234")
        tree = disk_store.put_tree(folder)
        run = disk_store.put_preparation(tree, tree, tree)
        attempt = disk_store.begin("main")
        saved = disk_store.save_shard(ckptstore.TrainingState(model=model()), attempt, step=1, run=run, files=tree)
        disk_store.commit(attempt, [saved])
        (folder / "archive.tar").write_text("12345678")
        archive = disk_store.put_tree(folder)
        digest = disk_store.add_receipt(receipt("evidence", archive))
        found = rows(disk_store)
        assert found["preparations"] == [(str(run), str(tree), str(tree), str(tree))]
        assert sorted(found["trees"]) == sorted([(str(tree), 1, 4), (str(archive), 2, 12)])
        ((*named, _, _),) = found["archives"]
        assert named == [str(archive), str(digest), 2, 12]
        assert (object_key(Digest.of(b"12345678")), 8) in found["objects"]
        assert rebuilt(disk_store) == found

    def test_a_checkpoint_that_lost_its_ref_is_no_row_until_something_names_it(self, disk_store: Store) -> None:
        commit(disk_store, 1)
        attempt = disk_store.begin("main")
        saved = disk_store.save_shard(ckptstore.TrainingState(model=model(7)), attempt, step=2)
        disk_store.refs.fence("main", attempt.generation)
        with pytest.raises(ckptstore.CkptStoreError):
            disk_store.commit(attempt, [saved])
        (orphan,) = set(disk_store.checkpoints()) - {disk_store.head("main")}
        with disk_store.catalogue() as catalogue, pytest.raises(CatalogueError, match=orphan.short):
            catalogue.add_checkpoint(orphan)
        assert len(rows(disk_store)["checkpoints"]) == 1
        assert rebuilt(disk_store) == rows(disk_store)
        disk_store.add_receipt(receipt("note", orphan))
        assert len(rows(disk_store)["checkpoints"]) == 2
        assert rebuilt(disk_store) == rows(disk_store)

    def test_what_was_transferred_has_the_same_rows_however_it_came(self, disk_store: Store, tmp_path: Path) -> None:
        roots = [commit(disk_store, step) for step in (1, 2, 3)]
        target = ckptstore.open(tmp_path / "target", create=True)
        ckptstore.push(disk_store, target, roots[2], ref="main")
        found = rows(target)
        assert len(found["checkpoints"]) == 3
        assert len(found["shards"]) == 1  # of the ancestors only the history came
        assert rebuilt(target) == found
        ckptstore.push(disk_store, target, roots[0])
        assert len(rows(target)["shards"]) == 2
        assert rebuilt(target) == rows(target)

    def test_a_store_that_is_not_in_a_directory_keeps_none(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
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

    def test_documents_that_cannot_be_read_are_listed_and_come_back(self, disk_store: Store) -> None:
        root = commit(disk_store, 1)
        good = rows(disk_store)
        ((shard),) = disk_store.checkpoint(root).shards
        path = Path(disk_store.backend.path, document_key(shard))  # type: ignore[attr-defined]
        data = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(data[:-1] + b"?")
        found = rebuilt(disk_store)
        assert found["unreadable"] == [(document_key(shard), "corrupt")]
        assert (found["shards"], found["tensors"]) == ([], [])
        path.write_bytes(data)
        with disk_store.catalogue() as catalogue:
            catalogue.update()
        assert rows(disk_store) == good

    def test_damaged_refs_and_receipts_are_listed(self, disk_store: Store) -> None:
        root = commit(disk_store, 1)
        digest = disk_store.add_receipt(receipt("note", root))
        folder = Path(disk_store.backend.path)  # type: ignore[attr-defined]
        keys = [receipt_key(root, digest), ref_key("main", 1)]
        for key in keys:
            (folder / key).chmod(0o644)
            (folder / key).write_bytes(b"{}")
        found = rebuilt(disk_store)
        assert [key for key, _ in found["unreadable"]] == sorted(keys)
        assert (found["refs"], found["receipts"]) == ([], [])
        with disk_store.catalogue() as catalogue:
            assert not catalogue.stale()

    def test_what_is_gone_from_the_store_is_reported(self, disk_store: Store) -> None:
        root = commit(disk_store, 1)
        (shard,) = disk_store.checkpoint(root).shards
        disk_store.backend.delete(document_key(shard))
        with disk_store.catalogue() as catalogue:
            assert catalogue.stale().gone == (document_key(shard),)

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


COMMITTER = """
import sys, time
from pathlib import Path
import ckptstore
from ckptstore.format.page import encode_page, make_tensor_entry
from ckptstore.format.shard import PageRef, Shard
from ckptstore.format.records import ShardReceipt
from ckptstore.format import values
from ckptstore.format.progress import Progress

store, number, commits, start = ckptstore.open(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
store.catalogue()
Path(f"{start}.{number}").touch()
while not start.exists():
    time.sleep(0.005)
for step in range(1, commits + 1):
    entry = make_tensor_entry("x", ("weight",), "u8", (2,), (), bytes([number, step]))
    page = store.objects.put_document(encode_page([entry]))
    ref = PageRef(page, 1, ("weight",), "x")
    shard = store.objects.put_document(Shard(0, 1, (ref,), (), (), (), ()).encode())
    attempt = store.begin(f"process-{number}")
    receipt = ShardReceipt(
        attempt.nonce, 0, 1, step, attempt.parent, None, values.to_json({}), Progress(), None, shard
    )
    store.commit(attempt, [receipt])
"""


class TestConcurrency:
    """Fault B081: jentic/jentic-one PR#529; ovumcy/ovumcy-web PR#155; RunLLM/aqueduct PR#369."""

    @pytest.mark.parametrize("commits", [5, pytest.param(60, marks=pytest.mark.deep)])
    def test_eight_processes_register_at_once_and_every_row_is_there(
        self, disk_store: Store, tmp_path: Path, commits: int
    ) -> None:
        processes = 8
        commit(disk_store, 1)
        start = tmp_path / "start"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        running = [
            subprocess.Popen(
                [sys.executable, "-c", COMMITTER, disk_store.url, str(number), str(commits), str(start)],
                stderr=subprocess.PIPE,
                env=environment,
            )
            for number in range(processes)
        ]
        while len(list(tmp_path.glob("start.*"))) < processes:
            assert all(process.poll() is None for process in running)
            time.sleep(0.01)
        reader = sqlite3.connect(file_of(disk_store), isolation_level=None)
        if reader.execute("PRAGMA journal_mode").fetchone() == ("wal",):  # else a reader keeps writers out, by design
            reader.execute("BEGIN")
            cursor = reader.execute("SELECT * FROM tensors")
            assert cursor.fetchone() is not None
        start.touch()
        for process in running:
            _, complaints = process.communicate(timeout=110)
            assert (process.returncode, complaints) == (0, b"")
        reader.close()
        found = rows(disk_store)
        assert len(found["checkpoints"]) == processes * commits + 1
        assert len(found["refs"]) == processes * commits + 1
        assert len(found["tensors"]) == processes * commits + 4
        assert rebuilt(disk_store) == found

    def test_threads_take_turns(self, disk_store: Store) -> None:
        root = commit(disk_store, 1)
        threads = [
            threading.Thread(target=lambda n=n: disk_store.add_receipt(receipt(f"note-{n}", root))) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = rows(disk_store)
        assert len(found["receipts"]) == 8
        assert rebuilt(disk_store) == found

    def test_an_open_catalogue_may_be_asked_while_another_is_written(self, disk_store: Store) -> None:
        root = commit(disk_store, 1)
        with disk_store.catalogue() as catalogue:
            assert len(catalogue.rows()["receipts"]) == 0
            disk_store.add_receipt(receipt("note", root))
            assert len(catalogue.rows()["receipts"]) == 1

    def test_a_rebuild_waits_for_those_who_use_the_old_file(
        self, disk_store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit(disk_store, 1)
        monkeypatch.setattr(sqlitefile, "WAIT_SECONDS", 0.05)
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
        monkeypatch.setattr(sqlitefile, "WAIT_SECONDS", 0.05)
        blocker = sqlite3.connect(file_of(disk_store), isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        root = commit(disk_store, 2)
        blocker.close()
        assert disk_store.head("main") == root
        assert "locked" in caplog.text
        commit(disk_store, 3)
        assert rows(disk_store) == rebuilt(disk_store)

    def test_a_catalogue_is_not_carried_over_a_fork(self, disk_store: Store) -> None:
        commit(disk_store, 1)
        with disk_store.catalogue() as catalogue:
            catalogue.rows()
            catalogue._process += 1
            with pytest.raises(CatalogueError, match="fork"):
                catalogue.rows()


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
