"""``ckpt import``: a checkpoint of weights from a safetensors file."""

from __future__ import annotations

from pathlib import Path

import click

import ckptstore

from . import output
from .command import Session, command
from .progress import progress


@command("import", codes=(3, 4, 5, 6, 8, 9))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--ref", required=True, metavar="NAME", help="The new ref that is to name the checkpoint.")
@click.option("--step", type=click.IntRange(0), default=0, show_default=True, help="Updates done so far.")
def COMMAND(session: Session, file: Path, ref: str, step: int) -> None:
    """Make a checkpoint of the tensors in a safetensors file, streamed; the new ref NAME names it.

    The checkpoint holds weights alone: no optimizer, no generators, no parent. Of a file written by ckpt export,
    buffers become buffers and the other names of shared tensors become aliases again.
    """
    store = session.store()
    with progress(f"import {file.name}", quiet=session.json) as bar:
        done = ckptstore.import_weights(store, file, ref, step=step, progress=bar)
    if session.json:
        output.record(
            {
                "type": "imported",
                "root": str(done.root),
                "ref": ref,
                "step": step,
                "file": str(file),
                "tensors": done.tensors,
                "bytes": done.nbytes,
            }
        )
    else:
        figures = f"{output.count(done.tensors, 'tensor')}, {done.nbytes:,} bytes"
        output.line(f"imported {file} as {done.root}: {figures}; ref {ref} names it")
