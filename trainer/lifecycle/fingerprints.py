"""The fingerprints of the updates behind a checkpoint: from a group's events, into the checkpoint's tree of files, and
out of it again.

They are in the tree, and not in a note beside the checkpoint, so that the root fixes them. Who makes them up has to
make up a root, and making the updates again finds it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ckptstore import Checkpoint, Digest, Store
from ckptstore.errors import MalformedError
from trainer.lifecycle.expect import require
from trainer.lifecycle.replay import agreed_results
from trainer.workers import fingerprints
from trainer.workers.fingerprints import Fingerprint
from trainer.workers.group import LaunchedGroup

FILE = "fingerprints.jsonl"
LIMIT = 256 * 2**20  # bytes of the file


def taken(group: LaunchedGroup, first: int, last: int) -> tuple[Fingerprint, ...]:
    """The fingerprints of updates ``first`` to ``last`` as a group's workers told them.

    Raises:
        NotAsPlannedError: the workers disagree about an update, or have not made all of these.
        MalformedError: a worker told what is no fingerprint.
    """
    results = agreed_results(group)
    require("updates since the parent", list(range(first, last + 1)), [n for n in results if first <= n <= last])
    told = [group.updates(shard) for shard in range(len(group.hosts))]
    return tuple(
        fingerprints.make(results[update], [fingerprints.state_of(events[update]) for events in told])
        for update in range(first, last + 1)
    )


def put(store: Store, found: Sequence[Fingerprint]) -> Digest:
    """Store fingerprints as the tree of files of a checkpoint; returns its digest."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        path.write_bytes(fingerprints.encode(found))
        path.chmod(0o644)
        return store.put_tree(folder)


def recorded(store: Store, checkpoint: Checkpoint) -> tuple[Fingerprint, ...] | None:
    """The fingerprints that a checkpoint's tree of files has; None if there are none.

    Raises:
        CorruptError, NotFoundError: the store does not give the bytes.
        MalformedError: the file holds something else.
    """
    if checkpoint.files is None:
        return None
    sizes = [file.size for file in store.tree(checkpoint.files).files if file.path == FILE]
    if not sizes:
        return None
    if sizes[0] > LIMIT:
        raise MalformedError(FILE, f"{sizes[0]} bytes, the limit is {LIMIT}")
    with tempfile.TemporaryDirectory() as folder:
        store.get_tree(checkpoint.files, folder, [FILE])
        return fingerprints.parse((Path(folder) / FILE).read_bytes())
