"""Exit codes and what they mean, for help pages."""

from __future__ import annotations

from collections.abc import Iterable

MEANINGS = {
    0: "done, nothing is wrong",
    1: "the two checkpoints are different",
    2: "wrong arguments, or a prefix that fits several checkpoints",
    3: "corrupt: stored bytes are not what they should be",
    4: "missing: no such store, ref, checkpoint, key or file",
    5: "refused, because it would lose or change something, or things do not fit together",
    6: "conflict: somebody else moved the ref, or holds what is needed",
    7: "the storage failed, or a bug",
    8: "no space left",
    9: "malformed document, or of a version that this release does not know",
    130: "interrupted; what was written is whole",
}

USAGE = 2
INTERNAL = 7
INTERRUPTED = 130
ALWAYS = (0, USAGE, INTERNAL, INTERRUPTED)

_WORST_FIRST = (3, 9, 5, 7, 4)


def epilog(codes: Iterable[int]) -> str:
    """The list of exit codes at the end of a help page; those that every command can return are added."""
    lines = [f"  {code:<4} {MEANINGS[code]}" for code in sorted({*ALWAYS, *codes})]
    return "\n".join(["\b", "Exit codes:", *lines])


def worst(codes: Iterable[int]) -> int:
    """The exit code for several findings or roots: corrupt before malformed, refused, unreadable, missing."""
    found = set(codes) - {0}
    return next((code for code in _WORST_FIRST if code in found), max(found, default=0))
