"""Records outside the closure: refs, receipts, pins, retirements, leases, the header of a store."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from ckptstore.errors import CorruptError, MalformedError
from ckptstore.format import canonical
from ckptstore.format.digest import Digest
from ckptstore.format.progress import Progress
from ckptstore.format.records import (
    Lease,
    Pin,
    Receipt,
    RefRecord,
    ShardReceipt,
    Store,
    attempt_subject,
    closure_digest,
)
from ckptstore.format.values import EntryRef, to_json
from tests.format.strategies import patient, ref_records

A, B = Digest.of(b"a"), Digest.of(b"b")
NONCE = "0123456789abcdef" * 2
RECORD = RefRecord(2, A, B, NONCE)


def test_the_header_has_the_constants_of_the_format() -> None:
    """F-100, F-101."""
    data = Store(NONCE).encode()
    assert data == b'{"chunk":16777216,"digest":"blake3","format":1,"id":"%s","kind":"store"}' % NONCE.encode()
    for old, new in ((b"16777216", b"16777217"), (b"blake3", b"blake2")):
        with pytest.raises(MalformedError, match="constants"):
            Store.parse(data.replace(old, new))


@given(ref_records())
@settings(patient, max_examples=40)
def test_a_ref_record_whose_field_was_changed_is_corrupt(record: RefRecord) -> None:
    """F-103: a record is named by a number and not by its digest, so it carries a check over itself."""
    check = str(Digest.of(canonical.encode(record._body())))
    forged = [
        replace(record, root=A),
        replace(record, nonce="f" * 32),
        replace(record, generation=record.generation % 2 + 1),
    ]
    if record.previous is not None:
        forged.append(replace(record, previous=A))
    for other in forged:
        if other != record:
            stale = other.encode().replace(str(Digest.of(canonical.encode(other._body()))).encode(), check.encode())
            with pytest.raises(CorruptError, match="check"):
                RefRecord.parse(stale)


def test_the_check_covers_exactly_the_four_fields() -> None:
    """F-103."""
    body = b'{"generation":2,"nonce":"%s","previous":"%s","root":"%s"}' % (
        NONCE.encode(),
        str(A).encode(),
        str(B).encode(),
    )
    assert b'"check":"%s"' % str(Digest.of(body)).encode() in RECORD.encode()


def test_a_ref_record_follows_another_unless_it_is_the_first() -> None:
    """F-102, F-104, F-105."""
    assert RefRecord.parse(RefRecord(1, None, None, NONCE).encode()).root is None
    for record in (RefRecord(1, A, B, NONCE), RefRecord(2, None, B, NONCE), RefRecord(0, None, B, NONCE)):
        with pytest.raises(MalformedError):
            RefRecord.parse(record.encode())


@pytest.mark.parametrize("nonce", ["", "x", NONCE[:-1], NONCE + "0", NONCE.upper(), f"{NONCE}\n"])
def test_a_nonce_is_32_hex_digits(nonce: str) -> None:
    """F-07."""
    for data, parse in ((Store(nonce).encode(), Store.parse), (RefRecord(1, None, B, nonce).encode(), RefRecord.parse)):
        with pytest.raises(MalformedError):
            parse(data)


RECEIPT = Receipt("verify", A, B, 3, 2, 100, "direct", "2026-09-14T03:56:28Z", "memory:x")


def test_details_of_a_receipt_are_typed_values() -> None:
    """F-44, F-106."""
    assert Receipt.parse(replace(RECEIPT, details=to_json({"loss": 0.1})).encode()).details == to_json({"loss": 0.1})
    for details in ({"loss": 1}, to_json([EntryRef(("0",))])):
        with pytest.raises(MalformedError):
            Receipt.parse(replace(RECEIPT, details=details).encode())  # type: ignore[arg-type]


SHARD_RECEIPT = ShardReceipt(
    attempt=NONCE,
    index=1,
    count=2,
    step=3,
    parent=A,
    run=None,
    binding=to_json({}),
    progress=Progress(),
    files=None,
    shard=B,
)


@pytest.mark.parametrize(
    "change", [{"index": 2}, {"count": 1}, {"binding": to_json([])}, {"binding": to_json({"a": EntryRef(("b",))})}]
)
def test_a_shard_receipt_is_for_one_shard_of_a_checkpoint(change: dict[str, object]) -> None:
    """F-108."""
    assert ShardReceipt.parse(SHARD_RECEIPT.encode()) == SHARD_RECEIPT
    with pytest.raises(MalformedError):
        ShardReceipt.parse(replace(SHARD_RECEIPT, **change).encode())  # type: ignore[arg-type]


def test_a_shard_receipt_has_a_shard_or_a_failure() -> None:
    """F-109."""
    gave_up = replace(SHARD_RECEIPT, shard=None, failure="out of space")
    assert ShardReceipt.parse(gave_up.encode()) == gave_up
    for wrong in (replace(gave_up, failure=""), replace(gave_up, shard=B)):
        with pytest.raises(MalformedError, match="failure"):
            ShardReceipt.parse(wrong.encode())


def test_attempts_have_subjects_of_their_own() -> None:
    """F-110."""
    assert attempt_subject(NONCE) == Digest.of(b"attempt " + NONCE.encode())
    assert attempt_subject(NONCE) != attempt_subject(NONCE[::-1])


def test_the_shards_of_a_pin_are_written_sorted_and_once() -> None:
    """F-111."""
    for shards in ((3, 0), (0, 3, 3), (0, 3)):
        assert Pin.parse(Pin(shards, "why").encode()).shards == (0, 3)
    assert Pin.parse(Pin(None, "why").encode()).shards is None
    with pytest.raises(MalformedError):
        Pin.parse(Pin((), "why").encode())


def test_a_lease_names_host_process_and_start() -> None:
    """F-113."""
    lease = Lease("host", "123:456", "2026-09-14T03:56:28Z")
    assert Lease.parse(lease.encode()) == lease
    for wrong in (Lease("", "1", "t"), Lease("h", "", "t"), Lease("h", "1", "")):
        with pytest.raises(MalformedError):
            Lease.parse(wrong.encode())


def test_the_digest_of_a_closure_follows_from_keys_and_sizes() -> None:
    """F-114."""
    sizes = [("objects/ab/x", 5), ("documents/cd/y", 7)]
    assert (
        closure_digest(sizes) == Digest.of(b'[["documents/cd/y",7],["objects/ab/x",5]]') == closure_digest(sizes[::-1])
    )
    assert closure_digest([]) == Digest.of(b"[]")
