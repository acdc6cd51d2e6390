"""What push and pull have in common."""

from __future__ import annotations

from collections.abc import Callable

from ckptstore import Digest, Store, Transfer
from ckptstore.errors import UsageError
from ckptstore.format.keys import is_ref_name

from . import describe, output
from .command import Session
from .progress import progress


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
    with progress(f"{verb} {root.short}", quiet=session.json) as bar:
        done = move(source, target, root, shards=shards, ref=ref, progress=bar)
    receipt = done.receipt
    figures = {
        "sent_keys": done.sent_keys,
        "sent_bytes": done.sent_bytes,
        "present_keys": done.present_keys,
        "repaired_keys": done.repaired_keys,
    }
    if session.json:
        output.record(
            {
                "type": verb,
                "root": str(root),
                "source": source.url,
                "target": target.url,
                "shards": None if shards is None else list(shards),
                "ref": ref,
                **figures,
                "receipt": describe.receipt(receipt),
            }
        )
        return
    output.line(
        f"{verb} {root} to {target.url}: sent {output.count(figures['sent_keys'], 'key')}, {figures['sent_bytes']:,} "
        f"bytes; {figures['present_keys']:,} present; {figures['repaired_keys']:,} repaired; "
        f"{receipt.bytes_read:,} bytes read back ({receipt.method})"
    )
    if ref is not None:
        output.line(f"ref {ref} at {target.url} names {root}")
