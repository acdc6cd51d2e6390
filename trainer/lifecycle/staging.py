"""Staging: the frozen files that a shard needs, by content from a store to a host, checked before anything runs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptstore import Digest, Store
from ckptstore.errors import RefusedError
from trainer.preparation.staged import check_staged, files_for, left_out
from trainer.workers.hosts import Host


@dataclass(frozen=True, slots=True)
class Staging:
    """One attempt to stage a host: what was copied then, and why it was refused if it was.

    ``bytes`` and ``files`` are those copied in this attempt, ``checked_bytes`` those read again in the check (0 after a
    refusal), ``withheld`` the frozen files that belong to other shards.
    """

    host: str
    shard: int | None
    attempt: int
    files: int
    bytes: int
    checked_bytes: int
    withheld: tuple[str, ...]
    refused: str
    seconds: float


def stage(
    store: Store,
    trees: Mapping[str, Digest],
    host: Host,
    shard: int | None,
    *,
    attempt: int = 1,
    forget: Collection[str] = (),
) -> Staging:
    """Copy what the host does not have yet and check all of it.

    Args:
        store: where the frozen trees are.
        trees: their digests by the name of their folder.
        host: where they go.
        shard: the shard that the host will own; it gets no weights of others. None: no starting weights at all, for a
            worker of other shards than the plan's, which restores a checkpoint.
        attempt: number of this attempt, for the record.
        forget: paths under the host's folder that are left out by mistake, for a drill.

    Raises:
        CorruptError, NotFoundError: the store does not give the bytes. A wrong file on the host is refused instead.
    """
    began = time.monotonic()
    frozen = {folder: store.tree(digest) for folder, digest in trees.items()}
    wanted = files_for(frozen, shard)
    copied = files = 0
    for folder, digest in trees.items():
        paths = [path for path in wanted if path.startswith(f"{folder}/") and path not in forget]
        missing = [path for path in paths if not (host.directory / path).exists()]
        (host.directory / folder).mkdir(exist_ok=True)
        copied += store.get_tree(digest, host.directory / folder, [path.removeprefix(f"{folder}/") for path in missing])
        files += len(missing)
    refused, checked = "", 0
    try:
        checked = check_staged(host.directory, frozen, shard)
    except RefusedError as error:
        refused = str(error)
    return Staging(
        host=host.name,
        shard=shard,
        attempt=attempt,
        files=files,
        bytes=copied,
        checked_bytes=checked,
        withheld=tuple(one.path for one in left_out(frozen, shard)),
        refused=refused,
        seconds=time.monotonic() - began,
    )
