"""``ckpt durability``: where copies are, and when each was last read back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import click

import ckptstore
from ckptstore import CkptStoreError, Digest, KeyCopies, Ledger, RootCopies, Store
from ckptstore.errors import NotFoundError, RefusedError

from . import output
from .command import Session, command
from .duration import duration
from .exits import worst


@command("durability", codes=(3, 4, 5, 9))
@click.argument("roots", metavar="[ROOT]...", nargs=-1)
@click.option("--min-copies", type=click.IntRange(1), metavar="N", help="Exit with 5 if some key has fewer.")
@click.option("--max-age", type=duration, metavar="DURATION", help="Count readbacks no older than 3600, 90m, 12h, 7d.")
@click.option("--objects", is_flag=True, help="List every key with its copies: when read, how, by whom.")
@click.option("--refresh", is_flag=True, help="Ask the remotes for their receipts, and for what they have.")
@click.option("--no-files", is_flag=True, help="Leave out trees of files, for a store that pulled without them.")
def COMMAND(
    session: Session,
    roots: tuple[str, ...],
    min_copies: int | None,
    max_age: float | None,
    objects: bool,
    refresh: bool,
    no_files: bool,
) -> int:
    """Show how many verified copies checkpoints have (without ROOT: those that refs name), and where.

    The number is that of the key that has the fewest. A copy is verified if a receipt of a verify, push or pull says
    that it was read back in full from where it is kept, whichever checkpoint that was about. This store's own copy is
    no exception. Receipts are notes: who can write a store can forge them. A readback dated in the future counts, but
    not where --max-age asks for its age.

    Works from the receipts in this store. --refresh asks the remotes as well, and keeps what they say of themselves.
    """
    store = session.store()
    asked, codes = _asked(session, store, roots)
    remotes, unreached = _remotes(session, store) if refresh else ({}, [])
    found = ckptstore.ledger(store, list(asked), files=not no_files, ask=remotes)
    codes += unreached
    codes += [session.tell(error) for error in found.faults]
    for finding in found.findings:
        if session.json:
            told = {"kind": finding.kind.value, "key": finding.key, "message": str(finding)}
            output.record({"type": "finding", **told})
        else:
            session.note(str(finding))
    _keep(session, store, found)
    age = None if max_age is None else timedelta(seconds=max_age)
    rows = []
    for root in found.roots:
        if session.json:
            output.record(_record(found, root, asked[root.root], age, min_copies))
        else:
            rows.append(_row(found, root, asked[root.root], age))
    if rows:
        output.table([("root", "step", "refs", "copies", "oldest readback", "where"), *rows], right=frozenset({3}))
    if objects:
        for root in found.roots:
            _list_keys(session, found, root, age)
    if not asked and not codes:
        session.note(f"no ref in {store.url} names a checkpoint")
    if min_copies is not None:
        if not asked and not codes:
            raise NotFoundError("durability", "there is no checkpoint to count copies of", "name a ROOT")
        codes += [session.tell(error) for error in _too_few(found, min_copies, age)]
    return worst(codes)


def _asked(session: Session, store: Store, names: tuple[str, ...]) -> tuple[dict[Digest, list[str]], list[int]]:
    """Names of refs by the root that is asked for, and exit codes of the refs that cannot be read."""
    found: dict[Digest, list[str]] = {store.resolve(name): [] for name in names}
    codes = []
    for name in store.refs.names():
        try:
            root = store.head(name)
        except CkptStoreError as error:
            codes += [] if names else [session.tell(error)]
            continue
        if root is not None and (root in found or not names):
            found.setdefault(root, []).append(name)
    return found, codes


def _remotes(session: Session, store: Store) -> tuple[dict[str, Store], list[int]]:
    """The remotes that can be opened, and the exit codes of those that cannot."""
    found, codes = {}, []
    for name in ckptstore.known_remotes(store):
        try:
            found[name] = ckptstore.open_remote(store, name)
        except CkptStoreError as error:
            codes.append(session.tell(error, f"remote {name}"))
    return found, codes


def _keep(session: Session, store: Store, found: Ledger) -> None:
    """Keep here what other stores said, for the time when they cannot be asked."""
    try:
        for receipt in found.learned:
            store.add_receipt(receipt)
    except CkptStoreError as error:
        session.note(f"receipts of the remotes are not kept: {error}")


def _too_few(found: Ledger, number: int, age: timedelta | None) -> Iterator[CkptStoreError]:
    for root in found.roots:
        lacking = root.lacking(number, found.at, age)
        if lacking:
            copies = f"{number} verified {'copy' if number == 1 else 'copies'}"
            limit = "" if age is None else f" read back in the last {age.total_seconds():,.0f} s"
            why = f"{lacking:,} of {output.count(len(root.keys), 'key')} have fewer than {copies}{limit}"
            yield RefusedError(
                f"durability of checkpoint {root.root.short}", why, "ckpt push it, or ckpt verify copies"
            )


def _row(found: Ledger, root: RootCopies, refs: list[str], age: timedelta | None) -> tuple[object, ...]:
    places = []
    for holder in found.holders:
        keys = root.verified_at(holder, found.at, age)
        if keys == len(root.keys):
            places.append(holder.name)
        elif keys or holder.here or holder.names:
            places.append(f"{holder.name} {keys:,} of {len(root.keys):,}")
    oldest = _time(root.oldest(found.at, age)) or "-"
    copies = root.verified(found.at, age)
    return root.root.short, f"step {root.step}", ", ".join(refs), copies, oldest, "; ".join(places)


def _record(
    found: Ledger, root: RootCopies, refs: list[str], age: timedelta | None, number: int | None
) -> dict[str, object]:
    return {
        "type": "durability",
        "root": str(root.root),
        "step": root.step,
        "refs": refs,
        "copies": root.verified(found.at, age),
        "keys": len(root.keys),
        "bytes": sum(item.size for item in root.keys),
        "oldest": _time(root.oldest(found.at, age)),
        "holders": [
            {
                "name": holder.name,
                "store": holder.id,
                "url": holder.url,
                "remotes": list(holder.names),
                "here": holder.here,
                "replaced": holder.replaced,
                "verified_keys": root.verified_at(holder, found.at, age),
            }
            for holder in found.holders
        ],
        "max_age_seconds": None if age is None else age.total_seconds(),
        "min_copies": number,
        "lacking": None if number is None else root.lacking(number, found.at, age),
    }


def _list_keys(session: Session, found: Ledger, root: RootCopies, age: timedelta | None) -> None:
    rows = []
    for item in root.keys:
        copies = _copies(item, found, age)
        number = sum(bool(copy["verified"]) for copy in copies)
        if session.json:
            told = {"root": str(root.root), "key": item.key, "bytes": item.size, "copies": number, "at": copies}
            output.record({"type": "key", **told})
        else:
            rows.append((item.key, f"{item.size:,}", number, "; ".join(map(_copy_line, copies)) or "-"))
    if rows:
        output.line()
        output.line(f"checkpoint {root.root}")
        output.table([("key", "bytes", "copies", "where"), *rows], right=frozenset({1, 2}))


def _copies(item: KeyCopies, found: Ledger, age: timedelta | None) -> list[dict[str, object]]:
    told: list[dict[str, object]] = []
    for copy in item.copies:
        evidence = copy.evidence
        receipt = None if evidence is None else evidence.readback.receipt
        told.append(
            {
                "name": copy.holder.name,
                "store": copy.holder.id,
                "url": copy.holder.url,
                "verified": copy.is_verified(found.at, age),
                "present": copy.present,
                "replaced": copy.holder.replaced,
                "read_at": None if evidence is None else _time(evidence.read_at),
                "future": evidence is not None and evidence.future,
                "operation": None if receipt is None else receipt.operation,
                "method": None if receipt is None else receipt.method,
                "by": None if evidence is None else evidence.readback.by or None,
                "about": None if receipt is None else str(receipt.subject),
                "receipt": None if evidence is None else str(evidence.readback.digest),
            }
        )
    return told


def _copy_line(copy: dict[str, object]) -> str:
    if copy["read_at"] is None:
        return f"{copy['name']} never read back"
    text = f"{copy['name']} {copy['read_at']} {copy['operation']} {copy['method']}"
    text += f" by {copy['by']}" if copy["by"] else ""
    for told, what in (("future", "in the future"), ("replaced", "another store is there now")):
        text += f" ({what})" if copy[told] else ""
    return f"{text} (absent)" if copy["present"] is False else text


def _time(time: datetime | None) -> str | None:
    return None if time is None else time.strftime("%Y-%m-%dT%H:%M:%SZ")
