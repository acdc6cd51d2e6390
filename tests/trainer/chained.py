"""The trainer's commands with the small plan and workers that need no torch (:mod:`tests.trainer.chain`)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tests.trainer.small import small_profile
from trainer.preparation import planning, prepare

if __name__ == "__main__":
    from trainer.commands import main

    small = small_profile()
    patient = replace(small.timeouts, heartbeats_missed=10)  # nobody is taken for lost because the machine is busy
    planning.PROFILES = {"demo": replace(small, timeouts=patient)}
    # One file instead of hundreds that are stored and staged each time: it finds the others where they are.
    worker = Path(__file__).with_name("chain.py").read_text()
    project = f"PROJECT = {str(prepare.TRAINER.parent)!r}"
    frozen = {"trainer/__main__.py": worker.replace('PROJECT = ""', project).encode()}
    prepare.source_files = lambda: frozen
    sys.exit(main())
