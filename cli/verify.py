"""``ckpt verify``: read everything again and list all that is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import click

import ckptstore
from ckptstore import Digest, Store, VerifyReport
from ckptstore.errors import CkptStoreError, UsageError

from . import describe, output
from .command import Session, command, shard_option
from .exits import worst
from .progress import progress

_REPAIRABLE = ("corrupt", "truncated", "missing", "ancestor")


@command("verify", codes=(3, 4, 5, 8, 9))
@click.argument("roots", metavar="[ROOT]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that refs name and pins keep.")
@shard_option("Only this shard, for a partial store; may be given several times.")
@click.option("--no-files", is_flag=True, help="Leave out trees of files, for a store that pulled without them.")
def COMMAND(session: Session, roots: tuple[str, ...], everything: bool, shards: tuple[int, ...], no_files: bool) -> int:
    """Read every byte of checkpoints again, hash it, recompute every root, and list every finding.

    Each finding is one line: kind, checkpoint, shard, role, tensor, chunk, key, expected and actual. Progress, coverage
    and ancestors are checked too; if ROOT is a ref, so is its log. A store that pins only some shards is verified as
    far as it is pinned. If nothing is wrong and the store can be written, a receipt is kept.

    Of several checkpoints each object is read once; one that is damaged is a finding of each that needs it. The exit
    code is that of the worst: corrupt before malformed, refused, unreadable, missing.
    """
    if everything == bool(roots):
        why = "only one of them can be meant" if roots else "neither is given"
        raise UsageError("ROOT and --all", why, "name checkpoints, or give --all")
    store = session.store()
    codes: list[int] = []
    names: Sequence[str | Digest] = roots
    if everything:
        kept = ckptstore.kept_checkpoints(store)
        names = kept.names
        codes += [session.tell(fault) for fault in kept.faults]
    scopes: dict[Digest, tuple[int, ...] | None] = {}

    def scope(root: Digest) -> tuple[int, ...] | None:
        scopes[root] = session.scope(store, root, shards)
        return scopes[root]

    with progress("verify", quiet=session.json) as bar:
        for report in ckptstore.verify_many(store, names, scope=scope, files=not no_files, progress=bar):
            _print(session, store, report, scopes[report.root], not no_files)
            codes.append(report.exit_code)
    if everything and not codes:
        session.note(f"no ref or pin in {store.url} names a checkpoint")
    return worst(codes)


def _print(session: Session, store: Store, report: VerifyReport, shards: tuple[int, ...] | None, files: bool) -> None:
    counts = Counter(ancestor.status for ancestor in report.ancestors)
    for finding in report.findings:
        if session.json:
            output.record(describe.finding(finding, report.root))
        else:
            output.line(str(finding))
    kept = _keep_receipt(session, store, report, shards, files) if report.ok else False
    if session.json:
        output.record(
            {
                "type": "verified",
                "root": str(report.root),
                "ok": report.ok,
                "step": report.step,
                "shards": None if shards is None else list(shards),
                "closure": str(report.closure),
                "documents": report.documents,
                "objects": report.objects,
                "bytes_read": report.bytes_read,
                "history_bytes": report.history_bytes,
                "method": report.method.value,
                "reaches_medium": report.method.reaches_medium,
                "ancestors": [
                    {"root": str(ancestor.root), "step": ancestor.step, "status": ancestor.status}
                    for ancestor in report.ancestors
                ],
                "findings": len(report.findings),
                "receipt": kept,
                "exit_code": report.exit_code,
            }
        )
    else:
        verdict = "nothing is wrong" if report.ok else output.count(len(report.findings), "finding")
        how = report.method.value if report.method.reaches_medium else f"{report.method.value}, not from the medium"
        line = [
            f"checkpoint {report.root}: {verdict}",
            f"{output.count(report.documents, 'document')}, {output.count(report.objects, 'object')}",
            f"{report.bytes_read:,} bytes read ({how})",
            f"ancestors: {', '.join(f'{counts[status]} {status}' for status in ('present', 'retired', 'missing'))}",
        ]
        output.line("; ".join(line))
        if any(finding.kind.value in _REPAIRABLE for finding in report.findings):
            session.note(f"ckpt repair {report.root} may bring it back from another copy")


def _keep_receipt(
    session: Session, store: Store, report: ckptstore.VerifyReport, shards: tuple[int, ...] | None, files: bool
) -> bool:
    left_out = [] if shards is None else [f"only shards {', '.join(map(str, shards))}"]
    left_out += [] if files else ["without its files"]
    try:
        store.add_receipt(replace(report.receipt(store.url), exceptions=tuple(left_out)))
    except CkptStoreError as error:
        session.note(f"no receipt is kept: {error}")
        return False
    return True
