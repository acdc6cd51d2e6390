"""``ckpt gc``: let checkpoints go that nobody needs, and delete what nothing leads to."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import click

import ckptstore
from ckptstore import Collection, KeepBest, KeepEverySteps, KeepEveryTime, KeepLast, Policy, Store
from ckptstore.errors import BackendError, RefusedError, UsageError

from . import describe, output
from .command import Session, command
from .duration import duration
from .progress import progress

_BEST = re.compile(r"([0-9]{1,9}):(.+?)(?::(max|min))?")


def _best(text: str) -> KeepBest:
    """The type of ``--keep-best``."""
    match = _BEST.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r:.60} is not of the form N:METRIC or N:METRIC:min; for instance 3:loss:min")
    return KeepBest(int(match[1]), match[2], match[3] or "max")


_best.__name__ = "n:metric[:min|max]"


@command("gc", codes=(3, 4, 5, 6, 8, 9))
@click.option("--keep-last", type=int, metavar="N", help="Keep the newest N of each lineage.")
@click.option("--keep-every", type=int, metavar="STEPS", help="Keep the first at or after each multiple of STEPS.")
@click.option("--keep-every-time", type=duration, metavar="DURATION", help="Keep the first in each span of 6h, 7d.")
@click.option(
    "--keep-best",
    "best",
    type=_best,
    multiple=True,
    metavar="N:METRIC[:min|max]",
    help="Keep the N with the greatest (or least) METRIC; may be given several times.",
)
@click.option(
    "--min-verified-copies",
    type=click.IntRange(0),
    default=0,
    metavar="K",
    help="Retire only what K other stores hold.",
)
@click.option("--retire", multiple=True, metavar="ROOT", help="Let this one go; may be given several times.")
@click.option("--break-leases-older-than", "age", type=duration, metavar="AGE", help="Count silent writers as dead.")
@click.option("--delete", is_flag=True, help="Delete what is listed.")
@click.option("--yes", is_flag=True, help="With --delete: do not ask.")
def COMMAND(
    session: Session,
    keep_last: int | None,
    keep_every: int | None,
    keep_every_time: float | None,
    best: tuple[KeepBest, ...],
    min_verified_copies: int,
    retire: tuple[str, ...],
    age: float | None,
    delete: bool,
    yes: bool,
) -> int:
    """List what a collection would delete, key by key, and with --delete delete it.

    Without a --keep option only that goes which nothing leads to: what aborted attempts left, what retired checkpoints
    left. With any of them, a checkpoint stays if one of them keeps it, and else is retired: its document stays as
    history, its tensors and files go. Lineages are followed from parent to parent, never by names, numbers or dates.

    Whatever is asked for, these stay: the head of each ref, what is pinned (ckpt pin), the newest verified checkpoint
    of each lineage, and what is newer than that. A checkpoint is verified if a receipt says that it was read back
    here from where it is kept: run ckpt verify on a head that nobody has read back, or nothing of its lineage goes.

    Nothing is deleted while something that is to be kept cannot be read, or while the store holds what this release
    does not know. --retire lets a checkpoint go that cannot be read, or that only history keeps. It takes a ref, a full
    digest, or a unique prefix.

    --min-verified-copies K retires only what at least K other stores hold verified copies of, by the receipts here
    (ckpt durability --refresh fetches those of the remotes).

    Nothing is deleted while writers are at work. Leases of writers that are provably dead are passed over. If it cannot
    be told, --break-leases-older-than AGE says which are to count as dead; if they live after all, what they save then
    fails.
    """
    if yes and not delete:
        raise UsageError("--yes without --delete", "nothing is asked where nothing is deleted")
    rules: list[KeepLast | KeepEverySteps | KeepEveryTime | KeepBest] = [*best]
    rules += [] if keep_last is None else [KeepLast(keep_last)]
    rules += [] if keep_every is None else [KeepEverySteps(keep_every)]
    rules += [] if keep_every_time is None else [KeepEveryTime(int(keep_every_time))]
    store = session.store()
    work = partial(
        ckptstore.collect,
        store,
        Policy(tuple(rules)),
        retire=retire,
        break_leases_older_than=None if age is None else int(age),
        min_verified_copies=min_verified_copies,
    )
    if not delete:
        _print(session, store, work())
        return 0
    shown = None
    if not yes:
        shown = work()
        _print(session, store, shown)
        if not shown.plan.deletions and not shown.plan.retired:
            return 0
        _ask(store, shown)
    with progress(f"gc {store.url}", quiet=session.json) as bar:
        done = work(delete=True, progress=bar)
    if shown is None:
        _print(session, store, done)
    elif done.plan.deletions != shown.plan.deletions:
        session.note("the store has changed since it was listed: what is told below was deleted, and not just that")
    return _tell(session, store, done)


def _ask(store: Store, shown: Collection) -> None:
    """Ask whoever sits at the terminal. RefusedError if nobody does, or the answer is no."""
    what = f"collection in {store.url}"
    if not sys.stdin.isatty():
        raise RefusedError(what, "nobody is there who could be asked", "add --yes to delete without being asked")
    question = f"Delete {output.count(len(shown.plan.deletions), 'key')}, {shown.plan.freed_bytes:,} bytes?"
    if not click.confirm(question, default=False, err=True):
        raise RefusedError(what, "the answer was not yes; nothing was deleted")


def _print(session: Session, store: Store, found: Collection) -> None:
    if session.json:
        _print_json(store, found)
        return
    plan = found.plan
    rows: list[tuple[object, ...]] = []
    for item in plan.kept:
        scope = "" if item.shards is None else f"only shard {', '.join(map(str, item.shards))}: "
        rows.append(("keep", item.root.short, _step(item.step), f"{scope}{'; '.join(item.reasons)}"))
    rows += [("retire", item.root.short, _step(item.step), item.reason) for item in plan.retired]
    rows += [("unnamed", item.root.short, _step(item.step), "nothing leads to it") for item in plan.unnamed]
    if rows:
        output.table(rows)
    for stat in plan.deletions:
        output.line(f"delete  {stat.key}  {stat.size:,}")
    for held in plan.held:
        session.note(f"{held.key} stays: the endpoint holds it until {describe.time(held.until)}")
    if plan.wanting:
        listed = ", ".join(item.root.short for item in plan.wanting)
        session.note(f"kept only because too few verified copies are elsewhere: {listed}")
    verb = "would delete" if found.swept is None else "deleting"
    output.line(
        f"{verb} {output.count(len(plan.deletions), 'key')}, {plan.freed_bytes:,} bytes; "
        f"{output.count(plan.remains.keys, 'key')}, {plan.remains.bytes:,} bytes remain"
    )
    if plan.leases and found.swept is None:
        session.note(
            f"{output.count(len(plan.leases), 'lease')} of writers: what they store now is listed as well, and nothing "
            "is deleted while they are at work"
        )


def _step(step: int | None) -> str:
    return "-" if step is None else f"step {step}"


def _print_json(store: Store, found: Collection) -> None:
    plan = found.plan
    wanting = {item.root for item in plan.wanting}
    for item in plan.kept:
        shards = None if item.shards is None else list(item.shards)
        told: dict[str, Any] = {"root": str(item.root), "step": item.step, "shards": shards}
        output.record({"type": "kept", **told, "reasons": list(item.reasons), "wanting": item.root in wanting})
    for one in plan.retired:
        output.record({"type": "retired", "root": str(one.root), "step": one.step, "reason": one.reason})
    for other in plan.unnamed:
        output.record({"type": "unnamed", "root": str(other.root), "step": other.step})
    for stat in plan.deletions:
        output.record({"type": "deletion", "key": stat.key, "bytes": stat.size})
    for held in plan.held:
        output.record({"type": "held", "key": held.key, "bytes": held.size, "until": describe.time(held.until)})
    output.record(
        {
            "type": "collection-plan",
            "store": store.url,
            "keys": len(plan.deletions),
            "bytes": plan.freed_bytes,
            "remaining_keys": plan.remains.keys,
            "remaining_bytes": plan.remains.bytes,
            "leases": list(plan.leases),
        }
    )


def _tell(session: Session, store: Store, done: Collection) -> int:
    """What was deleted, and what was not. Returns the exit code."""
    swept = done.swept
    assert swept is not None
    for text in done.broken:
        session.note(f"taken away: {text}")
    for text in done.notes:
        session.note(text)
    code = 0
    for key, why in swept.failed:
        code = session.tell(BackendError(f"key {key}", f"it could not be deleted: {why}"))
    if session.json:
        output.record(
            {
                "type": "collected",
                "store": store.url,
                "keys": swept.deleted_keys,
                "bytes": swept.deleted_bytes,
                "failed": [key for key, _ in swept.failed],
                "left_keys": swept.left_keys,
                "broken": list(done.broken),
                "notes": list(done.notes),
            }
        )
        return code
    left = f"; {output.count(swept.left_keys, 'key')} left: run it again" if swept.left_keys else ""
    output.line(f"deleted {output.count(swept.deleted_keys, 'key')}, {swept.deleted_bytes:,} bytes{left}")
    return code
