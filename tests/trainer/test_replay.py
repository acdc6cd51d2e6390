"""Replay by its command: a stranger with the store makes the updates again, in fresh processes, and is told the truth.

The store is that of a small run of the experiment, copied to another place; forgeries are made by a process of its own
that has the whole trainer at hand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest, Store
from ckptstore.format.values import from_json
from tests.trainer.attack import SMALL
from tests.trainer.forger import TENSOR, Forgery, forged_elsewhere
from trainer.replay.command import replay

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How the command ended, and what it said."""

    code: int
    out: str
    errors: str


@dataclass(frozen=True)
class Copied:
    """A copy of the store of a finished run, in another place, and the roots after updates 2, 4 and 8."""

    store: Store
    prepared: Path
    roots: tuple[Digest, Digest, Digest]

    def replay(self, folder: Path, begin: str, end: str, *more: str) -> Ended:
        """The command, in ``folder``."""
        folder.mkdir()
        (folder / "tmp").mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "replay", begin, end, "--store", self.store.url, *more],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Copied:
    folder = tmp_path_factory.mktemp("replay")
    command = [sys.executable, str(SMALL), "lifecycle", "--out", str(folder / "run"), "--compute", "float32"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shutil.copytree(folder / "run" / "operator", folder / "elsewhere")
    shutil.move(folder / "run" / "prepared", folder / "prepared")
    shutil.rmtree(folder / "run")
    store = ckptstore.open(folder / "elsewhere")
    eight, four, two = (root for root, _ in store.history(store.resolve("lifecycle")))
    assert f"replay {two.hex[:12]} {four.hex[:12]} --store" in done.stdout
    return Copied(store, folder / "prepared", (two, four, eight))


def left(folder: Path) -> list[Path]:
    """Temporary folders of replays that are still there; torch has one of its own."""
    return list((folder / "tmp").glob("trainer-replay-*"))


@pytest.mark.deep
def test_a_stranger_with_the_store_makes_the_same_root_again_and_leaves_a_receipt(
    copied: Copied, tmp_path: Path
) -> None:
    two, four, _ = copied.roots
    done = copied.replay(tmp_path / "there", two.hex[:12], four.hex[:12])
    assert (done.code, done.errors) == (0, "")
    assert "equality is to be expected: the canary and all of the numerical binding agree" in done.out
    assert "its sources are those of this checkout" in done.out
    assert [f"update {update} equal" in done.out for update in (2, 3, 4, 5)] == [False, True, True, False]
    assert done.out.splitlines()[-1].endswith(f"] equal: {four}")
    (receipt,) = [one for one in copied.store.receipts(four) if one.operation == "replay"]
    told = from_json(receipt.details, "details")
    assert isinstance(told, dict)
    assert (told["from"], told["first"], told["last"], told["roots"]) == (str(two), 3, 4, [str(four)])
    assert receipt not in copied.store.readbacks(four), "to compute is not to read back"
    assert left(tmp_path / "there") == []
    assert copied.store.verify(four).exit_code == 0


@pytest.mark.deep
def test_all_checkpoints_on_the_way_from_the_start_are_compared(copied: Copied, tmp_path: Path) -> None:
    done = copied.replay(tmp_path / "there", "start", "lifecycle", "--out", "kept")
    assert (done.code, done.errors) == (0, "")
    for step, root in zip((2, 4, 8), copied.roots, strict=True):
        assert f"root at {step} equal: {root}" in done.out
    assert f"what was made is kept in {tmp_path / 'there' / 'kept'}" in done.out
    again = ckptstore.open(tmp_path / "there" / "kept" / "replayed")
    assert again.head("replayed") == copied.roots[2]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("forgery", "update", "says"),
    [
        pytest.param(Forgery("exp_avg", 4), 4, "weights or moments are not as recorded", id="moment of the child"),
        pytest.param(Forgery("exp_avg_sq", 3), 3, "weights or moments are not as recorded", id="in the middle"),
        pytest.param(Forgery("weight", 4, recorded=False), 4, "1 of 49152 elements differ", id="behind its record"),
    ],
)
def test_a_forged_checkpoint_fails_in_its_first_wrong_update_and_tensor(
    copied: Copied, tmp_path: Path, forgery: Forgery, update: int, says: str
) -> None:
    two, four, _ = copied.roots
    shutil.copytree(copied.store.backend.path, tmp_path / "forged")
    forged = forged_elsewhere(tmp_path / "area", copied.prepared, tmp_path / "forged", str(two), "forged", forgery)
    store = ckptstore.open(tmp_path / "forged")
    assert store.verify("forged").exit_code == 0, "nothing but a replay finds it"
    assert store.checkpoint(Digest.parse(forged)).parent == two
    done = Copied(store, copied.prepared, copied.roots).replay(tmp_path / "there", two.hex[:12], "forged")
    assert (done.code, done.errors) == (1, "")
    assert f"DIFFERENT: first in update {update}, tensor {TENSOR}: " in done.out
    assert says in done.out
    assert f"] equal: {four}" not in done.out
    assert [one for one in store.receipts(Digest.parse(forged)) if one.operation == "replay"] == []
    (kept,) = left(tmp_path / "there")
    assert str(kept) in done.out


@pytest.mark.deep
def test_where_the_canary_differs_it_is_said_beforehand_and_only_anyway_goes_on(copied: Copied, tmp_path: Path) -> None:
    two, _, _ = copied.roots
    shutil.copytree(copied.store.backend.path, tmp_path / "forged")
    elsewhere = Forgery("", 0, canary="0" * 64)
    forged_elsewhere(tmp_path / "area", copied.prepared, tmp_path / "forged", str(two), "elsewhere", elsewhere)
    other = Copied(ckptstore.open(tmp_path / "forged"), copied.prepared, copied.roots)
    done = other.replay(tmp_path / "first", two.hex[:12], "elsewhere")
    assert done.code == 5
    assert "equality is not to be expected" in done.errors
    assert "canary.float32 is " in done.errors
    assert len(done.errors.splitlines()) == 1
    assert left(tmp_path / "first") == []
    done = other.replay(tmp_path / "second", two.hex[:12], "elsewhere", "--anyway")
    assert done.code == 0, "all that was computed is equal, and the root says under which binding"
    assert "equality is NOT to be expected: canary.float32 is " in done.out
    child = other.store.checkpoint(other.store.resolve("elsewhere"))
    assert [one.code for one in child.deviations] == ["binding.canary.float32"]


# What needs no process


def test_what_cannot_be_replayed_is_said_before_anything_is_made(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ckptstore.open(store, create=True)
    for arguments, code, says in (
        (["aaaa", "bbbb", "--store", str(store)], 4, "bbbb"),
        (["start", "start", "--store", str(store)], 2, "the start is no checkpoint"),
        (["aaaa", "bbbb", "--store", str(tmp_path / "none")], 4, "none"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "replay", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, "")
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_replay_needs_no_torch_in_its_own_process() -> None:
    script = "import sys; import trainer.replay.command; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_a_store_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_STORE", raising=False)
    with pytest.raises(ckptstore.errors.UsageError, match="no --store and no CKPT_STORE"):
        replay("start", "lifecycle", None, tmp_path, sys.stdout)
