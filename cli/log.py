"""``ckpt log``: lineage, newest first."""

from __future__ import annotations

import click

from ckptstore import CkptStoreError, Digest, Receipt, Store

from . import describe, output
from .command import Session, command
from .exits import worst


@command("log", codes=(3, 4, 9))
@click.argument("roots", metavar="[ROOT]...", nargs=-1)
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="At most N checkpoints of each lineage.")
def COMMAND(session: Session, roots: tuple[str, ...], limit: int | None) -> int:
    """List checkpoints and their ancestors, newest first; without ROOT those of all refs.

    The last column is the newest receipt of a verify, push or pull that read every byte back from where it is kept. A
    receipt is a note that anyone who can write the store can forge: proof is to run ckpt verify. What is damaged ends
    its lineage and is told, and the other lineages are listed.
    """
    store = session.store()
    heads = [store.resolve(name) for name in roots] if roots else None
    names, faults = _refs(store)
    rows: list[tuple[object, ...]] = []
    seen: set[Digest] = set()
    for head in names if heads is None else heads:
        parent: Digest | None = None
        try:
            for number, (root, checkpoint) in enumerate(store.history(head)):
                if root in seen or number == limit:
                    break
                seen.add(root)
                parent = checkpoint.parent
                receipts = store.readbacks(root)
                refs = names.get(root, [])
                if session.json:
                    kept = [describe.receipt(receipt) for receipt in receipts]
                    output.record(describe.checkpoint(root, checkpoint) | {"refs": refs, "receipts": kept})
                else:
                    state = checkpoint.state_root.short
                    rows.append((root.short, f"step {checkpoint.step}", state, ", ".join(refs), _mark(receipts)))
            else:
                if parent is not None:
                    session.note(f"history ends here: the parent {parent} is not in this store")
        except CkptStoreError as error:
            faults.append(error)
    if rows:
        output.table([("root", "step", "state", "refs", "receipt"), *rows])
    elif not session.json and not faults:
        session.note(f"no ref in {store.url} names a checkpoint")
    return worst(session.tell(error) for error in faults)


def _refs(store: Store) -> tuple[dict[Digest, list[str]], list[CkptStoreError]]:
    """Names of refs by the root that they name, and what is wrong with the others."""
    found: dict[Digest, list[str]] = {}
    faults: list[CkptStoreError] = []
    for name in store.refs.names():
        try:
            root = store.head(name)
        except CkptStoreError as error:
            faults.append(error)
            continue
        if root is not None:
            found.setdefault(root, []).append(name)
    return found, faults


def _mark(receipts: list[Receipt]) -> str:
    return f"{receipts[-1].operation} {receipts[-1].method} {receipts[-1].time}" if receipts else "-"
