"""A run of the experiment's shape on few documents. As a script: the experiment's command with it. Needs no torch."""

from __future__ import annotations

import sys
from dataclasses import replace

from trainer.data.cohorts import Counts
from trainer.preparation import planning
from trainer.preparation.planning import Profile


def small_profile() -> Profile:
    """The demo's model: two phases of four updates, checkpoints after 2, 4 and 8, the host lost in update 4."""
    demo = planning.profile("demo")
    return replace(
        demo,
        counts=Counts(16, 8, 8, 8, test_a=8, test_b=8, retention=4),
        updates_per_phase=4,
        microbatches=2,
        drill=replace(demo.drill, update=4),
        generate=4,
        token_cap=6,
    )


if __name__ == "__main__":
    from trainer.commands import main

    planning.PROFILES = {"demo": small_profile()}
    sys.exit(main())
