"""Making an input that breaks a promise as short as it can be and still break it in the same way."""

from __future__ import annotations

import re
from pathlib import Path

from tests.fuzz.target import Finding, Target, TookTooLong, accepts
from tests.fuzz.watch import watched

_TRIES = 20_000


def complaint(target: Target, data: bytes, folder: Path) -> str | None:
    """What an input does that it must not, without the details that differ from input to input; None for nothing."""
    try:
        with watched():
            accepts(target, data, folder)
    except Finding as finding:
        return re.sub(r"[0-9]+|'.*", "", str(finding))[:120]
    except TookTooLong:
        return "took too long"
    return None


def minimised(target: Target, data: bytes, folder: Path) -> bytes:
    """The shortest input found that is complained of as ``data`` is."""
    wanted = complaint(target, data, folder)
    tries = 0
    size = max(1, len(data) // 2)
    while size:
        at, shorter = 0, False
        while at < len(data) and tries < _TRIES:
            without = data[:at] + data[at + size :]
            tries += 1
            if complaint(target, without, folder) == wanted:
                data, shorter = without, True
            else:
                at += size
        size = size if shorter and size > 1 else size // 2
    return data
