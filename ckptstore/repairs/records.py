"""Records of a checkpoint that are damaged: its pins, its receipts, and the retirements of its ancestors.

None of them is named by what it says, or needed to restore, so each is put right as far as its meaning can be known,
and in the direction that keeps more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import BackendError, CkptStoreError, CorruptError, MalformedError, NotFoundError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, pin_prefix, receipt_prefix, retired_key
from ckptstore.format.records import RECEIPT_LIMIT, RECORD_LIMIT, Pin, Receipt, Retired
from ckptstore.objects import repairing, undamaged
from ckptstore.repairs.donors import Donors
from ckptstore.repairs.healing import Healed

ASIDE = "put aside"
HERE = "what is stored here"


@dataclass(slots=True)
class Ward:
    """The store that is repaired, what may give good bytes, and what became of its records so far."""

    backend: ReadBackend
    donors: Donors
    dry: bool
    healed: list[Healed]
    left: list[Finding]

    def keys(self, prefix: str) -> Iterator[tuple[str, Finding | None]]:
        """Keys right below a prefix, with what is wrong where no file lies under one.

        Those come first: a listing ends at one of them, so whoever is to see the others mends it.
        """
        foreign = getattr(self.backend, "foreign", None)
        for key in () if foreign is None else foreign(prefix):
            why = "something that is no regular file lies there"
            yield key, Finding(Kind.CORRUPT, Place(part=f"record {key}"), key, why)
        try:
            for stat in list(self.backend.list(prefix)):
                if "/" not in stat.key.removeprefix(prefix):
                    yield stat.key, None
        except CorruptError as error:
            if not self.dry:
                raise
            self.left.append(Finding(Kind.CORRUPT, Place(part=f"records in {prefix}"), "", error.why or error.what))

    def problem(self, key: str, place: Place, check: Callable[[bytes], object], limit: int) -> Finding | None:
        """What is wrong with the record under a key; None if nothing is, or if it has gone."""

        def read() -> None:
            check(self.backend.get(key, 0, limit + 1))

        try:
            undamaged(self.backend, read)
        except NotFoundError:
            return None
        except BackendError as error:
            self.left.append(Finding(Kind.UNREADABLE, place, key, error.why or error.what))
            return None
        except (CorruptError, MalformedError) as error:
            return Finding(Kind.of(error), place, key, error.why or error.what)
        return None

    def put_right(self, found: Finding, giver: str, data: bytes) -> None:
        """Replace a bad record."""
        if not self.dry:
            repairing(self.backend).replace(found.key, data)
        self.healed.append(Healed(found.key, found.kind, len(data), giver, found.place))

    def put_aside(self, found: Finding) -> None:
        """Let a bad record be gone from its key, and kept in the quarantine."""
        if not self.dry:
            repairing(self.backend).replace(found.key, b"")
            delete = getattr(self.backend, "delete", None)
            if delete is not None:
                with suppress(CkptStoreError):  # nobody needs the right to delete a receipt, and an empty one is none
                    delete(found.key)
        self.healed.append(Healed(found.key, found.kind, 0, ASIDE, found.place))


def heal_pins(ward: Ward, root: Digest, checkpoint: Checkpoint | None) -> None:
    """Put damaged pins of a root right: as a donor has them under the very key, else for what is here."""
    for key, foreign in ward.keys(pin_prefix(root)):
        place = Place(checkpoint=root, part="pin")
        found = foreign or ward.problem(key, place, Pin.parse, RECORD_LIMIT)
        if found is None:
            continue
        for giver, data in ward.donors.ask(key, RECORD_LIMIT):
            with suppress(MalformedError):
                Pin.parse(data)
                ward.put_right(found, giver, data)
                break
        else:
            pin = _pin_for_what_is_here(ward.backend, checkpoint)
            if pin is None:
                ward.left.append(found)
            else:
                ward.put_right(found, HERE, pin.encode())


def _pin_for_what_is_here(backend: ReadBackend, checkpoint: Checkpoint | None) -> Pin | None:
    """A pin for the shards whose documents are here; None if none is, or if that is not known."""
    if checkpoint is None:
        return None
    there = backend.present({document_key(shard) for shard in checkpoint.shards})
    indices = tuple(index for index, shard in enumerate(checkpoint.shards) if document_key(shard) in there)
    if not indices:
        return None
    return Pin(None if len(indices) == len(checkpoint.shards) else indices, "its record was damaged: for what is here")


def heal_retirements(ward: Ward, ancestors: Collection[Digest]) -> None:
    """Write damaged retirements of ancestors anew: that one is there is all that it says."""
    keys = {retired_key(root): root for root in ancestors}
    for key in sorted(ward.backend.present(keys.keys()) if keys else ()):
        place = Place(checkpoint=keys[key], part="retirement")
        found = ward.problem(key, place, Retired.parse, RECORD_LIMIT)
        if found is not None:
            ward.put_right(found, HERE, Retired("its record was damaged, and what it says stays so").encode())


def heal_receipts(ward: Ward, root: Digest) -> None:
    """Get damaged receipts about a root from a donor that has the very same, else put them aside: one whose bytes are
    not those of its name is worth nothing."""
    for key, foreign in ward.keys(receipt_prefix(root)):

        def check(data: bytes, key: str = key) -> None:
            if not key.endswith(f"/{Digest.of(data).hex}"):
                raise CorruptError(f"receipt {key}", "it has other bytes than its name says")
            Receipt.parse(data)

        found = foreign or ward.problem(key, Place(checkpoint=root, part="receipt"), check, RECEIPT_LIMIT)
        if found is None:
            continue
        for giver, data in ward.donors.ask(key, RECEIPT_LIMIT):
            with suppress(CorruptError, MalformedError):
                check(data)
                ward.put_right(found, giver, data)
                break
        else:
            ward.put_aside(found)
