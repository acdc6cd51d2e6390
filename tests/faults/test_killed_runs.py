"""An ordinary loop that is killed at a random time resumes, and ends with the uninterrupted run's root."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckptstore

STEPS = 40


def start(kind: str, folder: Path, ref: str) -> subprocess.Popen[str]:
    """A training process of its own."""
    command = [sys.executable, "-m", "tests.support.victim", kind, str(folder), ref, str(STEPS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    with process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


@pytest.mark.timeout(600)  # eleven interpreters with torch are started; on a loaded machine each takes its time
@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("convolutional", 2),
        pytest.param("convolutional", 5, marks=pytest.mark.deep),
        pytest.param("transformer", 5, marks=pytest.mark.deep),
    ],
)
def test_a_killed_loop_ends_in_the_root_of_the_uninterrupted_one(kind: str, times: int, tmp_path: Path) -> None:
    """B001, B008, B050: several times, each killed with SIGKILL once, while it trains or saves."""
    ckptstore.open(tmp_path, create=True)
    finish(start(kind, tmp_path, "straight"))
    store = ckptstore.open(tmp_path)
    expected = store.head("straight")
    moments = random.Random(kind)
    killed = []
    for number in range(times):
        ref = f"run-{number}x"
        with start(kind, tmp_path, ref) as process:
            assert process.stdout is not None
            for _ in range(moments.randrange(1, STEPS // 2 - 4)):
                process.stdout.readline()
            time.sleep(moments.uniform(0.0, 0.02))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        head = store.head(ref)
        assert head is not None
        assert ckptstore.open(tmp_path).verify(ref).ok
        killed.append(store.checkpoint(head).step)
        finish(start(kind, tmp_path, ref))
        assert store.head(ref) == expected, f"{ref} was killed after step {killed[-1]}"
    assert all(step < STEPS for step in killed)
    assert ckptstore.open(tmp_path).verify("straight").ok
