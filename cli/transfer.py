"""What push and pull have in common, and what a plan of them prints as they do."""

from __future__ import annotations

from collections.abc import Callable

import click

from ckptstore import Digest, Store, Traffic, Transfer
from ckptstore.errors import UsageError
from ckptstore.format.keys import is_ref_name

from . import describe, output
from .command import Session
from .duration import duration
from .progress import progress

max_age_option = click.option(
    "--max-age",
    type=duration,
    default="0",
    metavar="DURATION",
    help="Read nothing again that was read back so short a time ago, under the same version [default: 0].",
)
"""``--max-age``, in seconds."""

within_option = click.option(
    "--within", type=duration, metavar="DURATION", help="Give up after 3600, 90m, 12h, 7d for the whole."
)
"""``--within``, in seconds; None if it was not given."""


def ref_to_move(name: str, ref: str | None, no_ref: bool, shards: tuple[int, ...] | None) -> str | None:
    """The ref that is to name the root at the destination: the one given, else ROOT if that is a ref of the source."""
    if ref is not None and no_ref:
        raise UsageError("--ref and --no-ref", "only one of them can be meant")
    if ref is not None or no_ref or shards is not None:
        return ref
    return name if is_ref_name(name) else None


def transfer(
    session: Session,
    verb: str,
    move: Callable[..., Transfer],
    source: Store,
    target: Store,
    root: Digest,
    shards: tuple[int, ...] | None,
    ref: str | None,
) -> None:
    """Do it, and print the figures."""
    before = {"source": source.traffic, "target": target.traffic}
    with progress(f"{verb} {root.short}", quiet=session.json) as bar:
        done = move(source, target, root, shards=shards, ref=ref, progress=bar)
    taken = {"source": _since(source.traffic, before["source"]), "target": _since(target.traffic, before["target"])}
    receipt = done.receipt
    if session.json:
        output.record(
            {
                "type": verb,
                "root": str(root),
                "source": source.url,
                "target": target.url,
                "shards": None if shards is None else list(shards),
                "ref": ref,
                "sent_keys": done.sent_keys,
                "sent_bytes": done.sent_bytes,
                "present_keys": done.present_keys,
                "present_bytes": done.present_bytes,
                "accepted_keys": done.accepted_keys,
                "accepted_bytes": done.accepted_bytes,
                "repaired_keys": done.repaired_keys,
                "traffic": {side: traffic_record(traffic) for side, traffic in taken.items()},
                "notes": list(done.notes),
                "receipt": describe.receipt(receipt),
            }
        )
        return
    accepted = f"{done.accepted_keys:,} accepted unread; " if done.accepted_keys else ""
    output.line(
        f"{verb} {root} to {target.url}: sent {output.count(done.sent_keys, 'key')}, {done.sent_bytes:,} bytes; "
        f"{done.present_keys:,} present, {done.present_bytes:,} bytes; {accepted}{done.repaired_keys:,} repaired; "
        f"{receipt.bytes_read:,} bytes read back ({receipt.method})"
    )
    print_traffic(source.url, taken["source"])
    print_traffic(target.url, taken["target"])
    for note in done.notes:
        session.note(note)
    if ref is not None:
        output.line(f"ref {ref} at {target.url} names {root}")


def traffic_record(traffic: Traffic | None) -> dict[str, object] | None:
    """Traffic by its fields; None where there is no endpoint."""
    if traffic is None:
        return None
    return {
        "requests": dict(traffic.requests),
        "total_requests": traffic.total,
        "sent_bytes": traffic.sent_bytes,
        "received_bytes": traffic.received_bytes,
    }


def print_traffic(url: str, traffic: Traffic | None) -> None:
    """Traffic in one line; nothing where there is no endpoint."""
    if traffic is None:
        return
    by_operation = ", ".join(f"{name} {count:,}" for name, count in traffic.requests.items())
    output.line(
        f"{output.count(traffic.total, 'request')} at {url} ({by_operation}): "
        f"{traffic.sent_bytes:,} bytes sent, {traffic.received_bytes:,} received"
    )


def _since(now: Traffic | None, before: Traffic | None) -> Traffic | None:
    return now if now is None or before is None else now.since(before)
