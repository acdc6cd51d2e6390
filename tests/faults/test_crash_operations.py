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
import torch
from torch import nn

import ckptstore
from ckptstore.backends.owners import Owner, this_process
from ckptstore.export import export_weights, import_weights
from tests.support.invariants import broken, inodes, temporaries
from tests.support.syscalls import intercept, killed_at
from tests.support.training import make_training, save_steps, seed_everything

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

Work = Callable[[Path], object]
"""Does something to the stores ``store`` and, perhaps, ``far`` in a folder; returns what it came to."""


def save(folder: Path) -> object:
    training = make_training()
    with ckptstore.open(folder / "store").run("main", **training.objects()) as run:
        step = run.resume()
        if step < 3:
            training.step()
            run.save(step + 1, metrics={"loss": 0.5})
        return run.store.head("main")


def save_sharded(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    if store.head("wide") is None:
        seed_everything()
        attempt = store.begin("wide")
        parts = [ckptstore.TrainingState(model=nn.ModuleDict({name: nn.Linear(30, 30)})) for name in "ab"]
        receipts = [store.save_shard(part, attempt, step=1, index=i, count=2) for i, part in enumerate(parts)]
        store.commit(attempt, receipts, metrics={"loss": 0.5})
    return store.head("wide")


def push(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    far = ckptstore.open(folder / "far", create=True)
    root = store.resolve("main")
    return ckptstore.push(store, far, root, ref="main").root


def pull_a_part(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    far = ckptstore.open(folder / "far", create=True)
    return ckptstore.pull(store, far, store.resolve("main"), shards=[0]).root


def trees(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    tree = store.put_tree(folder / "files")
    store.get_tree(tree, folder / "out")
    return tree, store.put_tree(folder / "files"), {p.name: p.read_bytes() for p in (folder / "out").iterdir()}.keys()


def move(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    head = store.resolve("main")
    if store.head("best") is None:
        store.move_ref("best", head, None)
    return store.head("best")


def bring_weights(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    if store.head("imported") is None:
        import_weights(store, folder / "weights.safetensors", "imported")
    return store.head("imported")


ROOT = ckptstore.Digest.of(b"any")

WORKS: dict[str, Work] = {
    work.__name__: work for work in (save, save_sharded, push, pull_a_part, trees, move, bring_weights)
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child has none of the threads that torch computes with, and would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """A folder with a store of two checkpoints, some files, and a safetensors file."""
    folder = tmp_path_factory.mktemp("crash")
    store = ckptstore.open(folder / "store", create=True)
    save_steps(store, "main", make_training(), 2)
    (folder / "files").mkdir()
    (folder / "files" / "plan.json").write_bytes(b"{}")
    (folder / "files" / "weights.bin").write_bytes(bytes(range(256)) * 300)
    export_weights(store, store.resolve("main"), folder / "weights.safetensors")
    return folder


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


def check_crash(base: Path, folder: Path, work: Work, expected: object, nth: int, *, late: bool) -> bool:
    """Kill ``work`` at one call, look at what is left, and do it again. False if it made fewer calls."""
    shutil.copytree(base, folder)
    if not killed_at(nth, late=late, work=lambda: work(folder)):
        return False
    stores = [path for path in (folder / "store", folder / "far") if (path / "ckptstore.json").exists()]
    assert [broken(path) for path in stores] == [[]] * len(stores)
    kept = {path: inodes(path) for path in stores}
    assert work(folder) == expected
    for path in {*stores, folder / "store"}:
        assert broken(path) == []
        assert kept[path].items() <= inodes(path).items(), "what was there and good was written again"
        # The next writer, whoever it is, sweeps up after the dead.
        ckptstore.open(path).add_receipt(ckptstore.Receipt("note", ROOT, None, 0, 0, 0, "none", "", ""))
        assert temporaries(path) == []
    shutil.rmtree(folder)
    return True


@pytest.mark.parametrize("name", WORKS)
def test_work_killed_at_some_call_can_be_done_again(base: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(base, tmp_path / "whole")
    expected, calls = calls_of(WORKS[name], tmp_path / "whole")
    killed = 0
    for number in range(4):
        nth = 1 + (number * 2 + 1) * calls // 8
        folder = tmp_path / f"{nth}"
        killed += check_crash(base, folder, WORKS[name], expected, nth, late=number % 2 == 1)
    assert killed >= 3


@pytest.mark.deep
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", WORKS)
def test_work_killed_at_any_call_can_be_done_again(base: Path, tmp_path: Path, name: str, late: bool) -> None:
    shutil.copytree(base, tmp_path / "whole")
    expected, calls = calls_of(WORKS[name], tmp_path / "whole")
    killed = sum(check_crash(base, tmp_path / f"{n}", WORKS[name], expected, n, late=late) for n in range(1, calls + 1))
    assert killed > calls * 0.9


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
