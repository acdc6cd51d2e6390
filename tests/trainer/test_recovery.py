"""``trainer run``: whatever is killed on the way, and whenever, it ends in the root that it ends in without that."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest, Store
from ckptstore.format.keys import object_key
from tests.trainer.kills import CONTROLLER, HOST, NO_SPARE, STALL, WORKER, Endured, Moment, endure
from trainer.recovery import entries
from trainer.recovery.entries import Entry, Finished
from trainer.recovery.times import table

ROOT = Path(__file__).resolve().parents[2]

CHAINED, SMALL = "tests.trainer.chained", "tests.trainer.small"


def command(out: Path, spares: int, *options: str, program: str = CHAINED) -> list[str]:
    return [
        *(sys.executable, "-m", program, "run", "--out", str(out), "--spares", str(spares)),
        *("--compute", "float32", "--every", "2", *options),
    ]


def run(out: Path, spares: int = 0, *options: str, program: str = CHAINED) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(out, spares, *options, program=program), cwd=ROOT, capture_output=True, text=True, check=False
    )


def seen(kind: type[Entry], count: int = 1) -> Moment:
    """Once the journal has so many entries of a kind."""
    return lambda told, seconds: sum(isinstance(entry, kind) for entry in told) >= count


def reached(update: int) -> Moment:
    """Once this update was made since the last group became ready."""

    def is_reached(told: list[Entry], seconds: float) -> bool:
        marks = (entries.Ready, entries.Lost, entries.Opened, entries.Updated)
        last = next((entry for entry in reversed(told) if isinstance(entry, marks)), None)
        return isinstance(last, entries.Updated) and last.update >= update

    return is_reached


def after(limit: float) -> Moment:
    return lambda told, seconds: seconds >= limit


def soon(kind: type[Entry], limit: float) -> Moment:
    """So many seconds after the next entry of a kind is there, counted from when this is asked first."""
    before: list[int] = []
    appeared: list[float] = []

    def is_soon(told: list[Entry], seconds: float) -> bool:
        count = sum(isinstance(entry, kind) for entry in told)
        before.append(count)
        if count > before[0] and not appeared:
            appeared.append(time.monotonic())
        return bool(appeared) and time.monotonic() - appeared[0] >= limit

    return is_soon


def finished(endured: Endured) -> Finished:
    (entry,) = endured.of(Finished)
    assert isinstance(entry, Finished)
    return entry


def chain_state(shard: int, updates: int) -> Digest:
    """What a worker of :mod:`tests.trainer.chain` holds after so many updates, written down here once more."""
    from blake3 import blake3

    state = b""
    for message in (b"start", *(number.to_bytes(4, "little") for number in range(1, updates + 1))):
        state = blake3(state + message + bytes([shard])).digest(length=2 * 2**18)
    return Digest.of(state)


def require_chain(store: Store, root: Digest) -> None:
    """A checkpoint after 2, 4, 6 and 8 updates, each the parent of the next, and each holding exactly those updates."""
    history = list(store.history(root))
    assert [checkpoint.step for _, checkpoint in history] == [8, 6, 4, 2]
    for each, checkpoint in history:
        objects = store.closure(each, files=False).objects
        assert set(objects) == {object_key(chain_state(shard, checkpoint.step)) for shard in range(2)}
    assert store.head("run") == root


@pytest.mark.timeout(280)
def test_a_worker_a_host_and_the_controller_are_killed_and_nothing_is_lost_nor_done_twice(tmp_path: Path) -> None:
    out = tmp_path / "run"
    kills = [(CONTROLLER, 0, seen(entries.Assigned)), (WORKER, 1, reached(3)), (CONTROLLER, 0, reached(5))]
    endured = endure(lambda: command(out, 1), out, [*kills, (HOST, 0, reached(7))], cwd=ROOT)
    assert endured.code == NO_SPARE, endured.outputs[-1]
    assert f"run --out {out}" in endured.outputs[-1]
    assert "--spares 2" in endured.outputs[-1]
    assert not endured.of(Finished)
    last = endure(lambda: command(out, 2), out, [], cwd=ROOT)
    assert last.code == 0, last.outputs[-1]
    require_chain(ckptstore.open(out / "operator"), finished(last).root)
    lost = [entry for entry in last.entries if isinstance(entry, entries.Lost)]
    assert [(entry.shards, entry.hosts) for entry in lost] == [((1,), ("host-1",)), ((0,), ("host-0",))]
    what = [entry.what for entry in last.entries if isinstance(entry, entries.Recovered)]
    assert what == ["controller", "shard 1 on host-1", "controller", "controller"]
    # The spare got its shard, who had it got no more than the checkpoint's document, and all read all of it again.
    tensors = 2 * 2**18
    fetched = [entry for entry in last.entries if isinstance(entry, entries.Staged) and entry.root is not None]
    for entry in fetched:
        came = entry.peer_bytes + entry.operator_bytes
        assert came > tensors if entry.copied_bytes else came < 4096
        assert entry.verified_bytes > tensors
    assert not (out / "hosts").exists()


@dataclass(frozen=True)
class Undisturbed:
    """A run without a loss."""

    root: Digest
    state_root: Digest
    stdout: str


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Undisturbed]:
    """Runs of a program with options, each made once."""
    made: dict[tuple[str, ...], Undisturbed] = {}

    def get(program: str, *options: str) -> Undisturbed:
        if (program, *options) not in made:
            out = tmp_path_factory.mktemp("undisturbed") / "run"
            done = run(out, 0, *options, program=program)
            assert done.returncode == 0, done.stdout + done.stderr
            last = finished(Endured(entries=[entries.parse(line)[1] for line in _lines(out)]))
            made[(program, *options)] = Undisturbed(last.root, last.state_root, done.stdout)
        return made[(program, *options)]

    return get


def _lines(out: Path) -> list[bytes]:
    return (out / "journal.jsonl").read_bytes().splitlines()


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_fifty_kills_at_random_times_end_in_the_reference_root(
    tmp_path: Path, undisturbed: Callable[..., Undisturbed], capsys: pytest.CaptureFixture[str]
) -> None:
    """Real workers, on few updates: some kills hit while torch is loaded, most amid updates and commits."""
    reference = undisturbed(SMALL)
    draw = random.Random(20260914)
    left, number, recovered = 50, 0, []
    began = time.monotonic()
    while left:
        number += 1
        out = tmp_path / f"run-{number}"
        moments = [
            after(draw.uniform(0, 8)) if draw.random() < 0.3 else soon(entries.Ready, draw.uniform(0, 2.5))
            for _ in range(min(left, 8))
        ]
        kills_left = [(draw.choice((WORKER, HOST, CONTROLLER)), draw.randrange(2), moment) for moment in moments]
        while True:
            endured = endure(partial(command, out, 60, program=SMALL), out, kills_left, cwd=ROOT)
            kills_left = kills_left[len(endured.kills) :]
            left -= len(endured.kills)
            if endured.code == 0:
                break
            assert "losses in a row" in endured.outputs[-1], endured.outputs[-1]  # which the same command goes on from
        assert finished(endured).root == reference.root
        with capsys.disabled():
            print(f"run {number}: {50 - left} kills so far, root {finished(endured).root.short}")
        recovered += [entry for entry in endured.entries if isinstance(entry, entries.Recovered)]
    with capsys.disabled():
        print(f"\n{number} runs, 50 kills, {time.monotonic() - began:.0f} s", *table(recovered), sep="\n")


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_many_kills_of_quick_workers_end_in_the_reference_root(
    tmp_path: Path, undisturbed: Callable[..., Undisturbed], seed: int
) -> None:
    draw = random.Random(seed)
    out, left = tmp_path / "run", 20
    while True:
        kinds = [draw.choice((WORKER, HOST, CONTROLLER)) for _ in range(left)]
        kills = [(kind, draw.randrange(2), after(draw.uniform(0, 2.5))) for kind in kinds]
        kills[3:4] = [(STALL, 1, soon(entries.Ready, 0.1))]
        endured = endure(lambda: command(out, 60), out, kills, cwd=ROOT)
        left -= len(endured.kills)
        if endured.code == 0:
            break
        assert "losses in a row" in endured.outputs[-1], endured.outputs[-1]
    assert finished(endured).root == undisturbed(CHAINED).root
    require_chain(ckptstore.open(out / "operator"), finished(endured).root)


@pytest.mark.deep
@pytest.mark.parametrize("program", [CHAINED, SMALL])
def test_commits_behind_the_updates_have_the_roots_of_commits_that_training_waits_for(
    undisturbed: Callable[..., Undisturbed], program: str
) -> None:
    behind, stopping = undisturbed(program), undisturbed(program, "--stop-for-commits")
    assert (behind.root, behind.state_root) == (stopping.root, stopping.state_root)


@pytest.mark.deep
def test_a_checkpoint_that_is_not_whole_is_passed_over_and_named(
    tmp_path: Path, undisturbed: Callable[..., Undisturbed]
) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(command(out, 0), cwd=ROOT, stdout=subprocess.DEVNULL)
    operator = out / "operator"
    while not (out / "journal.jsonl").exists() or b'"step":6,"root"' not in (out / "journal.jsonl").read_bytes():
        time.sleep(0.005)
    process.kill()
    process.wait()
    (operator / object_key(chain_state(1, 6))).unlink()
    done = run(out)
    assert done.returncode == 0, done.stderr
    assert "passed over: checkpoint" in done.stdout
    assert "(step 6)" in done.stdout
    last = finished(Endured(entries=[entries.parse(line)[1] for line in _lines(out)]))
    assert last.root == undisturbed(CHAINED).root


@pytest.mark.deep
def test_one_controller_is_in_charge(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(command(out, 0), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while not (out / "journal.jsonl").exists():
            time.sleep(0.005)
        second = run(out)
        assert second.returncode == 6
        assert "another controller is in charge" in second.stderr
    finally:
        process.kill()
        process.wait()


@pytest.mark.deep
def test_a_run_that_was_begun_is_not_gone_on_with_otherwise_and_a_finished_one_stays_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(out).returncode == 0
    before = (out / "journal.jsonl").read_bytes()
    for options in (["--every", "3"], ["--compute", "bfloat16"], ["--operator", str(tmp_path / "other")]):
        other = run(out, 0, *options)
        assert other.returncode == 2, other.stderr
        assert "was begun with" in other.stderr
    again = run(out)
    assert again.returncode == 0
    after_that = (out / "journal.jsonl").read_bytes()
    assert after_that.startswith(before)
    assert after_that.count(b"launched") == before.count(b"launched")


@pytest.mark.deep
def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    done = run(tmp_path / "run")
    assert done.returncode == 5
    assert "it is not empty" in done.stderr
