"""A store that is taken away, emptied or made read-only under a process that has it open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import BackendError, ConflictError, NotFoundError
from ckptstore.running.run import Run
from ckptstore.store import Store
from tests.support.invariants import broken
from tests.support.training import Training, make_training, save_steps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_steps(ckptstore.open(tmp_path / "store", create=True), "main", make_training(), 2)
    return tmp_path / "store"


def resumed(path: Path) -> tuple[Store, Run, Training, int]:
    store, training = ckptstore.open(path), make_training()
    run = store.run("main", **training.objects())
    step = run.resume()
    training.step()
    return store, run, training, step + 1


def test_a_store_that_is_gone_is_called_gone(path: Path) -> None:
    store, run, _, step = resumed(path)
    shutil.rmtree(path)
    root = ckptstore.Digest.of(b"any")
    for work in (
        lambda: run.save(step),
        lambda: store.head("main"),
        lambda: store.verify("main"),
        lambda: store.receipts(root),
        lambda: store.put_tree(path.parent),
    ):
        with pytest.raises(BackendError, match="the directory is gone"):
            work()
    run.close()
    assert not path.exists()


def test_a_folder_that_was_emptied_is_no_store_and_nothing_is_written_there(path: Path, tmp_path: Path) -> None:
    """F-02: or there would be keys without the header that says what they are."""
    _, run, _, step = resumed(path)
    fresh = ckptstore.open(tmp_path / "fresh", create=True).run("main", **make_training().objects())
    assert fresh.resume() == 0
    for folder, started, number in ((path, run, step), (tmp_path / "fresh", fresh, 0)):
        shutil.rmtree(folder)
        folder.mkdir()
        with pytest.raises((NotFoundError, ConflictError)):
            started.save(number)
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["tmp", "objects", "documents", "receipts"])
def test_what_was_taken_away_is_written_again_where_the_next_checkpoint_needs_it(path: Path, name: str) -> None:
    store, run, _, step = resumed(path)
    shutil.rmtree(path / name)
    if name == "documents":  # with the parent's document
        with pytest.raises(NotFoundError):
            run.save(step)
        run.close()
        return
    root = run.save(step, metrics={"loss": 0.5})
    run.close()
    assert store.head("main") == root
    assert all(finding.place.checkpoint != root for finding in store.verify(root).findings)
    assert broken(path) == [] or name == "objects"  # of the checkpoints before, which lost theirs


def test_a_ref_that_was_taken_away_is_not_begun_anew(path: Path) -> None:
    _, run, _, step = resumed(path)
    shutil.rmtree(path / "refs")
    with pytest.raises(ConflictError):
        run.save(step)
    run.close()
    assert not (path / "refs").exists()


READ_ONLY = """
import subprocess, sys
from pathlib import Path
import ckptstore
from ckptstore.errors import CkptStoreError, ReadOnlyError
from ckptstore_cli.main import run

path, place = sys.argv[1], Path(sys.argv[2])
far = ckptstore.open(place / "far", create=True)
store = ckptstore.open(path)
root = store.head("main")
other = ckptstore.push(store, far, root, ref="main").root
subprocess.run(["mount", "--bind", path, path], check=True)
subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
store = ckptstore.open(path, create=True)
assert store.verify("main").ok
assert ckptstore.pull(store, ckptstore.open(place / "near", create=True), root, ref="main").sent_keys > 0
for work in (
    lambda: store.move_ref("new", root, None),
    lambda: store.put_tree(place / "far"),
    lambda: ckptstore.push(far, store, root, ref="new"),
    lambda: store.add_receipt(ckptstore.Receipt("note", root, None, 0, 0, 0, "none", "", "")),
):
    try:
        work()
        raise SystemExit("written")
    except ReadOnlyError as error:
        assert "EROFS" in str(error), error
words = ["--store", path]
older = [digest for digest, _ in store.history(root)][1]
looks = [["show", "main"], ["ls", "main"], ["ref", "list"], ["diff", str(older), "main"]]
assert [run([*look, *words]) for look in looks] == [0, 0, 0, 1]
codes = [
    run(["verify", "main", *words]),
    run(["log", *words]),
    run(["restore", "main", str(place / "restored"), *words]),
    run(["ref", "move", "new", "main", *words]),
    run(["catalogue", "rebuild", *words]),
]
assert codes == [0, 0, 0, 7, 7], codes
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts")
def test_a_store_that_cannot_be_written_can_be_read(path: Path, tmp_path: Path) -> None:
    private = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*private, "mount", "--bind", str(tmp_path), str(tmp_path)], capture_output=True).returncode:
        pytest.skip("no private mounts here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*private, sys.executable, "-c", READ_ONLY, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert broken(path) == []
    assert broken(tmp_path / "near") == []
