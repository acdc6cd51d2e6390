"""The catalogue is an index: it says what the store says, it can be dropped, and nothing ever fails because of it.

All of this in both kinds of database.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.catalogue import CatalogueError
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, object_key, receipt_key, ref_key
from ckptstore.format.page import encode_page, make_tensor_entry
from ckptstore.format.progress import Progress
from ckptstore.format.records import Receipt, ShardReceipt
from ckptstore.format.shard import PageRef, Shard
from ckptstore.leases import now
from ckptstore.store import Store
from tests.support.postgres import server
from tests.support.training import commit_state, make_training, save_steps, seed_everything

Rows = dict[str, list[tuple[int | str | None, ...]]]


@pytest.fixture(params=["sqlite", "postgresql"], autouse=True)
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogues of the stores of a test are in a database of this kind."""
    monkeypatch.delenv("CKPT_CATALOGUE", raising=False)
    if request.param == "postgresql":
        monkeypatch.setenv("CKPT_CATALOGUE", server().url())


def rows(store: Store) -> Rows:
    with store.catalogue() as catalogue:
        return catalogue.rows()


def rebuilt(store: Store) -> Rows:
    store.catalogue().rebuild()
    return rows(store)


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
            (str(ref.digest), position, entry.path, '["weight"]', "f32", str(list(entry.shape)).replace(" ", ""))
            for root in roots
            for view in disk_store.closure(root).shards.values()
            for ref in view.shard.pages
            for position, entry in enumerate(view.tensors())
        ]
        assert [row[:6] for row in found["tensors"]] == sorted(tensors)

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

    def test_a_moved_ref_and_a_part_that_arrived_are_in_it_at_once(self, disk_store: Store, tmp_path: Path) -> None:
        seed_everything()
        first, second = nn.Module(), nn.Module()
        first.a, second.b = nn.Linear(40, 20), nn.Linear(20, 40)
        root = commit_state(disk_store, "main", [ckptstore.TrainingState(model=m) for m in (first, second)], 1)
        disk_store.move_ref("kept", root, None)
        assert [row[:3] for row in rows(disk_store)["refs"]] == [("kept", 1, str(root)), ("main", 1, str(root))]
        target = ckptstore.open(tmp_path / "target", create=True)
        ckptstore.pull(disk_store, target, root, shards=[1])
        found = rows(target)
        assert [row[1:3] for row in found["shards"]] == [(1, 2)]
        assert [row[2] for row in found["receipts"]] == ["pull"]
        assert rebuilt(target) == found


class TestDamage:
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


def commits_of(url: str, number: int, count: int) -> None:
    """What one process of several does: commits to a ref of its own, without torch."""
    store = ckptstore.open(url)
    for step in range(1, count + 1):
        entry = make_tensor_entry("x", ("weight",), "u8", (2,), (), bytes([number, step]))
        page = store.objects.put_document(encode_page([entry]))
        ref = PageRef(page, 1, ("weight",), "x")
        shard = store.objects.put_document(Shard(0, 1, (ref,), (), (), (), ()).encode())
        attempt = store.begin(f"process-{number}")
        receipt = ShardReceipt(
            attempt.nonce, 0, 1, step, attempt.parent, None, values.to_json({}), Progress(), None, shard
        )
        store.commit(attempt, [receipt])


class TestConcurrency:
    """Fault B081: jentic/jentic-one PR#529; ovumcy/ovumcy-web PR#155; RunLLM/aqueduct PR#369."""

    @pytest.mark.skipif(sys.platform != "linux", reason="forks")
    @pytest.mark.parametrize("commits", [5, pytest.param(60, marks=pytest.mark.deep)])
    def test_eight_processes_register_at_once_and_every_row_is_there(
        self, disk_store: Store, commits: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        processes = 8
        commit(disk_store, 1)
        gate, opener = os.pipe()
        children = []
        for number in range(processes):
            child = os.fork()
            if child == 0:
                try:
                    os.close(opener)
                    os.read(gate, 1)  # returns in all at once, when the parent closes its end
                    commits_of(disk_store.url, number, commits)
                    os._exit(len(caplog.records))
                except BaseException:
                    traceback.print_exc()
                    os._exit(99)
            children.append(child)
        os.close(gate)
        os.close(opener)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * processes
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

    def test_a_catalogue_is_not_carried_over_a_fork(self, disk_store: Store) -> None:
        commit(disk_store, 1)
        with disk_store.catalogue() as catalogue:
            catalogue.rows()
            catalogue._process += 1
            with pytest.raises(CatalogueError, match="fork"):
                catalogue.rows()
