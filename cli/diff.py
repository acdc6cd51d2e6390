"""``ckpt diff``: what is not the same in two checkpoints."""

from __future__ import annotations

import click

import ckptstore

from . import output
from .command import Session, command


@command("diff", codes=(1, 3, 4, 9))
@click.argument("left")
@click.argument("right")
@click.option("--other", metavar="URL", help="The store that has RIGHT [default: the same].")
def COMMAND(session: Session, left: str, right: str, other: str | None) -> int:
    """Compare two checkpoints: step, parent, progress, generators, binding, hyper-parameters, and every tensor.

    Where digests agree only documents are read. For tensors that differ: elements that differ, largest absolute and
    relative difference, largest distance in ULP, NaNs, index of the first. Bits decide what is equal. Says so if both
    are the same state in another layout or with other generators; exit code 0 means one and the same root.
    """
    store = session.store()
    found = store.diff(left, right, ckptstore.open(other) if other else None)
    if session.json:
        output.record({"type": "diff", **found.to_json()})
    else:
        for text in found.lines():
            output.line(text)
    return found.exit_code
