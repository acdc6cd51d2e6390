"""What decides bits: stated, set and measured."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptstore.errors import MalformedError, UsageError
from ckptstore.format import values
from trainer.compute import numerics
from trainer.compute.numerics import Difference, binding, canary, compare, env_for, stored_binding
from trainer.errors import NumericsError

ROOT = Path(__file__).parents[2]


def canary_elsewhere(variables: dict[str, str], threads: int = 1) -> dict[str, str]:
    """The canary of a process that was started with these variables."""
    imports = "import json; from trainer.compute.numerics import apply, canary"
    code = f"{imports}; apply(threads={threads}); print(json.dumps(canary()))"
    clean = {k: v for k, v in os.environ.items() if k not in numerics._VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | variables, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return dict(json.loads(done.stdout))


@pytest.mark.usefixtures("exact_arithmetic")
def test_the_canary_is_the_same_each_time_and_draws_from_no_global_generator() -> None:
    before, python = torch.get_rng_state(), random.getstate()
    first = canary()
    assert canary() == first
    assert set(first) == {"bfloat16", "float32", "matmul.bfloat16", "matmul.float32", "rng"}
    assert all(digest == "unsupported" or len(digest) == 64 for digest in first.values())
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


@pytest.mark.deep
def test_the_canary_of_another_process_is_the_same() -> None:
    assert canary_elsewhere(env_for("native")) == canary_elsewhere(env_for("native"))


@pytest.mark.deep
def test_the_canary_tells_profiles_apart() -> None:
    native, portable = canary_elsewhere(env_for("native")), canary_elsewhere(env_for("portable"))
    assert native["float32"] != portable["float32"]
    assert native["bfloat16"] != portable["bfloat16"]


@pytest.mark.usefixtures("exact_arithmetic")
def test_a_binding_is_plain_values_and_names_no_machine() -> None:
    bound = binding("float32", recompute=False)
    assert all(value is None or type(value) in (str, int, bool) for value in bound.values())
    assert (bound["compute"], bound["recompute"], bound["threads"], bound["deterministic"]) == (
        "float32",
        False,
        1,
        True,
    )
    assert bound["canary.float32"] == canary()["float32"]
    assert os.uname().nodename not in {str(value) for value in bound.values()}
    assert compare(bound, binding("float32", recompute=False)) == []


def test_what_decides_bits_is_told_apart_from_what_describes() -> None:
    expected = {"threads": 1, "torch": "2.13.0", "canary.float32": "aa", "env.MKL_CBWR": None, "compute": "bfloat16"}
    actual = {"threads": 2, "torch": "2.14.0", "canary.float32": "bb", "env.MKL_CBWR": "AVX2", "compute": "bfloat16"}
    assert compare(expected, actual) == [
        Difference("canary.float32", "aa", "bb", refuse=True),
        Difference("env.MKL_CBWR", None, "AVX2", refuse=False),
        Difference("threads", 1, 2, refuse=True),
        Difference("torch", "2.13.0", "2.14.0", refuse=False),
    ]


def test_a_field_that_is_missing_or_of_another_type_is_a_difference() -> None:
    assert compare({"threads": 1}, {}) == [Difference("threads", 1, None, refuse=True)]
    assert compare({"recompute": True}, {"recompute": 1}) == [Difference("recompute", True, 1, refuse=True)]


@pytest.mark.parametrize("wrong", [1, (1,), {1: "a"}, {"a": 1.5}, {"a": (1,)}, {"a": b"b"}])
def test_a_stored_binding_is_flat_and_plain_or_refused(wrong: object) -> None:
    binding = {"threads": 1, "deterministic": True, "env.MKL_CBWR": None, "torch": "2.13.0"}
    assert stored_binding(values.to_json(binding)) == binding
    with pytest.raises(MalformedError, match="numerical binding"):
        stored_binding(values.to_json(wrong))


def test_applying_fixes_threads_and_kernels(exact_arithmetic: None) -> None:
    numerics.apply(threads=1)
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_process_that_was_started_otherwise_cannot_take_a_profile(
    monkeypatch: pytest.MonkeyPatch, exact_arithmetic: None
) -> None:
    for name, value in env_for("portable").items():
        monkeypatch.setenv(name, value)
    numerics.apply(profile="portable")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    with pytest.raises(NumericsError, match="MKL_CBWR is 'COMPATIBLE' instead of 'AVX2,STRICT'"):
        numerics.apply(profile="portable")


def test_profiles_are_known_by_name() -> None:
    assert env_for("native")["OMP_NUM_THREADS"] == env_for("portable")["OMP_NUM_THREADS"] == "1"
    with pytest.raises(UsageError, match="native, portable"):
        env_for("fast")
