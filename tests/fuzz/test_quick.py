"""Whatever arrives where something is parsed: it is a value, or an error of ours, in bounded time and memory.

A run here is short and always the same; tests/fuzz/test_guided.py is the long one (docs/fuzzing.md).
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from ckptstore.errors import CkptStoreError, RefusedError
from tests.fuzz.catalogue import found, targets
from tests.fuzz.minimise import complaint, minimised
from tests.fuzz.plain import fuzz
from tests.fuzz.target import MEMORY, Finding, Target, accepts, peak_memory
from tests.fuzz.watch import watched

RUNS = {
    "command-line": 40,
    "safetensors-import": 15,
    "chat-template": 60,
    "evidence-archive": 150,
    "gguf": 200,
    "vocabulary": 60,
    "config": 150,
}
BOMBS = [(name, bomb) for name, target in targets().items() for bomb in target.bombs]
FOUND = [(name, wrong) for name, inputs in found().items() for wrong in inputs]

by_target = pytest.mark.parametrize("name", targets())


@by_target
def test_whatever_arrives_is_a_value_or_an_error_of_ours(name: str, tmp_path: Path) -> None:
    assert fuzz(targets()[name], RUNS.get(name, 400), Random(name), tmp_path) == {}


@by_target
def test_some_of_what_is_tried_is_accepted(name: str, tmp_path: Path) -> None:
    """Else nothing would be tried but the first check of a parser."""
    target = targets()[name]
    assert any(accepts(target, data, tmp_path) for data in target.seeds())


@pytest.mark.parametrize(("name", "wrong"), FOUND)
def test_what_was_found_once_is_not_found_again(name: str, wrong: str, tmp_path: Path) -> None:
    assert complaint(targets()[name], found()[name][wrong], tmp_path) is None


@pytest.mark.parametrize(("name", "bomb"), BOMBS)
def test_no_input_within_the_limits_is_slow_or_large(name: str, bomb: str, tmp_path: Path) -> None:
    """A small part of what is allowed, so that the suite stays quick; the watch ends what would take for ever."""
    target = targets()[name]
    data = target.bombs[bomb](target.bomb_bytes // 64)
    with watched():
        peak = peak_memory(target, data, tmp_path)
    assert peak <= target.per_byte * len(data) + MEMORY


@pytest.mark.deep
@pytest.mark.parametrize(("name", "bomb"), BOMBS)
def test_no_input_as_long_as_allowed_is_slow_or_large(name: str, bomb: str, tmp_path: Path) -> None:
    target = targets()[name]
    with watched():
        accepts(target, target.bombs[bomb](target.bomb_bytes), tmp_path)
    data = target.bombs[bomb](target.bomb_bytes // 8)  # measuring memory takes several times as long
    assert peak_memory(target, data, tmp_path) <= target.per_byte * len(data) + MEMORY


def test_a_broken_promise_is_seen_and_made_short(tmp_path: Path) -> None:
    def run(data: bytes, _folder: Path) -> None:
        if b"bug" in data:
            raise KeyError(data)
        if b"no" in data:
            raise RefusedError("it", "no")
        if b"long" in data:
            raise CkptStoreError("a" * 100_000)

    target = Target("broken", run, lambda: [b"a"], 100)
    assert accepts(target, b"a", tmp_path)
    assert not accepts(target, b"no", tmp_path)
    with pytest.raises(Finding, match="characters"):
        accepts(target, b"long", tmp_path)
    with pytest.raises(Finding, match="KeyError"):
        accepts(target, b"a bug", tmp_path)
    assert minimised(target, b"this is a bug, and so on", tmp_path) == b"bug"
    wordy = Target("broken", run, lambda: [b"a"], 100, words=(b"bug",))
    assert len(fuzz(wordy, 200, Random(1), tmp_path)) == 1
