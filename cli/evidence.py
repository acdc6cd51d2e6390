"""``ckpt evidence``: archives that a stranger can check."""

from __future__ import annotations

from pathlib import Path

import click

import ckptstore
from ckptstore import evidence
from ckptstore.errors import CorruptError
from ckptstore.evidence import ArchiveInfo

from . import output
from .command import Session, command
from .exits import epilog


@click.group("evidence", epilog=epilog((3, 4, 5, 8, 9)))
def COMMAND() -> None:
    """Pack evidence about checkpoints, and verify it without a store."""


@command("pack", codes=(3, 4, 5, 8, 9))
@click.argument("roots", metavar="ROOT...", nargs=-1, required=True)
@click.option("-o", "--output", "file", required=True, type=click.Path(path_type=Path), help="The new archive.")
@click.option(
    "--file-limit",
    type=click.IntRange(0),
    default=2**20,
    show_default=True,
    metavar="BYTES",
    help="Files of trees up to this size go in; longer ones are named by reference.",
)
def pack(session: Session, roots: tuple[str, ...], file: Path, file_limit: int) -> None:
    """Pack the documents, receipts and small files of checkpoints as one deterministic archive.

    Tensors and large files stay in the store and are named by key, size and digest. The archive is read back whole.
    """
    store = session.store()
    digests = [store.resolve(root) for root in roots]
    gathered = ckptstore.gather_evidence(store, digests, file_limit=file_limit)
    info = evidence.pack(gathered.members, file, gathered.references)
    _print(session, "packed", info)


@command("verify", codes=(3, 4, 5, 9), store=False)
@click.argument("file", type=click.Path(path_type=Path))
def verify(session: Session, file: Path) -> int:
    """Check that FILE is, byte for byte, the archive of its own manifest. Needs no store.

    Every fault is one line. Documents must be those of the digests that name them.
    """
    faults = [(fault.member, fault.what) for fault in evidence.faults(file)]
    if faults:
        for member, what in faults:
            if session.json:
                output.record({"type": "fault", "member": member, "what": what})
            else:
                output.line(f"{member}: {what}")
        raise CorruptError(f"evidence archive {file}", output.count(len(faults), "fault"), "get another copy of it")
    info = evidence.verify(file)
    misnamed = ckptstore.misnamed_documents(info)
    if misnamed:
        raise CorruptError(f"evidence archive {file}", "; ".join(misnamed), "it was not packed from a sound store")
    _print(session, "verified", info)
    return 0


def _print(session: Session, what: str, info: ArchiveInfo) -> None:
    referenced = sum(reference.size for reference in info.references)
    if session.json:
        output.record(
            {
                "type": what,
                "file": str(info.path),
                "bytes": info.size,
                "sha256": info.sha256,
                "blake3": str(info.blake3),
                "members": len(info.members),
                "references": len(info.references),
                "referenced_bytes": referenced,
            }
        )
        return
    output.line(f"{what} {info.path}: {output.count(len(info.members), 'member')}, {info.size:,} bytes")
    output.line(f"by reference: {output.count(len(info.references), 'object')}, {referenced:,} bytes")
    output.line(f"sha256 {info.sha256}")
    output.line(f"blake3 {info.blake3.hex}")


for _command in (pack, verify):
    COMMAND.add_command(_command)
