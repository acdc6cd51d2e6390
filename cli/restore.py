"""``ckpt restore``: a checkpoint as an ordinary directory."""

from __future__ import annotations

from pathlib import Path

import click

import ckptstore

from . import output
from .command import Session, command, shard_option
from .progress import progress


@command("restore", codes=(3, 4, 5, 8, 9))
@click.argument("root")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@shard_option("Only this shard; may be given several times.")
def COMMAND(session: Session, root: str, directory: Path, shards: tuple[int, ...]) -> None:
    """Write a checkpoint as a directory of safetensors and JSON that needs none of this to be read.

    DIR must be new or empty; it appears when it is whole, or not at all. It holds checkpoint.json (progress, binding,
    roots), and for each shard shard-N/ with model.safetensors (weights and buffers), one safetensors file for each
    optimizer role, shard.json (hyper-parameters, generators, aliases, values with all their bits) and raw/ for dtypes
    that safetensors lacks; and, if all shards are asked for, files/ that belong to the checkpoint.
    """
    store = session.store()
    digest = store.resolve(root)
    scope = session.scope(store, digest, shards)
    with progress(f"restore {digest.short}", quiet=session.json) as bar:
        done = ckptstore.extract_checkpoint(store, digest, directory, scope, progress=bar)
    if session.json:
        output.record(
            {
                "type": "restored",
                "root": str(digest),
                "directory": str(done.directory),
                "shards": list(done.shards),
                "files": done.files,
                "bytes": done.size,
            }
        )
    else:
        listed = ", ".join(str(shard) for shard in done.shards)
        figures = f"shards {listed}; {output.count(done.files, 'file')}, {done.size:,} bytes"
        output.line(f"restored {digest} to {done.directory}: {figures}")
