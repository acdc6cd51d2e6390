"""``ckpt export``: weights as one safetensors file."""

from __future__ import annotations

from pathlib import Path

import click

import ckptstore

from . import output
from .command import Session, command
from .progress import progress


@command("export", codes=(3, 4, 5, 8, 9))
@click.argument("root")
@click.argument("file", type=click.Path(path_type=Path))
def COMMAND(session: Session, root: str, file: Path) -> None:
    """Write the weights and buffers of a checkpoint, of all its shards, to the new safetensors file FILE.

    A shared tensor is written once, under the bytewise smallest of its names; its other names stand in the file's
    metadata under "ckptstore", with the root, the step and the names of the buffers. Dtypes that safetensors lacks
    (c32, c128) are refused by name. The finished file is read back; two exports of a root have the same bytes.
    """
    store = session.store()
    digest = store.resolve(root)
    with progress(f"export {digest.short}", quiet=session.json) as bar:
        done = ckptstore.export_weights(store, digest, file, progress=bar)
    if session.json:
        output.record(
            {
                "type": "exported",
                "root": str(digest),
                "file": str(done.path),
                "tensors": done.tensors,
                "bytes": done.size,
                "aliases": dict(done.aliases),
            }
        )
        return
    output.line(f"exported {digest} to {done.path}: {output.count(done.tensors, 'tensor')}, {done.size:,} bytes")
    for name, owner in done.aliases.items():
        output.line(f"{name} is another name of {owner} and stands in the metadata only")
