"""The trainer's commands with the small plan and, on its hosts, workers that need no torch (:mod:`tests.trainer.chain`)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tests.trainer.small import small_profile
from trainer.preparation import planning, prepare

if __name__ == "__main__":
    from trainer.commands import main

    small = small_profile()
    quick = replace(small.timeouts, group=5, heartbeats_missed=2)
    planning.PROFILES = {"demo": replace(small, timeouts=quick)}
    frozen = {**prepare.source_files(), "trainer/__main__.py": Path(__file__).with_name("chain.py").read_bytes()}
    prepare.source_files = lambda: frozen
    sys.exit(main())
