"""The catalogue is an index: a process killed while it writes it loses nothing, and the next one goes on (B082).

Public sources: optuna/optuna#815, treeverse/dvc#1918.
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
from sqlalchemy import text
from torch import nn

import ckptstore
from ckptstore.catalogue import Catalogue
from ckptstore.format.keys import STORE_KEY
from ckptstore.format.records import Store as StoreHeader
from ckptstore.store import Store
from tests.support.postgres import server
from tests.support.training import commit_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@pytest.fixture(params=["sqlite", "postgresql"])
def drop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Store], None]:
    """What drops the catalogue of a store, which is in a database of one kind or the other."""
    monkeypatch.delenv("CKPT_CATALOGUE", raising=False)
    if request.param == "postgresql":
        monkeypatch.setenv("CKPT_CATALOGUE", server().url())
        return drop_schema
    return drop_file


def drop_file(store: Store) -> None:
    for name in ("", "-wal", "-shm"):
        Path(store.url, f"catalogue.sqlite{name}").unlink(missing_ok=True)


def drop_schema(store: Store) -> None:
    with server().connected() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {schema(store)} CASCADE")


def schema(store: Store) -> str:
    return f"ckptstore_{StoreHeader.parse(store.backend.get(STORE_KEY)).id}"


@pytest.fixture
def path(tmp_path: Path, drop: Callable[[Store], None]) -> Path:
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


def made_anew(store: Store, drop: Callable[[Store], None]) -> None:
    drop(store)
    with store.catalogue() as catalogue:
        catalogue.update()


def rebuilt(store: Store, _drop: Callable[[Store], None]) -> None:
    with store.catalogue() as catalogue:
        catalogue.rebuild()


@pytest.mark.parametrize("work", [made_anew, rebuilt])
def test_a_catalogue_whose_writer_was_killed_has_the_rows_of_a_new_one(
    path: Path, work: Callable[[Store, Callable[[Store], None]], None], drop: Callable[[Store], None]
) -> None:
    store = ckptstore.open(path)

    def check(catalogue: Catalogue) -> None:
        assert catalogue.rows() == expected
        assert not catalogue.stale()

    with store.catalogue() as catalogue:
        expected = catalogue.rows()
    moments = random.Random(work.__name__)
    for _ in range(4):
        killed_after(moments.uniform(0.0, 0.3), lambda: work(store, drop))
        with store.catalogue() as catalogue:
            catalogue.update()
            check(catalogue)
    with store.catalogue() as catalogue:
        catalogue.rebuild()
        check(catalogue)
    if drop is drop_file:
        assert not path.joinpath("catalogue.sqlite.new").exists()
    else:
        with server().connected() as connection:
            query = text("SELECT count(*) FROM pg_namespace WHERE nspname = :name")
            assert connection.scalar(query, {"name": f"{schema(store)}_new"}) == 0
