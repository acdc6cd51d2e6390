"""One key read back for itself, whatever lies under it: is it what its name and its kind promise?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadbackMethod, Stat
from ckptstore.errors import CkptStoreError, CorruptError, MalformedError, NotFoundError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import STORE_KEY, digest_of_key, parse_ref_key, receipt_key
from ckptstore.format.records import (
    RECORD_LIMIT,
    Feature,
    Lease,
    Pin,
    Receipt,
    RefRecord,
    Retired,
    ShardReceipt,
    attempt_subject,
)
from ckptstore.format.records import Store as StoreHeader
from ckptstore.format.tensors import CHUNK
from ckptstore.objects import Objects, undamaged
from ckptstore.readbacks.references import References, references


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading one key said.

    Args:
        key: the key.
        size: bytes that were read.
        method: how far down reading went; None if nothing good came back.
        finding: what is wrong; None if it is good, or has gone meanwhile.
        gone: it is not there.
        references: of a document: what it leads to.
        record: of a generation of a ref: what it says, and its digest.
    """

    key: str
    size: int
    method: ReadbackMethod | None = None
    finding: Finding | None = None
    gone: bool = False
    references: References | None = None
    record: tuple[RefRecord, Digest] | None = None

    @property
    def good(self) -> bool:
        """Whether the key has what it promises."""
        return self.method is not None and self.finding is None


def is_known(key: str) -> bool:
    """Whether this release knows what should lie under a key."""
    return key == STORE_KEY or key.partition("/")[0] in ("objects", "documents", *_RECORDS)


def read_key(objects: Objects, stat: Stat) -> Reading:
    """Read one key back and check it.

    Args:
        objects: the store, read from its medium.
        stat: the key, with the size that a listing gave.
    """
    if stat.key.startswith(("objects/", "documents/")):
        return _read_content(objects, stat)
    return _read_record(objects, stat)


def _read_content(objects: Objects, stat: Stat) -> Reading:
    key, digest, found = stat.key, digest_of_key(stat.key), list[Finding]()
    if digest is None:
        return Reading(key, 0, finding=Finding(Kind.CORRUPT, Place(part="key"), key, "no name that format 1 gives"))
    is_document = key.startswith("documents/")
    place = Place(part=f"{'document' if is_document else 'object'} {digest.short}")
    limit = DOCUMENT_LIMIT if is_document else CHUNK
    if stat.size > limit:
        expected, actual = f"at most {limit} bytes", f"{stat.size} bytes"
        return Reading(key, 0, finding=Finding(Kind.TRUNCATED, place, key, "wrong length", expected, actual))
    read = objects.document(digest, place, found.append) if is_document else None
    data = read if is_document else objects.read(digest, stat.size, place, found.append)
    if data is None:
        return Reading(key, stat.size, finding=found[0], gone=found[0].kind is Kind.MISSING)
    method = objects.weakest([key])
    if not is_document:
        return Reading(key, len(data), method)
    try:
        return Reading(key, len(data), method, references=references(data))
    except MalformedError as error:
        return Reading(key, len(data), method, Finding(Kind.MALFORMED, place, key, str(error)))


def _read_record(objects: Objects, stat: Stat) -> Reading:
    key, backend = stat.key, objects.backend
    parse = _RECORDS["" if key == STORE_KEY else key.partition("/")[0]]
    limit = DOCUMENT_LIMIT if key.startswith("receipts/") else RECORD_LIMIT
    place = Place(part=_part(key))

    def read() -> tuple[bytes, ReadbackMethod, RefRecord | None]:
        data, method = backend.readback(key, limit + 1)
        return data, method, parse(key, data)

    try:
        data, method, record = undamaged(backend, read)
    except NotFoundError:
        return Reading(key, 0, gone=True, finding=Finding(Kind.MISSING, place, key, "not in the store"))
    except CkptStoreError as error:
        return Reading(key, stat.size, finding=Finding(Kind.of(error), place, key, error.why or error.what))
    return Reading(key, len(data), method, record=None if record is None else (record, Digest.of(data)))


def _part(key: str) -> str:
    parsed = parse_ref_key(key)
    if parsed is not None:
        return f"ref {parsed[0]} generation {parsed[1]}"
    return {"receipts": "receipt", "pins": "pin", "leases": "lease", "features": "feature"}.get(
        key.partition("/")[0], "header of the store" if key == STORE_KEY else key.partition("/")[0]
    )


def _parse_ref(key: str, data: bytes) -> RefRecord:
    parsed, record = parse_ref_key(key), RefRecord.parse(data)
    if parsed is None:
        raise MalformedError("ref record", "its key is not that of a generation")
    if record.generation != parsed[1]:
        raise CorruptError("ref record", f"the record says generation {record.generation}")
    return record


def _parse_receipt(key: str, data: bytes) -> None:
    digest = Digest.of(data)
    if digest.hex != key.rpartition("/")[2]:
        raise CorruptError("receipt", f"wrong bytes; actual {digest}")
    try:
        expected = receipt_key(Receipt.parse(data).subject, digest)
    except MalformedError:
        try:
            expected = receipt_key(attempt_subject(ShardReceipt.parse(data).attempt), digest)
        except MalformedError:
            raise MalformedError("receipt", "neither a receipt nor a worker's receipt about its shard") from None
    if expected != key:
        raise CorruptError("receipt", f"it is about another subject than its key; its key is {expected}")


def _plain(parse: Callable[[bytes], object]) -> Callable[[str, bytes], None]:
    def check(_key: str, data: bytes) -> None:
        parse(data)

    return check


def _parse_anything(_key: str, _data: bytes) -> None:
    """Whoever runs a collection knows what its marker says."""


_RECORDS: dict[str, Callable[[str, bytes], RefRecord | None]] = {
    "": _plain(StoreHeader.parse),
    "refs": _parse_ref,
    "receipts": _parse_receipt,
    "pins": _plain(Pin.parse),
    "retired": _plain(Retired.parse),
    "leases": _plain(Lease.parse),
    "features": _plain(Feature.parse),
    "gc": _parse_anything,
}
