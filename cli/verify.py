"""``ckpt verify``: read everything again and list all that is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import click

import ckptstore
from ckptstore import Digest, Store
from ckptstore.errors import CkptStoreError

from . import output
from .command import Session, command, shard_option
from .exits import worst
from .progress import progress


@command("verify", codes=(3, 4, 5, 8, 9))
@click.argument("roots", metavar="ROOT...", nargs=-1, required=True)
@shard_option("Only this shard, for a partial store; may be given several times.")
@click.option("--no-files", is_flag=True, help="Leave out trees of files, for a store that pulled without them.")
def COMMAND(session: Session, roots: tuple[str, ...], shards: tuple[int, ...], no_files: bool) -> int:
    """Read every byte of checkpoints again, hash it, recompute every root, and list every finding.

    Each finding is one line: kind, checkpoint, shard, role, tensor, chunk, key, expected and actual. Progress, coverage
    and ancestors are checked too; if ROOT is a ref, so is its log. A store that pins only some shards is verified as
    far as it is pinned. If nothing is wrong and the store can be written, a receipt is kept.
    """
    store = session.store()
    resolved = [(name, store.resolve(name)) for name in roots]
    return worst([_verify(session, store, name, root, shards, not no_files) for name, root in resolved])


def _verify(session: Session, store: Store, name: str, root: Digest, wanted: tuple[int, ...], files: bool) -> int:
    shards = session.scope(store, root, wanted)
    with progress(f"verify {root.short}", quiet=session.json) as bar:
        report = store.verify(name, shards, bar, files=files)
    counts = Counter(ancestor.status for ancestor in report.ancestors)
    for finding in report.findings:
        place = finding.place
        if session.json:
            output.record(
                {
                    "type": "finding",
                    "kind": finding.kind.value,
                    "checkpoint": str(place.checkpoint or root),
                    "shard": place.shard,
                    "part": place.part,
                    "role": "/".join(place.role) if place.role is not None else None,
                    "tensor": place.path,
                    "chunk": place.chunk,
                    "key": finding.key,
                    "message": finding.message,
                    "expected": finding.expected,
                    "actual": finding.actual,
                }
            )
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
    return report.exit_code


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
