"""What goes wrong in a whole run: real workers, and a hostile hand that strikes when an event says so."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.errors import CorruptError
from ckptstore.format.keys import object_key
from tests.trainer.attack import Attack, worker_file
from trainer.lifecycle.expect import NotAsPlannedError
from trainer.workers.group import GroupLostError

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("host", "generation", "after", "number", "says"),
    [
        (1, 1, "alive", signal.SIGKILL, "shard 1 on host-1: ended by SIGKILL"),
        (1, 2, "joined", signal.SIGKILL, "shard 1 on host-1: ended by SIGKILL"),
        (1, 1, "trained", signal.SIGKILL, "shard 1 on host-1: ended by SIGKILL"),
        (1, 1, "trained", signal.SIGSTOP, "3 heartbeats in a row did not come"),
        (2, 4, "restored", signal.SIGKILL, "shard 1 on host-2: ended by SIGKILL"),
    ],
    ids=["while joining", "while restoring", "while saving", "silent while saving", "while evaluating"],
)
def test_a_worker_that_is_lost_unplanned_ends_the_run_in_one_line(
    tmp_path: Path, host: int, generation: int, after: str, number: signal.Signals, says: str
) -> None:
    attack = Attack(tmp_path / "run")
    path = worker_file(host, generation, 1)
    pid = attack.when(path, "alive")["pid"]
    attack.when(path, after)
    os.kill(pid, number)
    code, out, errors = attack.end()
    assert code == GroupLostError.exit_code, errors
    assert says in errors
    assert len(errors.splitlines()) == 1
    assert "FAILED" in out
    assert json.loads((attack.out / "failure.json").read_text())["type"] == "GroupLostError"
    assert attack.workers() == []
    assert (attack.out / "hosts" / "host-0" / "store").is_dir()


def flip_a_byte_of_shard_one(out: Path) -> str:
    store = ckptstore.open(out / "operator")
    root = store.head("lifecycle")
    assert root is not None
    needs = store.closure(root, [1], files=False).objects.values()
    key = object_key(max(needs, key=lambda need: need.length).digest)
    data = bytearray((out / "operator" / key).read_bytes())
    data[len(data) // 2] ^= 1
    (out / "operator" / key).chmod(0o644)
    (out / "operator" / key).write_bytes(data)
    return key


def move_the_ref(out: Path) -> str:
    store, other = ckptstore.open(out / "operator"), Digest.of(b"not of this run")
    store.refs.move("lifecycle", other, store.refs.head("lifecycle"))
    return f"seen {other}"


@pytest.mark.parametrize(
    ("strike", "code"),
    [(flip_a_byte_of_shard_one, CorruptError.exit_code), (move_the_ref, NotAsPlannedError.exit_code)],
)
def test_a_store_that_somebody_changed_is_refused_by_name_and_never_used(
    tmp_path: Path, strike: Callable[[Path], str], code: int
) -> None:
    attack = Attack(tmp_path / "run")
    attack.when("events/controller.jsonl", "taken_away")
    says = strike(attack.out)
    status, _, errors = attack.end()
    assert status == code, errors
    assert says in errors
    assert len(errors.splitlines()) == 1
    assert attack.workers() == []


def test_a_controller_that_was_stopped_for_a_while_goes_on_and_takes_nobody_for_lost(tmp_path: Path) -> None:
    attack = Attack(tmp_path / "run")
    attack.when(worker_file(1, 1, 1), "joined")
    attack.controller.send_signal(signal.SIGSTOP)
    time.sleep(5)
    attack.controller.send_signal(signal.SIGCONT)
    code, _, errors = attack.end()
    assert (code, errors) == (0, "")


def test_a_stopped_worker_does_not_outlive_a_controller_that_is_killed(tmp_path: Path) -> None:
    """It cannot notice by itself that nobody reads what it says."""
    attack = Attack(tmp_path / "run", "--mode", "stop")
    attack.when(worker_file(1, 2, 1), "fault_point")  # the controller stops its process now
    time.sleep(0.5)
    pid = attack.when(worker_file(1, 2, 1), "alive")["pid"]
    assert Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    attack.controller.kill()
    attack.end()
    deadline = time.monotonic() + 20
    while attack.workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert attack.workers() == []
