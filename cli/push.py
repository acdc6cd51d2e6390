"""``ckpt push``: copy a checkpoint to another store, or to all that this one knows."""

from __future__ import annotations

from functools import partial

import click

import ckptstore
from ckptstore import CkptStoreError
from ckptstore.errors import NotFoundError, UsageError

from .command import Session, command, shard_option
from .exits import worst
from .other_store import other_store
from .transfer import max_age_option, ref_to_move, transfer, within_option


@command("push", codes=(3, 4, 5, 6, 8, 9))
@click.argument("root")
@click.argument("destination", metavar="[URL|REMOTE]", required=False)
@click.option("--all", "everywhere", is_flag=True, help="Push to every remote; one that fails stops no other.")
@shard_option("Only this shard, which pins it there and moves no ref; may be given several times.")
@click.option("--ref", metavar="NAME", help="Let this ref name it there [default: the same, if ROOT is a ref].")
@click.option("--no-ref", is_flag=True, help="Move no ref there.")
@click.option("--create", is_flag=True, help="Make the destination if there is none.")
@max_age_option
@within_option
def COMMAND(
    session: Session,
    root: str,
    destination: str | None,
    everywhere: bool,
    shards: tuple[int, ...],
    ref: str | None,
    no_ref: bool,
    create: bool,
    max_age: float,
    within: float | None,
) -> int:
    """Copy a checkpoint to the store at URL or to a REMOTE, only what is missing, and read all of it back there.

    Without either it goes to the only remote that there is; see ckpt remote. Bytes that are there already are read and
    hashed as well, and replaced if they are wrong. A ref of the destination moves only if it names nothing, the
    checkpoint itself or an ancestor of it.

    With --all the exit code is that of the worst failure: corrupt before malformed, refused, unreadable, missing.
    """
    if everywhere and destination is not None:
        raise UsageError("--all and a destination", "only one of them can be meant")
    source = session.store()
    digest = source.resolve(root)
    scope = session.scope(source, digest, shards)
    moved = ref_to_move(root, ref, no_ref, scope)
    push = partial(ckptstore.push, max_age=int(max_age))
    with ckptstore.deadline(within):
        if not everywhere:
            target = other_store(source, destination, create=create)
            transfer(session, "push", push, source, target, digest, scope, moved)
            return 0
        remotes = ckptstore.known_remotes(source)
        if not remotes:
            raise NotFoundError(f"remotes of {source.url}", "there are none", "make one known with ckpt remote add")
        codes = []
        for name in remotes:
            try:
                target = ckptstore.open_remote(source, name, create=create)
                transfer(session, "push", push, source, target, digest, scope, moved)
            except CkptStoreError as error:
                codes.append(session.tell(error, f"push to {name}"))
        return worst(codes)
