"""``ckpt push``: copy a checkpoint to another store."""

from __future__ import annotations

import click

import ckptstore

from .command import Session, command, shard_option
from .transfer import ref_to_move, transfer


@command("push", codes=(3, 4, 5, 6, 8, 9))
@click.argument("root")
@click.argument("url")
@shard_option("Only this shard, which pins it there and moves no ref; may be given several times.")
@click.option("--ref", metavar="NAME", help="Let this ref name it there [default: the same, if ROOT is a ref].")
@click.option("--no-ref", is_flag=True, help="Move no ref there.")
@click.option("--create", is_flag=True, help="Make the destination if there is none.")
def COMMAND(
    session: Session, root: str, url: str, shards: tuple[int, ...], ref: str | None, no_ref: bool, create: bool
) -> None:
    """Copy a checkpoint to the store at URL, only what is missing, and read all of it back there.

    Bytes that are there already are read and hashed as well, and replaced if they are wrong. A ref of the destination
    moves only if it names nothing, the checkpoint itself or an ancestor of it.
    """
    source = session.store()
    digest = source.resolve(root)
    scope = session.scope(source, digest, shards)
    moved = ref_to_move(root, ref, no_ref, scope)
    target = ckptstore.open(url, create=create)
    transfer(session, "push", ckptstore.push, source, target, digest, scope, moved)
