"""Whatever a process does to stores, killed anywhere it leaves them sound; doing it again completes it (B050, B053).

Public sources: vllm-project/speculators#739, huggingface/transformers#35580; plur-ai/plur#796,
tinyhumansai/opencompany#1049.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.backends.owners import Owner, this_process
from ckptstore.export import export_weights
from tests.support import operations
from tests.support.invariants import broken, inodes, temporaries
from tests.support.operations import DELETING, OPERATIONS, STORES, Work
from tests.support.sweeps import share
from tests.support.syscalls import intercept, killed_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = ckptstore.Digest.of(b"any")


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with operations.one_thread():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, threads: None) -> Path:
    return operations.prepare(tmp_path_factory.mktemp("crash"))


def stores_in(folder: Path) -> list[Path]:
    """The stores that are there."""
    return [folder / name for name in STORES if (folder / name / "ckptstore.json").exists()]


def calls_of(work: Work, folder: Path) -> tuple[object, int]:
    """What uninterrupted work comes to, and how many changing calls it makes."""
    made = 0

    def count(_name: str, _arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal made
        made += 1
        return call()

    with pytest.MonkeyPatch.context() as patch:
        intercept(patch, count)
        return work(folder), made


def check_crash(base: Path, folder: Path, name: str, expected: object, nth: int, *, late: bool) -> bool:
    """Kill an operation at one call, look at what is left, and do it again. False if it made fewer calls."""
    work = OPERATIONS[name]
    shutil.copytree(base, folder)
    if not killed_at(nth, late=late, work=lambda: work(folder)):
        return False
    stores = stores_in(folder)
    assert [broken(path) for path in stores] == [[]] * len(stores)
    kept = {path: inodes(path) for path in stores}
    assert work(folder) == expected
    for path in stores_in(folder):
        assert broken(path) == []
        if name not in DELETING:
            assert kept.get(path, {}).items() <= inodes(path).items(), "what was there and good was written again"
        # The next writer, whoever it is, sweeps up after the dead.
        ckptstore.open(path).add_receipt(ckptstore.Receipt("note", ROOT, None, 0, 0, 0, "none", "", ""))
        assert temporaries(path) == []
    shutil.rmtree(folder)
    return True


@pytest.mark.parametrize("name", OPERATIONS)
def test_work_killed_at_some_call_can_be_done_again(base: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(base, tmp_path / "whole")
    expected, calls = calls_of(OPERATIONS[name], tmp_path / "whole")
    killed = 0
    for number in range(2):
        nth = 1 + (number * 2 + 1) * calls // 5
        folder = tmp_path / f"{nth}"
        killed += check_crash(base, folder, name, expected, nth, late=number % 2 == 1)
    assert killed


@pytest.mark.deep
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_work_killed_at_any_call_can_be_done_again(base: Path, tmp_path: Path, name: str, late: bool) -> None:
    """Before and after turn and turn about, so that a whole sweep meets every call in one of the two runs."""
    shutil.copytree(base, tmp_path / "whole")
    expected, calls = calls_of(OPERATIONS[name], tmp_path / "whole")
    places = share(range(1 + late, calls + 1, 2), name)
    killed = sum(check_crash(base, tmp_path / f"{n}", name, expected, n, late=late) for n in places)
    assert killed > len(places) * 0.9


def test_what_a_dead_writer_left_beside_its_target_goes_with_the_next_one(base: Path, tmp_path: Path) -> None:
    """And nothing else does: not what a living writer writes, not what is only called something like it."""
    here = this_process()
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        gone = Owner(here.boot, here.namespace, child.pid, 1)
    stale = [f".{gone}.{number}{'0' * 31}.tmp" for number in range(2)]
    kept = {f".{here}.{'0' * 32}.tmp", f".{gone}.tmp", f"{gone}.{'0' * 32}.tmp", ".tmp", "notes"}
    store = ckptstore.open(base / "store")
    root = store.resolve("main")
    tree = store.put_tree(base / "files")
    writers: list[Callable[[Path], object]] = [
        lambda folder: export_weights(store, root, folder / "weights.safetensors"),
        lambda folder: ckptstore.extract_checkpoint(store, root, folder / "extracted"),
        lambda folder: store.get_tree(tree, folder),
    ]
    for number, write in enumerate(writers):
        folder = tmp_path / f"{number}"
        (folder / stale[0] / "below").mkdir(parents=True)
        for name in (stale[1], *kept):
            (folder / name).write_bytes(b"half")
        write(folder)
        there = {path.name for path in folder.iterdir()}
        assert there.isdisjoint(stale)
        assert kept < there
        assert len(there) <= len(kept) + 2
