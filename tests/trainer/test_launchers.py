"""Workers that another launcher starts: torchrun, with orders from a file and no controller."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import CommitAbortedError, NotFoundError, RefusedError, UsageError
from tests.trainer.attack import Attack
from tests.trainer.small import small_profile
from trainer.lifecycle import leg
from trainer.preparation import prepare
from trainer.workers import orders
from trainer.workers.orders import Arm, Close, Restore, Save, Start, Train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, prepared as by the command."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare.prepare(small_profile(), folder, compute="float32")
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of it that nobody has used."""
    return Path(shutil.copytree(prepared, tmp_path / "run"))


def written(folder: Path) -> list[orders.Order]:
    return [orders.parse(line) for line in (folder / leg.ORDERS).read_bytes().splitlines()]


def test_the_first_leg_begins_with_the_starting_weights_and_ends_with_a_commit(folder: Path) -> None:
    begun = leg.begin(folder, None, "main")
    assert (begun.root, begun.first, begun.last) == (None, 1, 2)
    start, train, save, close = written(folder)
    assert (start, train, close) == (Start(), Train(1, 2), Close())
    assert isinstance(save, Save)
    assert (save.step, save.store) == (2, "store")
    shell = "\n".join(begun.shell())
    assert f"--identity {begun.identity}" in shell
    assert "export MKL_CBWR=AUTO,STRICT" in shell
    # Nobody has run it.
    with pytest.raises(CommitAbortedError, match="the worker of shard 0 has not saved"):
        leg.commit(folder)
    assert ckptstore.open(folder / "store").head("main") is None


def test_a_folder_that_was_not_prepared_and_a_leg_to_nowhere_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"has no plan\.json"):
        leg.begin(tmp_path, None, "main")
    with pytest.raises(NotFoundError, match="no leg was begun here"):
        leg.commit(folder)
    for last in (0, 9):
        with pytest.raises(UsageError, match=f"update {last} is not after update 0"):
            leg.begin(folder, last, "main")


@pytest.mark.deep
def test_torchrun_ends_in_the_roots_of_a_run_that_it_did_not_launch(folder: Path, tmp_path: Path) -> None:
    """Two legs by what the command prints; the second restores what the first has saved."""
    code, out, errors = (attack := Attack(tmp_path / "lifecycle")).end()
    assert (code, errors) == (0, ""), out
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = []
    for resumes in (False, True):
        arguments = [sys.executable, "-m", "trainer", "orders", str(folder)]
        told = subprocess.run(arguments, env=variables, capture_output=True, text=True, check=True, timeout=100).stdout
        beginning = [Restore, Arm] if resumes else [Start]
        assert [type(order) for order in written(folder)] == [*beginning, Train, Save, Close]
        tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", "-c", "set -e\n" + told.replace("29500", str(free_port()))],
            env={**variables, "PATH": tools},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split()[-1])
    store = ckptstore.open(folder / "store")
    head = store.head("main")
    assert head is not None
    assert [str(root) for root, _ in store.history(head)] == found[::-1]
    assert store.verify(head).findings == ()
    roots = json.loads((attack.out / "report.json").read_text())["roots"]
    assert found == [roots["2"]["root"], roots["4"]["reference"]]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
