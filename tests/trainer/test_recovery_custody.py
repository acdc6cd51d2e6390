"""Who is in charge of a run: one controller, and after it nobody before all that it started is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
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
    killing = tmp_path / "killing"
    with subprocess.Popen(["sh", "-c", f"sleep 0.2; touch {killing}; kill {child.pid}"]), Custody(tmp_path):
        assert killing.exists()
    child.communicate()
    assert child.returncode == -signal.SIGTERM
