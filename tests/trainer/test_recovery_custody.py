"""Who is in charge of a run: one controller, and after it nobody before all that it started is gone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore.errors import ConflictError
from trainer.recovery.custody import Custody


def test_two_controllers_are_never_in_charge(tmp_path: Path) -> None:
    with (
        Custody(tmp_path),
        pytest.raises(ConflictError, match="another controller is in charge"),
        Custody(tmp_path),
    ):
        pass
    with Custody(tmp_path):
        pass


def test_whoever_comes_next_waits_until_all_that_the_last_one_started_is_gone(tmp_path: Path) -> None:
    with Custody(tmp_path) as first:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=first.inherited
        )
    ender = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill {child.pid}"])
    began = time.monotonic()
    with Custody(tmp_path) as second:
        assert second.waited_ms <= 1000 * (time.monotonic() - began)
        assert child.wait(30) != 0
    child.communicate()
    ender.wait()
