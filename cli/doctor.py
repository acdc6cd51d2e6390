"""``ckpt doctor``: what a run that resumes from a checkpoint would not get back."""

from __future__ import annotations

from collections import Counter

import click

import ckptstore

from . import output
from .command import Session, command, shard_option

INCOMPLETE = 5
"""Exit code where something severe is missing: resuming would lose or change it."""


@command("doctor", codes=(3, 4, 5, 9))
@click.argument("root")
@shard_option("Only this shard, for a partial store; may be given several times.")
def COMMAND(session: Session, root: str, shards: tuple[int, ...]) -> int:
    """Say what a run that resumes from ROOT would not get back: generators, scheduler, data position, files, binding.

    Only documents are read; whether the bytes are good is what verify says. Each finding is one line: how much it
    matters, what, why, and what to pass when saving. "severe" means that a resumed run goes on otherwise, and decides
    the exit code (5); "warning" that it may, "note" that somebody should know. What a live process lacks before its
    first save is said by ckptstore.inspect_completeness in Python.
    """
    store = session.store()
    digest = store.resolve(root)
    found = ckptstore.inspect_checkpoint(store, digest, session.scope(store, digest, shards))
    for gap in found.findings:
        if session.json:
            output.record(
                {
                    "type": "gap",
                    "severity": gap.severity.value,
                    "part": gap.part.value,
                    "what": gap.what,
                    "why": gap.why,
                    "hint": gap.hint,
                }
            )
        else:
            output.line(str(gap))
    counts = Counter(gap.severity.value for gap in found.findings)
    code = 0 if found.complete else INCOMPLETE
    if session.json:
        totals = {severity: counts[severity] for severity in ("severe", "warning", "note")}
        output.record({"type": "doctor", "root": str(digest), "complete": found.complete, **totals, "exit_code": code})
    else:
        listed = ", ".join(f"{counts[severity]} {severity}" for severity in ("severe", "warning", "note"))
        output.line(f"checkpoint {digest}: {listed}")
    return code
