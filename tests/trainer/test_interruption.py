"""Ctrl-C, however early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", ["argparse", "ckptstore.errors", "trainer.preparation.plan"])
def test_ctrl_c_during_the_imports_is_one_line_and_exit_code_130(tmp_path: Path, module: str) -> None:
    """Python says which modules it has imported, so the signal comes when a certain one just was."""
    command = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "trainer", "lifecycle", "--out", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert command.stderr is not None
    for line in command.stderr:
        if line.split("|")[-1].strip() == module:
            break
    command.send_signal(signal.SIGINT)
    out, errors = command.communicate(timeout=60)
    said = [line for line in errors.splitlines() if not line.startswith("import time:")]
    assert said == ["trainer: interrupted; no worker is left, and what was made is kept"]
    assert command.returncode == 130, out
    assert not (tmp_path / "run").exists() or "FAILED" in out
