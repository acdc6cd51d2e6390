"""Ten million inputs, guided by coverage: as tests/fuzz/test_quick.py, for the twenty minutes that `make deep` has."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz.catalogue import targets

ROOT = Path(__file__).resolve().parents[2]

LONGEST_FIRST = sorted(targets(), key=lambda name: -targets()[name].executions)


def test_there_are_ten_million_executions_in_all() -> None:
    assert sum(target.executions for target in targets().values()) * 1000 >= 10_000_000


@pytest.mark.deep
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris has no wheel for this system: requirements-deep.txt")
@pytest.mark.parametrize("name", LONGEST_FIRST)
def test_nothing_breaks_a_promise_where_coverage_leads(name: str, tmp_path: Path) -> None:
    runs = targets()[name].executions * 1000
    words = ["--target", name, "--runs", str(runs), "--artifacts", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    told = done.stderr[-3000:]
    left = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert (done.returncode, left) == (0, {}), told
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert executed is not None, told
    assert int(executed[1]) >= runs
