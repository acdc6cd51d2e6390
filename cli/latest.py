"""``ckpt latest``: the newest checkpoint of a ref that is whole."""

from __future__ import annotations

import click

import ckptstore
from ckptstore import CkptStoreError, Latest, Store
from ckptstore.errors import NotFoundError, UsageError

from . import output
from .command import Session, command
from .describe import text
from .progress import progress


@command("latest", codes=(3, 4, 9))
@click.argument("ref", required=False)
def COMMAND(session: Session, ref: str | None) -> None:
    """Print the checkpoint that a run would resume from: what REF names, read back and verified.

    Only where its closure fails (something of it is damaged or missing, or it was retired), the newest ancestor that is
    whole is printed. Each one passed over is told on stderr, with the reason and the command that may repair it, and
    the exit code is 0. If nothing is whole, all of them are listed in the error. Nothing is chosen by name, number or
    time, and a storage that does not answer is an error and no damage.

    Without REF it is the only ref that there is. Trees of files are not read, since no restore needs them. If the store
    can be written, a receipt is kept of what was read.
    """
    store = session.store()
    with progress("latest", quiet=session.json) as bar:
        found = ckptstore.latest(store, _only(store) if ref is None else ref, bar)
    if found.root is None or found.checkpoint is None:
        raise NotFoundError(f"ref {found.ref}", f"it names no checkpoint in {store.url}", "ckpt ref list lists refs")
    for item in found.skipped:
        session.note(f"passed over {item}; {item.repair} may bring it back")
    if found.move:
        session.note(f"to go on from here, let the ref name it first: {found.move}")
    kept = _keep_receipt(session, store, found)
    if session.json:
        output.record(
            {
                "type": "latest",
                "ref": found.ref,
                "head": text(found.head),
                "root": text(found.root),
                "step": found.checkpoint.step,
                "bytes_read": found.report.bytes_read if found.report else 0,
                "method": found.report.method.value if found.report else "none",
                "receipt": kept,
                "move": found.move or None,
                "skipped": [
                    {"root": str(item.root), "step": item.step, "reason": item.reason, "repair": item.repair}
                    for item in found.skipped
                ],
            }
        )
    else:
        output.line(str(found.root))


def _only(store: Store) -> str:
    names = store.refs.names()
    if len(names) != 1:
        why = f"none was given, and {store.url} has {output.count(len(names), 'ref')}"
        raise UsageError("REF", why, f"give one of: {', '.join(names) or 'there is none'}")
    return names[0]


def _keep_receipt(session: Session, store: Store, found: Latest) -> bool:
    assert found.report is not None
    try:
        store.add_receipt(found.receipt(store.url))
    except CkptStoreError as error:
        session.note(f"no receipt is kept: {error}")
        return False
    return True
