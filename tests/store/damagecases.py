"""What becomes of each kind of key under each kind of damage.

``python -m tests.store.damagecases`` writes it into docs/damage.md; tests/store/test_corruption_matrix.py does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ckptstore
from ckptstore.errors import CkptStoreError
from ckptstore.findings import exit_code
from ckptstore.repairs.repair import repair
from tests.support.damages import DAMAGES, World

NOTHING = "–"
"""Nothing is wrong, or nothing that anybody could see."""

STORE, COPY, ITSELF, ASIDE, NOBODY = "s", "c", "o", "a", "n"
"""Repaired from any store that has the checkpoint; from a plain copy of this one; from what it says itself or what
others say of it; put aside; by nobody."""


def verify(world: World) -> int:
    """``ckpt verify main``."""
    return world.open().verify("main").exit_code


def see_receipts(world: World) -> int:
    """``ckpt durability main``."""
    return exit_code(ckptstore.ledger(world.open(), [world.second]).findings)


def see_scope(world: World) -> int:
    """What every command asks first of a checkpoint that is pinned."""
    world.open().scope(world.second)
    return 0


def see_retirements(world: World) -> int:
    """``ckpt repair main --dry-run``, which looks at them all."""
    done = repair(world.open(), world.second, dry_run=True, remotes=False)
    return 3 if any(item.key.startswith("retired/") for item in done.healed) else done.exit_code


def enter(world: World) -> int:
    """Any command: it opens the store."""
    return 0 if world.open().url else 1


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of key.

    Args:
        finds: the operation that finds damage of it.
        codes: the exit code with which it does, for each damage of ``DAMAGES`` in turn; ``-`` where it finds nothing.
        healed: by whom, likewise.
        told: what a finding calls it.
    """

    finds: Callable[[World], int]
    codes: str
    healed: str
    told: str = ""


def code(kind: str, damage: str) -> int:
    """The exit code of the operation that finds it; 0 if nothing does."""
    found = KINDS[kind].codes[list(DAMAGES).index(damage)]
    return 0 if found == "-" else int(found)


def healer(kind: str, damage: str) -> str:
    """Who heals it, ``-`` if there is nothing to heal."""
    return KINDS[kind].healed[list(DAMAGES).index(damage)]


_OF_CLOSURE = ("333333433333333-", "sssssssssssssss-")

KINDS: dict[str, Kind] = {
    "checkpoint": Kind(verify, *_OF_CLOSURE, "checkpoint document"),
    "shard": Kind(verify, *_OF_CLOSURE, "shard document"),
    "page": Kind(verify, *_OF_CLOSURE, "page 0"),
    "tree": Kind(verify, *_OF_CLOSURE, "plan tree"),
    "preparation": Kind(verify, *_OF_CLOSURE, "preparation"),
    "chunk": Kind(verify, *_OF_CLOSURE, "chunk 0"),
    "pack": Kind(verify, *_OF_CLOSURE, "pack 0"),
    "file": Kind(verify, *_OF_CLOSURE, "files tree|inputs tree|sources tree"),
    "ancestor": Kind(verify, *_OF_CLOSURE, "ancestor"),
    "ref, newest": Kind(verify, "333333-33333333-", "oooccc-cccccccc-", "ref main generation 2"),
    "ref, earlier": Kind(verify, "333333433334333-", "ooocccccccccccc-", "ref main generation 1"),
    "receipt": Kind(see_receipts, "939999-93399333-", "cccccc-cccccccc-"),
    "pin": Kind(see_scope, "333333-33333333-", "cccccc-cccccccc-"),
    "retirement": Kind(see_retirements, "333333-33333333-", "oooooo-oooooooo-"),
    "lease": Kind(verify, "----------------", "----------------"),
    "feature": Kind(enter, "-----------9333-", "oooooo-oooooooo-"),
    "header": Kind(enter, "999999499993333-", "ooooooooooooooo-"),
}


def observe(world: World, kind: str) -> int:
    """The exit code of the operation that finds damage of a kind."""
    try:
        return KINDS[kind].finds(world)
    except CkptStoreError as error:
        return error.exit_code


def table() -> str:
    """All of it in Markdown: a row for each damage, a column for each kind."""
    head = ["damage", *KINDS]
    rows = [[damage, *(_shown(kind, damage) for kind in KINDS)] for damage in DAMAGES]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _shown(kind: str, damage: str) -> str:
    found, by = code(kind, damage), healer(kind, damage)
    if not found and by == "-":
        return NOTHING
    return f"{found or NOTHING} {by if by != '-' else NOBODY}"


def written(page: str) -> str:
    """``page`` with the present table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


PAGE = Path(__file__).parents[2] / "docs" / "damage.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
