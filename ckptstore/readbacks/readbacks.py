"""Receipts of readbacks, read as what they are: somebody's note that he has read certain keys of a certain store.

A receipt says neither which keys nor proves anything. The keys follow from the closure of its subject and from what it
leaves out, and a receipt counts only if it states the digest of just that closure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ckptstore.backends.protocol import ReadBackend, ReadbackMethod
from ckptstore.errors import CkptStoreError, MalformedError
from ckptstore.findings import Finding, Kind, Place, Report
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.keys import NONCE, receipt_key, receipt_prefix
from ckptstore.format.records import RECEIPT_LIMIT, Receipt
from ckptstore.readbacks.actors import bits

OPERATIONS = ("verify", "read", "push", "pull", "repair")
"""Operations that read a closure back; ``read`` is a verification that did not reach the medium."""

_LASTING = {method.value for method in ReadbackMethod if method.reaches_medium and method is not ReadbackMethod.MEMORY}
_MAX_AGE = 10**9  # seconds
_SHARDS = re.compile(r"only shards? (\d{1,9}(?:, \d{1,9})*)")
_WITHOUT_FILES = "without its files"
_ACCEPTED = re.compile(r"\d{1,9} keys? accepted unread, by .*")  # which these are, and how old, the details tell


@dataclass(frozen=True, slots=True)
class Part:
    """What of a checkpoint is meant: these shards (None: all), and the trees of files or not."""

    shards: tuple[int, ...] | None = None
    files: bool = True

    def exceptions(self) -> tuple[str, ...]:
        """The same as the exceptions of a receipt."""
        left_out = [] if self.shards is None else [f"only shards {', '.join(map(str, self.shards))}"]
        return (*left_out, *([] if self.files else [_WITHOUT_FILES]))

    @staticmethod
    def of(exceptions: tuple[str, ...]) -> Part | None:
        """The part that exceptions leave, None if they are not understood."""
        shards: tuple[int, ...] | None = None
        files = True
        for text in exceptions:
            match = _SHARDS.fullmatch(text)
            if text == _WITHOUT_FILES:
                files = False
            elif match and shards is None:
                shards = tuple(int(number) for number in match[1].split(", "))
            elif _ACCEPTED.fullmatch(text):
                continue
            else:
                return None
        return Part(shards, files)


@dataclass(frozen=True, slots=True)
class Readback:
    """A receipt of a readback, as far as it concerns copies.

    Args:
        digest: of the receipt itself.
        receipt: what it says.
        time: when it was written, in UTC.
        part: what of the subject it is about.
        store: id of the store that was read, None where the receipt does not say.
        by: ``user@host``, empty where the receipt does not say.
        max_age: how old an earlier readback may have been to count in place of a new one.
        read: a bit for each key of the closure, sorted, whether it was read now; None where the receipt does not say.
    """

    digest: Digest
    receipt: Receipt
    time: datetime
    part: Part
    store: str | None
    by: str
    max_age: timedelta
    read: bytes | None

    @property
    def key(self) -> str:
        """The receipt's key."""
        return receipt_key(self.receipt.subject, self.digest)

    @property
    def lasting(self) -> bool:
        """Whether the bytes came from a medium that outlives the process that read them; only that is *verified*."""
        return self.receipt.method in _LASTING

    @property
    def place(self) -> str:
        """Where the store was: its URL, and of a directory the host as well, since each host has its own."""
        where = self.receipt.where
        return f"{self.by.rpartition('@')[2]} {where}" if where.startswith("file:") else where


def receipts_about(backend: ReadBackend, subject: Digest, report: Report) -> list[tuple[Digest, Receipt]]:
    """All receipts about ``subject`` with their digests; what cannot be read, or is not under its own digest, is
    reported and left out."""
    found = []
    for stat in backend.list(receipt_prefix(subject)):
        place = Place(checkpoint=subject, part="receipt")
        try:
            data = backend.get(stat.key, 0, RECEIPT_LIMIT + 1)
            digest, receipt = Digest.of(data), Receipt.parse(data)
        except CkptStoreError as error:
            report(Finding(Kind.of(error), place, stat.key, error.why or error.what))
            continue
        key = receipt_key(receipt.subject, digest)
        if key != stat.key:
            report(Finding(Kind.CORRUPT, place, stat.key, "its bytes are those of another receipt", stat.key, key))
            continue
        found.append((digest, receipt))
    return found


def readback_of(digest: Digest, receipt: Receipt, report: Report) -> Readback | None:
    """A receipt as a readback; None if it is none, or after a reported finding."""
    if receipt.operation not in OPERATIONS:
        return None
    part = Part.of(receipt.exceptions)
    if part is None:
        return None  # something was not done, and what is not understood here
    try:
        return Readback(digest, receipt, time_of(receipt.time), part, *_details(receipt))
    except MalformedError as error:
        place = Place(checkpoint=receipt.subject, part=f"receipt of a {receipt.operation}")
        report(Finding(Kind.MALFORMED, place, receipt_key(receipt.subject, digest), error.why))
        return None


def _details(receipt: Receipt) -> tuple[str | None, str, timedelta, bytes | None]:
    """(Store, by, greatest age, what was read) of the details."""
    plain = {} if receipt.details is None else values.from_json(receipt.details, "receipt details")
    if not isinstance(plain, Mapping):
        raise MalformedError("receipt", "its details are no mapping")
    store, by, age = plain.get("store"), plain.get("by", ""), plain.get("max_age_seconds", 0)
    if store is not None and not (isinstance(store, str) and NONCE.fullmatch(store)):
        raise MalformedError("receipt", "the id of its store is not 32 hex digits")
    if not isinstance(by, str):
        raise MalformedError("receipt", "who read is not a text")
    if type(age) is not int or not 0 <= age <= _MAX_AGE:
        raise MalformedError("receipt", "its greatest age is not a number of seconds")
    versions, read = plain.get("versions"), plain.get("read")
    if versions is not None and type(versions) is not list:
        raise MalformedError("receipt", "its versions are not a list")
    if read is not None and type(read) is not bytes:
        raise MalformedError("receipt", "what was read is not told in bits")
    if read is None and versions is not None and age:
        # Without a greatest age everything was read, whether or not it has a version.
        read = bits([version is not None for version in versions])
    return store, by, timedelta(seconds=age), read


def time_of(text: str) -> datetime:
    """The time of a receipt, in UTC. MalformedError if it is none."""
    try:
        found = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        found = datetime.min.replace(tzinfo=UTC)
    if found.year < 1970 or found.strftime("%Y-%m-%dT%H:%M:%SZ") != text:
        raise MalformedError("receipt", f"its time {text!r:.40} is not of the form 2026-09-14T03:56:28Z")
    return found
