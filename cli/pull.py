"""``ckpt pull``: fetch a checkpoint from another store."""

from __future__ import annotations

from functools import partial

import click

import ckptstore
from ckptstore.errors import UsageError

from .command import Session, command, shard_option
from .transfer import ref_to_move, transfer


@command("pull", codes=(3, 4, 5, 6, 8, 9))
@click.argument("root")
@click.argument("url")
@shard_option("Only this shard, which makes a partial store and moves no ref; may be given several times.")
@click.option("--ref", metavar="NAME", help="Let this ref name it here [default: the same, if ROOT is a ref there].")
@click.option("--no-ref", is_flag=True, help="Move no ref here.")
@click.option("--no-files", is_flag=True, help="Leave out trees of files, which restoring a shard does not need.")
@click.option("--create", is_flag=True, help="Make the store named by --store if there is none.")
def COMMAND(
    session: Session,
    root: str,
    url: str,
    shards: tuple[int, ...],
    ref: str | None,
    no_ref: bool,
    no_files: bool,
    create: bool,
) -> None:
    """Fetch a checkpoint from the store at URL into this one, only what is missing, and read all of it back here.

    ROOT is looked up at URL. No byte is used before it is verified.
    """
    source = ckptstore.open(url)
    digest = source.resolve(root)
    scope = session.scope(source, digest, shards)
    moved = ref_to_move(root, ref, no_ref, scope)
    target = session.store(create=create)
    if no_files and moved is not None:
        raise UsageError("--no-files", f"ref {moved} is to name a whole checkpoint", "add --no-ref or --shard")
    pull = partial(ckptstore.pull, files=not no_files)
    transfer(session, "pull", pull, source, target, digest, scope, moved)
