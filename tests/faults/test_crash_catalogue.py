"""The catalogue is an index: a process killed while it writes it loses nothing, and the next one goes on (B082).

Public sources: openai/codex#30957, optuna/optuna#815, treeverse/dvc#1918, anomalyco/opencode#14970.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import ckptstore
from ckptstore.catalogue import Catalogue
from tests.support.training import commit_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = ckptstore.open(tmp_path / "store", create=True)
    model = nn.ModuleDict({f"{number}": nn.Linear(4, 4) for number in range(200)})
    for step in range(1, 4):
        commit_state(store, "main", [ckptstore.TrainingState(model=model)], step)
    return tmp_path / "store"


def killed_after(seconds: float, work: Callable[[], object]) -> None:
    """Do ``work`` again and again in a child that is killed after a while."""
    child = os.fork()
    if child == 0:
        try:
            while True:
                work()
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the work itself failed"


def made_anew(catalogue: Catalogue) -> None:
    for name in ("", "-wal", "-shm"):
        catalogue.path.with_name(catalogue.path.name + name).unlink(missing_ok=True)
    with catalogue:
        catalogue.update()


def rebuilt(catalogue: Catalogue) -> None:
    with catalogue:
        catalogue.rebuild()


@pytest.mark.parametrize("work", [made_anew, rebuilt])
def test_a_catalogue_whose_writer_was_killed_has_the_rows_of_a_new_one(
    path: Path, work: Callable[[Catalogue], None]
) -> None:
    store = ckptstore.open(path)
    with store.catalogue() as catalogue:
        expected = catalogue.rows()
    moments = random.Random(work.__name__)
    for _ in range(4):
        killed_after(moments.uniform(0.0, 0.15), lambda: work(store.catalogue()))
        with store.catalogue() as catalogue:
            catalogue.update()
            assert catalogue.rows() == expected
            assert not catalogue.stale()
    with store.catalogue() as catalogue:
        catalogue.rebuild()
        assert catalogue.rows() == expected
    assert not path.joinpath("catalogue.sqlite.new").exists()
