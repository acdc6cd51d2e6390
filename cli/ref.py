"""``ckpt ref``: names of checkpoints."""

from __future__ import annotations

import click

from ckptstore.errors import CkptStoreError, NotFoundError

from . import output
from .command import Session, command
from .describe import text
from .exits import epilog, worst


@click.group("ref", epilog=epilog((3, 4, 5, 6, 8, 9)))
def COMMAND() -> None:
    """List, show and move refs. Every move is kept: a ref is a log of generations, and the highest is its head."""


@command("list", codes=(3, 4, 9))
def list_refs(session: Session) -> int:
    """List all refs with generation and root; one whose head is damaged is told, and the rest listed."""
    store = session.store()
    rows = []
    codes = []
    for name in store.refs.names():
        try:
            record = store.refs.head(name)
        except CkptStoreError as error:
            codes.append(session.tell(error))
            continue
        if record is None:
            continue
        if session.json:
            output.record({"type": "ref", "name": name, "generation": record.generation, "root": text(record.root)})
        else:
            rows.append((name, record.generation, record.root or "nothing"))
    output.table(rows, right=frozenset({1}))
    return worst(codes)


@command("show", codes=(3, 4, 9))
@click.argument("name")
def show(session: Session, name: str) -> None:
    """Print the root that the ref NAME names."""
    store = session.store()
    record = store.refs.head(name)
    if record is None:
        raise NotFoundError(f"ref {name}", f"no such ref in {store.url}", "ckpt ref list lists them")
    if session.json:
        output.record({"type": "ref", "name": name, "generation": record.generation, "root": text(record.root)})
    else:
        output.line(str(record.root or "nothing"))


@command("move", codes=(3, 4, 6, 8, 9))
@click.argument("name")
@click.argument("root")
@click.option("--expect", metavar="ROOT", help="Move only if it names this now [default: what is read just before].")
def move(session: Session, name: str, root: str, expect: str | None) -> None:
    """Let the ref NAME, which is made if it is new, name ROOT.

    Nothing is lost: the generation before stays in ckpt ref log. If somebody else moves the ref at the same time, one
    of both wins and the other is told (exit code 6).
    """
    store = session.store()
    digest = store.resolve(root)
    before = store.head(name) if expect is None else store.resolve(expect)
    record = store.move_ref(name, digest, before)
    if session.json:
        moved = {"type": "ref", "name": name, "generation": record.generation, "root": text(record.root)}
        output.record({**moved, "before": text(before)})
    else:
        output.line(f"ref {name} names {digest} (generation {record.generation}), before {before or 'nothing'}")


@command("log", codes=(3, 4, 9))
@click.argument("name")
def log(session: Session, name: str) -> None:
    """List every generation of the ref NAME, newest first."""
    store = session.store()
    if store.refs.head(name) is None:
        raise NotFoundError(f"ref {name}", f"no such ref in {store.url}", "ckpt ref list lists them")
    for record in store.refs.log(name):
        if session.json:
            output.record(
                {
                    "type": "ref",
                    "name": name,
                    "generation": record.generation,
                    "root": text(record.root),
                    "previous": text(record.previous),
                }
            )
        else:
            output.line(f"{record.generation:>6}  {record.root or 'nothing'}")


for _command in (list_refs, show, move, log):
    COMMAND.add_command(_command)
