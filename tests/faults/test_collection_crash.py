"""A collection that dies anywhere leaves everything that is kept whole, and the next one ends as it would have."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.collection import exclusion
from ckptstore.errors import ConflictError
from ckptstore.store import Store
from tests.support.claims import ELSEWHERE, listed, plant_lease
from tests.support.collecting import abandon, bury, collected, commit, kept, littered, problems
from tests.support.distant import Distant
from tests.support.invariants import broken, temporaries
from tests.support.syscalls import intercept, killed_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child has none of the threads that torch computes with, and would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """A store with something to collect, and a lease of somebody of whom nobody can tell."""
    folder = tmp_path_factory.mktemp("crash") / "store"
    plant_lease(littered(folder), ELSEWHERE)
    return folder


@pytest.fixture(scope="module")
def expected(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What is there after a collection that nobody kills."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    shutil.copytree(base, folder)
    return collect(folder)


def collect(folder: Path) -> dict[str, int]:
    """Collect, and what is kept then."""
    store = ckptstore.open(folder)
    collected(store, break_leases_older_than=0)
    return kept(store)


def check_what_is_left(folder: Path, expected: dict[str, int], number: int) -> None:
    """What is kept is whole. The next collection ends as this one would have; or, every other ``number``, somebody
    saves before that, and needs no collection to end first."""
    assert broken(folder) == []
    store = ckptstore.open(folder)
    if number % 2:
        commit(store, "main", 3, 5)  # what was to go, or has gone
        assert problems(store) == []
        collect(folder)
    else:
        assert collect(folder) == expected
    assert broken(folder) == []
    assert problems(store) == []
    assert listed(store, "gc/") == listed(store, "leases/") == temporaries(folder) == []
    shutil.rmtree(folder)


def killed_in(base: Path, folder: Path, nth: int, *, late: bool, expected: dict[str, int]) -> bool:
    """Kill a collection at a call that changes the disk. False if it made fewer calls."""
    shutil.copytree(base, folder)
    if not killed_at(nth, late=late, work=lambda: collect(folder)):
        return False
    check_what_is_left(folder, expected, nth // 2)
    return True


def calls_of(folder: Path) -> int:
    """How many calls that change the disk a collection makes."""
    made = 0

    def count(_name: str, _arguments: tuple[Any, ...], call: Any) -> Any:
        nonlocal made
        made += 1
        return call()

    with pytest.MonkeyPatch.context() as patch:
        intercept(patch, count)
        collect(folder)
    return made


def test_a_collection_killed_at_some_call_can_be_done_again(
    base: Path, tmp_path: Path, expected: dict[str, int]
) -> None:
    """F-112, F-169."""
    shutil.copytree(base, tmp_path / "whole")
    calls = calls_of(tmp_path / "whole")
    moments = [1 + (2 * number + 1) * calls // 8 for number in range(4)]
    killed = [killed_in(base, tmp_path / f"{nth}", nth, late=nth % 2 == 1, expected=expected) for nth in moments]
    assert sum(killed) >= 3


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_a_collection_killed_at_any_call_can_be_done_again(
    base: Path, tmp_path: Path, expected: dict[str, int]
) -> None:
    """Each of them: after one is before the next, since nothing in between changes the disk."""
    shutil.copytree(base, tmp_path / "whole")
    calls = calls_of(tmp_path / "whole")
    killed = 0
    for nth in range(1, calls + 1):
        killed += killed_in(base, tmp_path / f"{nth}", nth, late=nth % 2 == 1, expected=expected)
    assert killed > calls * 0.9


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.deep)])
def test_a_collection_killed_at_a_random_instant_can_be_done_again(
    base: Path, tmp_path: Path, expected: dict[str, int], times: int
) -> None:
    draw = Random(times)
    shutil.copytree(base, tmp_path / "whole")
    began = time.monotonic()
    collect(tmp_path / "whole")
    seconds = time.monotonic() - began
    for number in range(times):
        folder = tmp_path / f"{number}"
        shutil.copytree(base, folder)
        child = os.fork()
        if child == 0:
            try:
                collect(folder)
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        check_what_is_left(folder, expected, number)


class Death(BaseException):
    """The process is gone: no call after it has any effect."""


class Mortal:
    """Passes calls on until the ``nth``, the last: it has no effect, or (``late``) one that nobody hears of."""

    def __init__(self, inner: MemoryBackend, nth: int, *, late: bool) -> None:
        self._inner, self._nth, self._late = inner, nth, late
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls > self._nth or (self.calls == self._nth and not self._late):
                raise Death
            result = found(*arguments)
            if self.calls == self._nth:
                raise Death
            return result

        return call


def copied(source: MemoryBackend, name: str, network: bool) -> MemoryBackend:
    """The same keys in another memory."""
    copy = Distant(name) if network else MemoryBackend(name)
    for stat in source.list(""):
        copy.create(stat.key, source.get(stat.key))
    return copy


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("network", [False, True], ids=["memory", "network"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_collection_that_dies_at_a_call_of_its_backend_can_be_done_again(
    late: bool, network: bool, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call, of a store whose collection also has a lease to break: nothing that is kept is ever touched."""
    monkeypatch.setattr(exclusion, "_SETTLE_SECONDS", 0.0)  # who dies waits for nothing
    store = littered(f"memory:crash-{late}-{network}-{step}")
    plant_lease(store, ELSEWHERE)
    assert isinstance(store.backend, MemoryBackend)
    whole = copied(store.backend, "whole", network)
    mortal = Mortal(whole, 10**9, late=late)
    collected(Store(mortal), break_leases_older_than=0)
    expected, calls = kept(Store(whole)), mortal.calls
    assert 50 < calls < 500
    for nth in range(1 + late, calls + 1, step):
        backend = copied(store.backend, f"crash-{nth}", network)
        with pytest.raises(Death):
            collected(Store(Mortal(backend, nth, late=late)), break_leases_older_than=0)
        left = Store(backend)
        bury(left)
        roots = [left.head("main"), *(ckptstore.Digest.parse(key.split("/")[1]) for key in listed(left, "pins/"))]
        for root in roots:
            assert root is not None
            assert left.verify(root).ok, nth
        if not network or not listed(left, "gc/"):
            abandon(left, 3, 5)
        collected(left, break_leases_older_than=0)
        assert kept(left) == expected, nth
        commit(left, "main", 4, 5)
        assert left.verify("main").ok
        assert listed(left, "gc/") == listed(left, "leases/") == []


def test_a_live_collection_is_not_taken_for_dead_when_it_fails(tmp_path: Path) -> None:
    """An error in the block ends the collection and takes the marker away; nothing is left to be broken."""
    store = littered(tmp_path / "store")
    with pytest.raises(ConflictError), store.lease():
        collected(store)
    assert listed(store, "gc/") == []
    collected(store)
    assert problems(store) == []
