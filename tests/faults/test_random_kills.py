"""Processes that save, or push behind their training, killed with SIGKILL at instants of chance: nothing that was
committed is lost, and whoever goes on comes to the very roots of the run that nobody killed (B001, B050, B053, B058).

Public sources: vllm-project/speculators#1027, #739, huggingface/transformers#35580; plur-ai/plur#796;
google/orbax#605, keras-team/keras#23609.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.format.digest import Digest
from tests.support import operations
from tests.support.children import Child
from tests.support.invariants import broken, temporaries
from tests.support.training import make_training

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with operations.one_thread():
        yield


def train(path: Path, far: Path | None) -> list[str]:
    """Resume, train to the last step, and save each; to ``far`` as well, if there is one. Returns the roots saved."""
    training = make_training()
    roots = []
    with ckptstore.open(path).run("main", **training.objects()) as run:
        step = run.resume()
        if far is not None and run.root is not None and ckptstore.open(far).head("main") != run.root:
            ckptstore.push(run.store, ckptstore.open(far), run.root, ref="main")  # the process before died while it did
        while step < STEPS:
            training.step()
            step += 1
            roots.append(str(run.save(step, metrics={"step": step}, push_to=far)))
    return roots


class Kills:
    """A trainer that is killed again and again, and started again each time."""

    def __init__(self, folder: Path, *, far: bool) -> None:
        self._folder = folder
        self._chance = random.Random(f"kills {far}")
        self.path = folder / "store"
        self.far = folder / "far" if far else None
        self._clear()
        train(self.path, self.far)  # what is loaded on the way is loaded once, and not by each child
        self._clear()
        start = time.monotonic()
        self.expected = Child(lambda: train(self.path, self.far), folder / "straight").wait()
        self._seconds = time.monotonic() - start
        self.killed = 0

    def until(self, wanted: int) -> None:
        """Kill ``wanted`` times, and look each time at what is left."""
        while self.killed < wanted:
            self._clear()
            self._one_run(wanted)

    def _one_run(self, wanted: int) -> None:
        newest: Digest | None = None
        while True:
            child = Child(lambda: train(self.path, self.far), self._folder / "came-to")
            if self.killed < wanted:
                time.sleep(self._chance.uniform(0.0, self._seconds))
                child.kill()
            came_to = child.wait()
            newest = self._look(newest)
            if came_to is not None:
                break
            self.killed += 1
        assert str(newest) == self._expected(STEPS)
        for path in filter(None, (self.path, self.far)):
            assert ckptstore.open(path).head("main") == newest
            assert temporaries(path) == []

    def _expected(self, step: int) -> str:
        assert isinstance(self.expected, list)
        return str(self.expected[step - 1])

    def _look(self, newest: Digest | None) -> Digest | None:
        """The head after a kill: not before the one that was seen last, and one of the run that nobody killed."""
        store = ckptstore.open(self.path)
        assert broken(self.path) == []
        head = store.head("main")
        if head is not None:
            assert str(head) == self._expected(store.checkpoint(head).step)
        if newest is not None:
            assert newest in [record.root for record in store.refs.log("main")]
        if self.far is not None:
            assert broken(self.far) == []
            there = ckptstore.open(self.far).head("main")
            assert there is None or there in [record.root for record in store.refs.log("main")]
        return head

    def _clear(self) -> None:
        for path in filter(None, (self.path, self.far)):
            shutil.rmtree(path, ignore_errors=True)
            ckptstore.open(path, create=True)


@pytest.mark.parametrize("far", [False, True], ids=["saving", "and pushing"])
@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.deep)])
def test_nothing_committed_is_lost_to_a_kill_at_any_instant(tmp_path: Path, far: bool, times: int) -> None:
    kills = Kills(tmp_path, far=far)
    kills.until(times)
    assert kills.killed == times
