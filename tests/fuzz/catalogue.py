"""All targets by name, and what was found with them: inputs that broke a promise once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.fuzz import documents, files, texts, training
from tests.fuzz.target import Target

FOUND = Path(__file__).parent / "found.json"
"""By target and a name that says what was wrong: the input, as pieces in hex, each with how often it stands there."""


@cache
def targets() -> Mapping[str, Target]:
    """Every target by name."""
    every = [target for room in (documents, texts, files, training) for target in room.targets()]
    assert len({target.name for target in every}) == len(every)
    return {target.name: target for target in every}


def found() -> dict[str, dict[str, bytes]]:
    """What is kept, by target and name."""
    kept = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    return {target: {name: _bytes(said) for name, said in inputs.items()} for target, inputs in kept.items()}


def keep(target: str, name: str, data: bytes) -> None:
    """Add an input to what is kept."""
    every = found()
    every.setdefault(target, {})[name] = data
    text = {kept: {name: _written(every[kept][name]) for name in sorted(every[kept])} for kept in sorted(every)}
    FOUND.write_text(json.dumps(text, indent=1) + "\n")


_REPEATED = re.compile(rb"(.{1,4}?)\1{19,}", re.S)


def _written(data: bytes) -> list[str | int]:
    """Hex of a piece, then how often it stands there, and so on."""
    said: list[str | int] = []
    at = 0
    for run in _REPEATED.finditer(data):
        if run.start() > at:
            said += [data[at : run.start()].hex(), 1]
        said += [run[1].hex(), len(run[0]) // len(run[1])]
        at = run.end()
    return [*said, data[at:].hex(), 1] if at < len(data) else said


def _bytes(said: list[str | int]) -> bytes:
    return b"".join(bytes.fromhex(str(piece)) * int(times) for piece, times in zip(said[::2], said[1::2], strict=True))
