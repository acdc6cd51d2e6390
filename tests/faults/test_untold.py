"""A failure behind a run is heard by somebody: at the latest when the process ends, which then fails (B058).

Public sources: google/orbax#605, keras-team/keras#23609, ByteDance-Seed/VeOmni#1162.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ckptstore
from tests.support.invariants import broken
from tests.support.training import make_training

PROGRAM = """
import os, sys
import torch
from torch import nn
import ckptstore
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend

what, end, path = sys.argv[1:]
ckptstore.open(path + "/store", create=True)
backend = FaultyBackend(DirectoryBackend(path + "/store"))
store = Store(backend)
run = store.run("main", model=nn.Linear(300, 300))
run.resume()
if what == "readback":
    def damage(key):
        backend.flip_bit(key, 4000)
    backend.before("readback", damage, prefix="objects/", nth=1)
root = run.save(1, push_to=None if what == "readback" else path + "/nowhere")
print("saved", root)
if end == "told":
    try:
        run.close()
    except ckptstore.CkptStoreError as error:
        print("told", error)
elif end == "closed":
    run.close()
elif end == "forgotten":
    del run
elif end == "failed":
    raise ValueError("the training failed")
elif end == "forked":
    run._behind.wait()
    child = os.fork()
    if child == 0:
        sys.exit(0)
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    try:
        run.close()
    except ckptstore.CkptStoreError:
        pass
"""

GOOD = """
import sys
import torch
from torch import nn
import ckptstore

path = sys.argv[1]
store = ckptstore.open(path + "/store", create=True)
ckptstore.open(path + "/far", create=True)
model = nn.Linear(900, 900)
run = store.run("main", model=model)
run.resume()
for step in range(1, 4):
    with torch.no_grad():
        model.weight.add_(1.0)
    run.save(step, push_to=path + "/far")
"""


def was_read_back(store: ckptstore.Store, root: ckptstore.Digest) -> bool:
    """Once; a temporary folder in memory has no medium, and the receipt says so."""
    return sum(receipt.operation in ("verify", "read") for receipt in store.receipts(root)) == 1


def test_what_is_under_way_behind_a_run_that_nobody_closes_is_still_done(tmp_path: Path) -> None:
    """The interpreter gives out no more threads when it ends, and what goes on in the background needs some."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", GOOD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    store, far = ckptstore.open(tmp_path / "store"), ckptstore.open(tmp_path / "far")
    head = store.head("main")
    assert head is not None
    assert far.head("main") == head
    assert was_read_back(store, head)
    assert broken(tmp_path / "far") == []


def test_a_process_that_may_start_no_thread_saves_and_pushes_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("can't start new thread")

    far = ckptstore.open(tmp_path / "far", create=True)
    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    roots = []
    training = make_training()
    with ckptstore.open(tmp_path / "store", create=True).run("main", **training.objects()) as run:
        for step in range(run.resume() + 1, 4):
            training.step()
            roots.append(run.save(step, push_to=far))
    monkeypatch.undo()
    assert far.head("main") == roots[-1]
    for root in roots:
        assert was_read_back(run.store, root)
    assert broken(tmp_path / "far") == []


CODES = {"readback": 3, "push": 4}
"""Exit codes of what goes wrong: wrong bytes, no store."""


def ended(tmp_path: Path, what: str, end: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, what, end, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "saved b3:" in done.stdout, done.stderr
    return done


@pytest.mark.parametrize(
    ("what", "end"),
    [
        ("readback", "open"),
        pytest.param("readback", "forgotten", marks=pytest.mark.deep),
        pytest.param("push", "open", marks=pytest.mark.deep),
        pytest.param("push", "forgotten", marks=pytest.mark.deep),
    ],
)
def test_a_run_that_nobody_closes_does_not_end_well_if_something_went_wrong_behind_it(
    tmp_path: Path, what: str, end: str
) -> None:
    done = ended(tmp_path, what, end)
    assert done.returncode == CODES[what], done.stderr
    assert "a run was not closed, and something went wrong behind it" in done.stderr
    assert ("wrong bytes" if what == "readback" else "nowhere") in done.stderr


@pytest.mark.deep
def test_what_was_told_is_not_told_again(tmp_path: Path) -> None:
    done = ended(tmp_path, "readback", "told")
    assert done.returncode == 0
    assert "told" in done.stdout
    assert "wrong bytes" in done.stdout
    assert done.stderr == ""


@pytest.mark.deep
def test_a_run_that_is_closed_raises(tmp_path: Path) -> None:
    done = ended(tmp_path, "readback", "closed")
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("ckptstore.errors.CorruptError")
    assert "was not closed" not in done.stderr


@pytest.mark.deep
def test_the_error_of_the_training_is_still_the_one_that_is_seen(tmp_path: Path) -> None:
    done = ended(tmp_path, "readback", "failed")
    assert done.returncode != 0
    assert "ValueError: the training failed" in done.stderr
    assert "something went wrong behind it" in done.stderr


@pytest.mark.deep
def test_a_child_made_by_fork_does_not_tell_what_is_its_parents(tmp_path: Path) -> None:
    done = ended(tmp_path, "readback", "forked")
    assert "child ended with 0" in done.stdout
    assert done.returncode == 0
    assert done.stderr == ""
