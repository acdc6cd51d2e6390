"""Durations as people type them."""

from __future__ import annotations

import re

import click

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd]?)")


def duration(text: str) -> float:
    """Seconds, of 3600, 90m, 12h or 7d; the type of an option. BadParameter for anything else."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r:.40} is no duration; for instance 3600, 90m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]
