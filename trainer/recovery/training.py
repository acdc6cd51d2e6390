"""A run from its command to its last line: whoever is in charge, what is reached, and what to do next."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from ckptstore.errors import RefusedError, UsageError
from trainer.errors import of_system
from trainer.lifecycle.access import S3, check, near, reach
from trainer.lifecycle.expect import require
from trainer.lifecycle.journal import Journal
from trainer.recovery.controller import Controller
from trainer.recovery.custody import CONTROLLER, Custody
from trainer.recovery.journal import RunJournal
from trainer.recovery.settings import RunSettings, require_same
from trainer.recovery.state import State, fold
from trainer.recovery.times import table

JOURNAL = "journal.jsonl"


def run_training(settings: RunSettings, stream: TextIO) -> State:
    """Train to the end of the plan below ``settings.out``, or go on there; returns where the run stands.

    Raises:
        UsageError: it was begun with other settings.
        RefusedError: the folder holds something else; or no spare host is left, and the run is kept.
        ConflictError: another controller is in charge.
        CkptStoreError: anything else; the run is kept, and the same command goes on with it.
    """
    out = settings.out
    _check_folder(out)
    with Custody(out) as custody:
        memory = RunJournal(out / JOURNAL)
        people = Journal(out / "events" / "controller.jsonl", stream)
        try:
            begun = fold(memory.entries).begun
            require_same(settings, begun)
            if begun is not None and begun.operator:
                settings = replace(settings, operator=begun.operator)
            with reach(settings.operator, out, "") as access:
                state = Controller(settings, custody, access, memory, people).run()
            require("torch imported by the controller", False, "torch" in sys.modules)
            _closing_words(settings, state, people)
            return state
        except OSError as error:
            raise of_system(error, f"the run in {out}") from error
        finally:
            people.close()
            memory.close()


def check_operator(operator: str | None) -> None:
    """That a run could use this store; errors as in :func:`trainer.lifecycle.access.check`."""
    if operator == S3:
        why = "a server that a run starts ends with its controller, and the run has to outlive that"
        raise UsageError(f"operator {S3}", why, "start one by itself, and name its bucket: s3://bucket/prefix")
    check(operator)


def _check_folder(out: Path) -> None:
    """The folder is absent, empty, or one of a run."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()) and not (out / CONTROLLER).exists():
        raise RefusedError(f"folder {out}", "it is not empty, and holds no run", "name another one with --out")


def _closing_words(settings: RunSettings, state: State, people: Journal) -> None:
    assert state.begun is not None
    assert state.finished is not None
    store = str(near(settings.out / "operator")) if settings.operator is None else settings.operator
    lines = [
        "",
        *table(state.recovered),
        *([""] if state.recovered else []),
        f"prepared identity  {state.begun.identity}",
        f"updates            {state.begun.last}, committed after {', '.join(map(str, state.begun.commits))}",
        f"root               {state.finished.root}",
        f"state root         {state.finished.state_root}",
        f"hosts              {state.made} in all, {len(state.lost)} lost",
        f"journal            {near(settings.out / JOURNAL)}",
        "",
        "next, for instance:",
        f"  ckpt --store {store} log {state.begun.ref}",
        f"  ckpt --store {store} verify {state.begun.ref}",
    ]
    for line in lines:
        print(line, file=people.stream, flush=True)
