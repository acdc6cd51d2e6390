"""``ckpt pin``: keep checkpoints whatever refs and policies say."""

from __future__ import annotations

from datetime import UTC, datetime

import click

import ckptstore
from ckptstore import Pinned, Store
from ckptstore.errors import UsageError

from . import describe, output
from .command import Session, command

_FORMATS = ("%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ")


def _shards(text: str) -> tuple[int, ...]:
    """The type of ``--shards``."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise click.BadParameter(f"{text!r:.60} is no list of shards; for instance 0,1")
    return found


_shards.__name__ = "n,n,..."


def _date(text: str) -> datetime:
    """The type of ``--until``: the beginning of a day, or a time, in UTC."""
    for form in _FORMATS:
        try:
            return datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError:
            continue
    raise click.BadParameter(f"{text!r:.60} is no date; for instance 2027-01-31 or 2027-01-31T12:00:00Z")


_date.__name__ = "date"


@command("pin", codes=(3, 4, 5, 6, 8, 9))
@click.argument("root", required=False)
@click.option("--reason", metavar="TEXT", help="Why, for people.")
@click.option("--shards", "--shard", type=_shards, multiple=True, metavar="N,N", help="Keep only these shards.")
@click.option("--until", type=_date, metavar="DATE", help="Let the endpoint hold it until then, in UTC.")
@click.option("--list", "listing", is_flag=True, help="List the pins, of ROOT if it is given.")
@click.option("--remove", is_flag=True, help="Remove the pins on ROOT.")
def COMMAND(
    session: Session,
    root: str | None,
    reason: str | None,
    shards: tuple[tuple[int, ...], ...],
    until: datetime | None,
    listing: bool,
    remove: bool,
) -> None:
    """Keep ROOT, or list pins, or remove those on ROOT.

    What is pinned stays, whatever refs and ckpt gc say, until the pin is removed.

    --until holds every key of the checkpoint, and the pin, against deletion by anybody: with the endpoint's object lock
    in mode GOVERNANCE. It is refused where the bucket has none. A longer date takes the place of a shorter one; who
    wants an earlier one needs the right to bypass it.
    """
    if listing and remove:
        raise UsageError("--list and --remove", "only one of them can be meant")
    if (listing or remove) and (reason is not None or shards or until is not None):
        raise UsageError("--reason, --shards and --until", "they say how to pin, and nothing is pinned here")
    store = session.store()
    if listing:
        _list(session, store, root)
        return
    if root is None:
        raise UsageError("ckpt pin", "no ROOT is given", "ckpt pin --list lists the pins")
    digest = store.resolve(root)
    if remove:
        for item in ckptstore.unpin(store, digest):
            _tell(session, item, "unpinned")
        return
    wanted = sorted({shard for part in shards for shard in part}) or None
    why = {} if reason is None else {"reason": reason}
    _tell(session, ckptstore.pin(store, digest, shards=wanted, until=until, **why), "pinned")


def _list(session: Session, store: Store, root: str | None) -> None:
    found = ckptstore.list_pins(store, None if root is None else store.resolve(root))
    if session.json:
        for item in found:
            _tell(session, item, "pin")
    elif found:
        rows = [(item.root.short, _scope(item), describe.time(item.until) or "-", item.pin.reason) for item in found]
        output.table([("root", "scope", "held until", "reason"), *rows])
    else:
        session.note(f"nothing is pinned in {store.url}")


def _tell(session: Session, item: Pinned, what: str) -> None:
    if session.json:
        shards = None if item.pin.shards is None else list(item.pin.shards)
        told = {"root": str(item.root), "key": item.key, "shards": shards, "reason": item.pin.reason}
        output.record({"type": what, **told, "until": describe.time(item.until)})
        return
    until = f", held until {describe.time(item.until)}" if item.until is not None else ""
    output.line(f"{what} {item.root}: {_scope(item)}{until} ({item.pin.reason})")


def _scope(item: Pinned) -> str:
    return "all" if item.pin.shards is None else f"shard {', '.join(map(str, item.pin.shards))}"
