"""``ckpt pull``: fetch a checkpoint from another store."""

from __future__ import annotations

from functools import partial

import click

import ckptstore
from ckptstore.errors import NotFoundError, UsageError

from .command import Session, command, shard_option
from .other_store import other_store
from .transfer import max_age_option, ref_to_move, transfer, within_option


@command("pull", codes=(3, 4, 5, 6, 8, 9))
@click.argument("root")
@click.argument("origin", metavar="[URL|REMOTE]", required=False)
@shard_option("Only this shard, which makes a partial store and moves no ref; may be given several times.")
@click.option("--ref", metavar="NAME", help="Let this ref name it here [default: the same, if ROOT is a ref there].")
@click.option("--no-ref", is_flag=True, help="Move no ref here.")
@click.option("--no-files", is_flag=True, help="Leave out trees of files, which restoring a shard does not need.")
@click.option("--create", is_flag=True, help="Make the store named by --store if there is none.")
@max_age_option
@within_option
def COMMAND(
    session: Session,
    root: str,
    origin: str | None,
    shards: tuple[int, ...],
    ref: str | None,
    no_ref: bool,
    no_files: bool,
    create: bool,
    max_age: float,
    within: float | None,
) -> None:
    """Fetch a checkpoint from the store at URL or from a REMOTE, only what is missing, and read all of it back here.

    Without either it comes from the only remote that there is; see ckpt remote. ROOT is looked up there. No byte is
    used before it is verified.
    """
    with ckptstore.deadline(within):
        source = _source(session, origin)
        digest = source.resolve(root)
        scope = session.scope(source, digest, shards)
        moved = ref_to_move(root, ref, no_ref, scope)
        target = session.store(create=create)
        if no_files and moved is not None:
            raise UsageError("--no-files", f"ref {moved} is to name a whole checkpoint", "add --no-ref or --shard")
        pull = partial(ckptstore.pull, files=not no_files, max_age=int(max_age))
        transfer(session, "pull", pull, source, target, digest, scope, moved)


def _source(session: Session, origin: str | None) -> ckptstore.Store:
    """Where it comes from. Its name may be one that this store knows; a store that is yet to be made knows none, and is
    not made before the other one was found."""
    try:
        here = session.store()
    except NotFoundError:
        if origin is None:
            raise
        return ckptstore.open(origin)
    return other_store(here, origin)
