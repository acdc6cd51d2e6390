"""``ckpt repair``: put back what is damaged or missing, from another copy."""

from __future__ import annotations

from collections.abc import Sequence

import click

import ckptstore
from ckptstore import CkptStoreError, Repair, Store
from ckptstore.errors import UsageError

from . import describe, output
from .command import Session, command, shard_option
from .progress import progress


@command("repair", codes=(3, 4, 5, 6, 8, 9))
@click.argument("root", required=False)
@click.option("--from", "sources", multiple=True, metavar="URL|REMOTE", help="Ask this store first; several times.")
@click.option("--no-remotes", is_flag=True, help="Ask no remote that was not given.")
@shard_option("Only this shard, for a partial store; may be given several times.")
@click.option("--no-files", is_flag=True, help="Leave out trees of files, for a store that pulled without them.")
@click.option("--dry-run", is_flag=True, help="Change nothing, and say what would be done.")
@click.option("--header", is_flag=True, help="Put right what keeps the store from being opened, in place of ROOT.")
def COMMAND(
    session: Session,
    root: str | None,
    sources: tuple[str, ...],
    no_remotes: bool,
    shards: tuple[int, ...],
    no_files: bool,
    dry_run: bool,
    header: bool,
) -> int:
    """Read all of a checkpoint, and put back what is damaged or missing, from another copy.

    Every byte is read and hashed, documents first, as they say what else is needed. What is wrong or not there comes
    from the stores of --from in their order, then from the remotes: only bytes of the right digest, and nothing that is
    good here. A pack that nobody has whole is put together from its chunks. Bad bytes go to the quarantine. The
    documents of ancestors, the pins and receipts of the checkpoint and, if ROOT is a ref, its log are repaired as well.

    One line is printed for each key that was healed, and one for each place that still lacks bytes. The exit code is 0
    only if the checkpoint is whole now (with --dry-run: would be). Interrupted, it is run again.
    """
    if header:
        if root is not None or sources or shards:
            raise UsageError("--header", "it is about the store, and takes nothing from others", "leave the rest out")
        return _header(session, dry_run)
    if root is None:
        raise UsageError("ROOT", "none was given", "name a checkpoint or a ref, or give --header")
    store = session.store()
    given, faults = _open(store, sources)
    for fault in faults:
        session.tell(fault)
    with progress(f"repair {root}", quiet=session.json) as bar:
        done = ckptstore.repair(
            store,
            root,
            given,
            remotes=not no_remotes,
            shards=shards or None,
            files=not no_files,
            dry_run=dry_run,
            progress=bar,
        )
    for note in done.notes:
        session.note(note)
    _print(session, store, done)
    return done.exit_code


def _open(store: Store, sources: Sequence[str]) -> tuple[list[Store], list[CkptStoreError]]:
    """The stores that can be reached, and why others cannot: they do not stop the rest."""
    found, faults = [], []
    for name in sources:
        try:
            found.append(ckptstore.open_remote(store, name))
        except UsageError:
            raise
        except CkptStoreError as error:
            faults.append(error)
    return found, faults


def _print(session: Session, store: Store, done: Repair) -> None:
    for item in done.healed:
        if session.json:
            place = describe.place(item.place, done.root)
            told = {"type": "healed", "was": item.was.value, "size": item.size, "source": item.source}
            output.record({**told, **place, "key": item.key})
            continue
        verb = "would heal" if done.dry_run else "healed"
        output.line(f"{verb} {item.was.value}: {item.place}: {item.size:,} bytes, {item.source} [{item.key}]")
    for finding in done.findings:
        if session.json:
            output.record(describe.finding(finding, done.root))
            continue
        output.line(f"still {finding}")
    if session.json:
        output.record(
            {
                "type": "repaired",
                "root": str(done.root),
                "store": store.url,
                "ok": done.ok,
                "dry_run": done.dry_run,
                "healed_keys": len(done.healed),
                "healed_bytes": sum(item.size for item in done.healed),
                "findings": len(done.findings),
                "documents": done.documents,
                "objects": done.objects,
                "bytes_read": done.bytes_read,
                "method": done.method.value,
                "notes": list(done.notes),
                "receipt": None if done.receipt is None else describe.receipt(done.receipt),
                "exit_code": done.exit_code,
            }
        )
        return
    healed = output.count(len(done.healed), "key")
    verdict = "whole" if done.ok else f"{output.count(len(done.findings), 'finding')} left"
    line = [
        f"checkpoint {done.root}: {'would be ' if done.dry_run else ''}{verdict}",
        f"{healed} {'to heal' if done.dry_run else 'healed'}, {sum(item.size for item in done.healed):,} bytes",
        f"{output.count(done.documents, 'document')}, {output.count(done.objects, 'object')}",
        f"{done.bytes_read:,} bytes read ({done.method.value})",
    ]
    output.line("; ".join(line))


def _header(session: Session, dry_run: bool) -> int:
    done = ckptstore.repair_header(session.place(), dry_run=dry_run)
    if session.json:
        healed = [{"key": key, "why": why} for key, why in done.healed]
        output.record({"type": "header", "store": done.url, "dry_run": dry_run, "healed": healed})
        return 0
    for key, why in done.healed:
        output.line(f"{'would write' if dry_run else 'wrote'} {key} anew: {why}")
    if not done.healed:
        output.line(f"store {done.url}: nothing keeps it from being opened")
    return 0
