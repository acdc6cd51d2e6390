"""``ckpt ls``: the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import click

from ckptstore import Digest, Store

from . import output
from .command import Session, command, shard_option

_COLUMNS = ("shard", "role", "path", "dtype", "shape", "bytes", "digest")


@command("ls", codes=(3, 4, 9))
@click.argument("root")
@click.option("--role", default="*", metavar="GLOB", help="Only roles that fit, such as weight or 'optim/*/exp_avg'.")
@click.option("--path", default="*", metavar="GLOB", help="Only paths that fit, such as 'layers.3.*'.")
@shard_option("Only this shard; may be given several times.")
def COMMAND(session: Session, root: str, role: str, path: str, shards: tuple[int, ...]) -> None:
    """List the tensors of a checkpoint: shard, role, path, dtype, shape, length in bytes, tensor digest.

    Other names of shared tensors are listed with the role alias, and their owner in place of a digest.
    """
    store = session.store()
    digest = store.resolve(root)
    rows = []
    for row in _rows(store, digest, session.scope(store, digest, shards)):
        if not (fnmatchcase(str(row["role"]), role) and fnmatchcase(str(row["path"]), path)):
            continue
        if session.json:
            output.record({"type": "tensor", **row})
        else:
            short = str(row["digest"])[3:15] if row["digest"] is not None else f"is {row['owner']}"
            shown = {**row, "digest": short, "bytes": f"{row['bytes']:,}"}
            rows.append(tuple(shown[column] for column in _COLUMNS))
    if rows:
        output.table([_COLUMNS, *rows], right=frozenset({5}))


def _rows(store: Store, root: Digest, shards: tuple[int, ...] | None) -> Iterator[dict[str, object]]:
    closure = store.closure(root, shards, files=False)
    for index, view in sorted(closure.shards.items()):
        for entry in view.tensors():
            yield {
                "shard": index,
                "role": "/".join(entry.role),
                "path": entry.path,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "digest": str(entry.digest),
                "owner": None,
            }
        for alias in view.shard.aliases:
            yield _alias(index, alias.path, alias.owner)
    for tie in closure.checkpoint.ties if closure.checkpoint else ():
        yield _alias(None, tie.path, tie.owner)


def _alias(shard: int | None, path: str, owner: str) -> dict[str, object]:
    nothing: dict[str, object] = {"dtype": "", "shape": "", "bytes": 0, "digest": None}
    return {"shard": "" if shard is None else shard, "role": "alias", "path": path, **nothing, "owner": owner}
