"""How a command ends that was interrupted. Imports next to nothing: it has to be there before all else is."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def interrupted() -> int:
    """Say so in one line; returns the exit code."""
    print("trainer: interrupted; no worker is left, and what was made is kept", file=sys.stderr)
    return INTERRUPTED
