"""Sizes as people type them."""

from __future__ import annotations

import re

import click

_UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}} | {
    f"{letter}B": 1000**power for power, letter in enumerate("kMGTP", 1)
}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?)([A-Za-z]{0,3})")


def size(text: str) -> int:
    """Bytes, of 1048576, 500MB, 10GiB; the type of an option. BadParameter for anything else, and for none at all."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise click.BadParameter(f"{text!r:.40} is no size; for instance 1048576, 500MB, 10GiB")
    found = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if found < 1:
        raise click.BadParameter(f"{text!r:.40} is less than a byte")
    return found
