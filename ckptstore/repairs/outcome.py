"""What a repair found and did, and the receipt about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.backends.protocol import ReadbackMethod
from ckptstore.closure import Closure
from ckptstore.findings import Finding, exit_code
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.records import Receipt, closure_digest
from ckptstore.leases import now
from ckptstore.readbacks.actors import readback_details, store_id
from ckptstore.readbacks.readbacks import Part
from ckptstore.repairs.healing import Healed, Healer
from ckptstore.store import Store

OPERATION = "repair"

_TOLD = 1000  # healed keys that a receipt lists
_LEFT = 100  # findings that it lists, 500 characters of each


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair found and did.

    Args:
        root: the checkpoint.
        healed: keys that are whole again (or would be, in a dry run), with who gave the bytes; records that nobody can
            give are put aside.
        findings: what is still wrong, with the place of everything that it hurts.
        documents, objects: distinct keys of the closure.
        bytes_read: of those that were read and are good, in bytes.
        method: the weakest way in which they were read.
        receipt: what was left in the store about it; None in a dry run.
        notes: other stores that could not be asked, or have wrong bytes themselves.
        dry_run: whether nothing was changed.
    """

    root: Digest
    healed: tuple[Healed, ...]
    findings: tuple[Finding, ...]
    documents: int
    objects: int
    bytes_read: int
    method: ReadbackMethod
    receipt: Receipt | None
    notes: tuple[str, ...]
    dry_run: bool

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is whole now (after a dry run: would be)."""
        return not self.findings

    @property
    def exit_code(self) -> int:
        """0 if it is whole, else the exit code of the worst of what is still wrong."""
        return exit_code(self.findings)


def make_receipt(
    store: Store,
    root: Digest,
    closure: Closure,
    healer: Healer,
    findings: Sequence[Finding],
    bytes_read: int,
    part: Part,
) -> Receipt:
    """The receipt about ``root``: what was healed from where, and what is still wrong. One that names a closure says
    that all of it was read and is whole."""
    details: Any = values.plain_from_json(readback_details(store_id(store.backend)), OPERATION)
    details["healed"] = [[item.key, item.was.value, item.source] for item in healer.healed[:_TOLD]]
    details["healed_keys"] = len(healer.healed)
    details["healed_bytes"] = sum(item.size for item in healer.healed)
    return Receipt(
        operation=OPERATION,
        subject=root,
        closure=None if findings else closure_digest(closure.sizes()),
        documents=len(closure.documents),
        objects=len(closure.objects),
        bytes_read=bytes_read,
        method=healer.method.value,
        time=now(),
        where=store.url,
        exceptions=(*part.exceptions(), *(f"still wrong: {finding}"[:500] for finding in findings[:_LEFT])),
        details=values.to_json(details, OPERATION),
    )
