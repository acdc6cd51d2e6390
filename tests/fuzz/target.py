"""A fuzz target: one parser, the property that it keeps for every input, and what a mutator has to know about it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from ckptstore.errors import CkptStoreError

Run: TypeAlias = "Callable[[bytes, Path], None]"
"""Parses bytes; may write below the folder. Returns if they are accepted and every promise about an accepted input
holds, raises CkptStoreError if they are refused, and AssertionError if a promise is broken."""

Tree: TypeAlias = "Any"
"""What ``json.loads`` makes."""

MESSAGE = 16 * 1024
"""Characters of a message, at most: an input must not come back whole in what is said about it."""

MEMORY = 2**20
"""Bytes that any parser may take beside a multiple of its input."""


@dataclass(frozen=True, slots=True)
class Target:
    """One parser.

    Args:
        name: as it is typed.
        run: see :data:`Run`.
        seeds: inputs to begin with, most of them accepted.
        limit: bytes of an input, at most; the parser refuses longer ones before it looks into them.
        words: what a mutator puts in besides what it does by itself.
        load, dump: the JSON inside an input, and the input of changed JSON; None for an input that holds none.
        seal: makes digests that an input carries fit again, in place.
        bombs: by name, an input of about so many bytes that is meant to be slow or large.
        bomb_bytes: of these inputs.
        per_byte: bytes of memory for each byte of an input, at most.
        executions: share of the coverage-guided run, in thousands.
    """

    name: str
    run: Run
    seeds: Callable[[], list[bytes]]
    limit: int
    words: tuple[bytes, ...] = ()
    load: Callable[[bytes], Tree] | None = None
    dump: Callable[[bytes, Tree], bytes] | None = None
    seal: Callable[[Tree], None] | None = None
    bombs: Mapping[str, Callable[[int], bytes]] = field(default_factory=dict)
    bomb_bytes: int = 2**20
    per_byte: int = 80
    executions: int = 100
    also: Callable[[Random, bytes], bytes] | None = None


class Finding(Exception):
    """A promise that an input broke."""

    def __init__(self, target: str, what: str) -> None:
        super().__init__(f"{target}: {what}")


class TookTooLong(BaseException):
    """One input took so much of the processor's time that it hangs; raised by the watch in tests/fuzz/watch.py."""


def accepts(target: Target, data: bytes, folder: Path) -> bool:
    """Give ``data`` to the parser; whether it was accepted.

    Raises:
        Finding: anything else came of it than a value or an error of ours with a message for people.
    """
    try:
        target.run(data, folder)
    except CkptStoreError as error:
        said = str(error)
        if len(said) > MESSAGE:
            raise Finding(target.name, f"a message of {len(said)} characters") from error
        return False
    except AssertionError as error:
        raise Finding(target.name, f"broke a promise: {error}") from error
    except (KeyboardInterrupt, TookTooLong):
        raise
    except BaseException as error:  # a panic in a library of another language is no Exception
        raise Finding(target.name, f"raised {type(error).__name__}: {error!s:.300}") from error
    return True


def peak_memory(target: Target, data: bytes, folder: Path) -> int:
    """Bytes of Python memory at most in use at one time while ``data`` is parsed."""
    tracemalloc.start()
    try:
        accepts(target, data, folder)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def load_json(data: bytes) -> Tree:
    """The JSON of an input that is nothing else."""
    return json.loads(data)


def dump_json(_data: bytes, tree: Tree) -> bytes:
    """Canonical JSON where there is such, else any."""
    try:
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    except (TypeError, UnicodeEncodeError):
        return json.dumps(tree, separators=(",", ":")).encode()
