"""The command ``replay``: its folder, its words, its receipt."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TextIO

import ckptstore
from ckptstore import Store
from ckptstore.errors import BackendError, UsageError
from trainer.lifecycle.expect import NotAsPlannedError
from trainer.lifecycle.journal import Journal
from trainer.replay.lineage import between, resolve
from trainer.replay.replay import Replay
from trainer.workers.group import GroupLostError

DIFFERENT = 1
"""Exit code of a replay that does not lead to what is recorded."""

STORE_VARIABLE = "CKPT_STORE"


def replay(begin: str, end: str, url: str | None, out: Path | None, stream: TextIO, *, anyway: bool = False) -> int:
    """Make the updates between two checkpoints again, say whether all is equal, and keep a receipt in the store if so.

    Args:
        begin: a ref, a root or a prefix of one, or ``start`` for the starting weights.
        end: a descendant of it.
        url: the store; None: the one that CKPT_STORE names.
        out: an empty folder for everything; None: a temporary one, which is kept only where something differs.
        stream: where it is said.
        anyway: go on where this machine computes otherwise.

    Returns:
        0 if equal, 1 if not.

    Raises:
        UsageError: no store was named.
        CkptStoreError: as :meth:`trainer.replay.replay.Replay.run`.
    """
    url = url or os.environ.get(STORE_VARIABLE)
    if not url:
        raise UsageError("replay", f"no --store and no {STORE_VARIABLE}", "say which store holds the two roots")
    store = ckptstore.open(url)
    last = resolve(store, end)
    if last is None:
        raise UsageError("replay", "the start is no checkpoint to replay to", "name a root as the second argument")
    lineage = between(store, resolve(store, begin), last)
    area = Path(tempfile.mkdtemp(prefix="trainer-replay-")).resolve() if out is None else out
    journal = Journal(area / "events" / "controller.jsonl", stream)
    keep = out is not None
    try:
        running = Replay(store, lineage, area, journal, anyway)
        difference = running.run()
        if difference is None:
            _keep_receipt(store, running, journal)
            journal.say(f"equal: {lineage.end.root}")
            return 0
        keep = True
        journal.say(f"DIFFERENT: first in {difference}")
        return DIFFERENT
    except (GroupLostError, NotAsPlannedError):
        keep = True
        raise
    finally:
        if keep:
            journal.say(f"what was made is kept in {area}")
        journal.close()
        if not keep:
            shutil.rmtree(area, ignore_errors=True)


def _keep_receipt(store: Store, running: Replay, journal: Journal) -> None:
    try:
        digest = store.add_receipt(running.receipt())
    except BackendError as error:  # who can only read can replay all the same
        journal.say(f"no receipt is kept: {error}")
    else:
        journal.say(f"receipt {digest.short} is kept in {store.url}")
