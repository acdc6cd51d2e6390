"""``ckpt scrub``: read a whole store again, bit by bit."""

from __future__ import annotations

from datetime import datetime

import click

import ckptstore
from ckptstore import Damage, Scrub
from ckptstore.errors import UsageError

from . import describe, output
from .command import Session, command
from .duration import duration
from .progress import progress
from .size import size


@command("scrub", codes=(3, 4, 9))
@click.option("--remote", metavar="NAME", help="Scrub this remote; what was read is noted here as well.")
@click.option(
    "--max-age", type=duration, metavar="DURATION", help="Leave out what was read back in the last 3600, 90m, 12h, 7d."
)
@click.option("--max-bytes", type=size, metavar="SIZE", help="End after 500MB, 10GiB, and at most one key more.")
@click.option("--max-duration", type=duration, metavar="DURATION", help="End after 3600, 90m, 12h.")
def COMMAND(
    session: Session, remote: str | None, max_age: float | None, max_bytes: int | None, max_duration: float | None
) -> int:
    """Read everything in a store again, whether anything leads to it or not, and list all that is damaged.

    What was read back longest ago comes first, and each key once. What is good is noted in receipts as it is read, so
    that a scrub that is ended by a limit, interrupted or killed is gone on with by the next one: at most 1 GiB is read
    again, or what was read in a minute. A scrub that comes to the end also looks for what is missing, and counts the
    objects and documents that no ref or pin leads to.

    Damage does not end it: each damaged key is one line, with the checkpoints that it hurts and what to run for them.
    Notes never make a checkpoint count as verified as a whole; ckpt durability counts them key by key. A store that
    cannot be written is read all the same. Receipts dated in the future count for nothing.
    """
    if max_duration is not None and max_duration <= 0:
        raise UsageError("--max-duration", "it is not above 0")
    here = session.store()
    store = here if remote is None else ckptstore.open_remote(here, remote)
    with progress("scrub", quiet=session.json) as bar:
        done = ckptstore.scrub(
            store,
            max_age=max_age,
            max_bytes=max_bytes,
            max_seconds=max_duration,
            keeper=None if remote is None else here,
            progress=bar,
        )
    for damage in done.damaged:
        _print_damage(session, damage)
    for url, why in done.failures:
        session.note(f"nothing is noted in {url}, and the next scrub begins anew there: {why}")
    if session.json:
        output.record(_record(done))
    else:
        _print(done)
    return done.exit_code


def _print_damage(session: Session, damage: Damage) -> None:
    finding, hurts = damage.finding, damage.hurts
    if session.json:
        output.record(
            {
                **describe.finding(finding, None),
                "hurts": None if hurts is None else [str(root) for root in hurts],
            }
        )
        return
    if hurts is None:
        who = "ckpt verify --all says which checkpoints it hurts"
    elif not hurts:
        who = "hurts no checkpoint that is kept"
    else:
        more = f" and {len(hurts) - 1:,} more" if len(hurts) > 1 else ""
        who = f"hurts {hurts[0].short}{more}; ckpt repair {hurts[0].hex} may bring it back"
    output.line(f"{finding}; {who}")


def _print(done: Scrub) -> None:
    how = done.method.value if done.method.reaches_medium else f"{done.method.value}, not from the medium"
    line = [
        f"store {done.url}: {output.count(len(done.damaged), 'finding') if done.damaged else 'nothing is wrong'}",
        f"{output.count(done.read_keys, 'key')}, {done.read_bytes:,} bytes read ({how if done.read_keys else 'none'})",
        f"{done.recent_keys:,} read back recently, {done.recent_bytes:,} bytes",
    ]
    if done.ended_by:
        limit = {"bytes": "--max-bytes", "duration": "--max-duration"}[done.ended_by]
        line.append(f"ended by {limit}: {done.left_keys:,} left, {done.left_bytes:,} bytes")
    if done.unreferenced_keys is not None:
        line.append(f"{done.unreferenced_keys:,} that nothing leads to, {done.unreferenced_bytes:,} bytes")
    if done.unknown_keys:
        line.append(f"{done.unknown_keys:,} of an unknown kind, not read")
    line.append(f"oldest readback: {_time(done.oldest) or '-'}")
    if done.never_keys:
        line.append(f"{done.never_keys:,} never read from the medium")
    output.line("; ".join(line))


def _record(done: Scrub) -> dict[str, object]:
    age = None if done.oldest is None else max(0, int((done.at - done.oldest).total_seconds()))
    return {
        "type": "scrub",
        "store": done.url,
        "keys": done.keys,
        "bytes": done.size,
        "read_keys": done.read_keys,
        "read_bytes": done.read_bytes,
        "recent_keys": done.recent_keys,
        "recent_bytes": done.recent_bytes,
        "left_keys": done.left_keys,
        "left_bytes": done.left_bytes,
        "damaged": len(done.damaged),
        "unreferenced_keys": done.unreferenced_keys,
        "unreferenced_bytes": done.unreferenced_bytes,
        "unknown_keys": done.unknown_keys,
        "never_keys": done.never_keys,
        "oldest": _time(done.oldest),
        "oldest_seconds": age,
        "method": done.method.value if done.read_keys else "none",
        "ended_by": done.ended_by or None,
        "noted": not done.failures,
        "exit_code": done.exit_code,
    }


def _time(time: datetime | None) -> str | None:
    return None if time is None else time.strftime("%Y-%m-%dT%H:%M:%SZ")
