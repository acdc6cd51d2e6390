"""TOML in files that somebody else may have written: its values or an error of ours, in time that grows with it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from typing import Any

from ckptstore.errors import MalformedError

_PARTS = 16
"""Parts of one key; what the library does for a key grows with their square, and ours have three."""

_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")
_ENDS = re.compile(r"[=,\[\]{}\n]")
_PLACE = re.compile(r" \(at line (\d+), column \d+\)$")


def parse_toml(text: str, what: str, hint: str, *, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """The values of a TOML text.

    Args:
        text: of a length that the caller has limited.
        what: whose it is, for messages; the line is added where it is known.
        hint: what to do about an error.
        parse_float: makes a number of the text of one with a fraction or an exponent.

    Raises:
        MalformedError: it is no TOML, is nested too deeply, or holds a number that cannot be read.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _PARTS and any(part.count(".") > _PARTS for part in _ENDS.split(_QUOTED.sub("", line))):
            raise MalformedError(f"{what}, line {number}", f"a key of more than {_PARTS} parts", hint)
    try:
        return tomllib.loads(text, parse_float=parse_float)
    except tomllib.TOMLDecodeError as error:
        at = _PLACE.search(str(error))
        message = str(error)[: at.start()] if at else str(error).removesuffix(" (at end of document)")
        last = int(at[1]) if at else len(text.splitlines())
        raise MalformedError(f"{what}, line {last}", message[:1].lower() + message[1:200], hint) from None
    except RecursionError:
        raise MalformedError(what, "nested too deeply", hint) from None
    except (ValueError, ArithmeticError):  # more digits than are read, an exponent beyond all
        raise MalformedError(what, "holds a number that cannot be read", hint) from None
