"""Records outside the closure: refs, receipts, pins, retirements, leases, collections, the store's own header (F-100 to
F-118, F-164)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ckptstore.errors import CorruptError, MalformedError
from ckptstore.format import canonical, values
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.fields import FORMAT, Fields, as_list, close_document, open_document
from ckptstore.format.keys import NONCE
from ckptstore.format.progress import Progress
from ckptstore.format.tensors import CHUNK

RECORD_LIMIT = 64 * 2**10
RECEIPT_LIMIT = 2**20


@dataclass(frozen=True, slots=True)
class Store:
    """Header of a store: its id, and the constants of the format, so that a reader can refuse another format's."""

    id: str

    def encode(self) -> bytes:
        """Document bytes."""
        return close_document("store", {"id": self.id, "chunk": CHUNK, "digest": "blake3"})

    @staticmethod
    def parse(data: bytes) -> Store:
        """The header of document bytes."""
        fields = open_document(data, "store", RECORD_LIMIT)
        store = Store(_nonce(fields, "id"))
        chunk, digest = fields.count("chunk"), fields.text("digest")
        fields.end()
        if (chunk, digest) != (CHUNK, "blake3"):
            raise MalformedError("store", f"constants {chunk}, {digest!r:.20} are not those of format {FORMAT}")
        return store


@dataclass(frozen=True, slots=True)
class RefRecord:
    """One generation of a ref: the root it names (null: none), the digest of the record before it, and who wrote it.

    The record carries a check over its other fields: a ref record is the only mutable thing's truth and is named by a
    number, not by its digest.
    """

    generation: int
    previous: Digest | None
    root: Digest | None
    nonce: str

    def _body(self) -> dict[str, Json]:
        return {
            "generation": self.generation,
            "previous": None if self.previous is None else str(self.previous),
            "root": None if self.root is None else str(self.root),
            "nonce": self.nonce,
        }

    def encode(self) -> bytes:
        """Record bytes."""
        body = self._body()
        return close_document("ref", {**body, "check": str(Digest.of(canonical.encode(body)))}, RECORD_LIMIT)

    @staticmethod
    def parse(data: bytes) -> RefRecord:
        """The record of its bytes.

        Raises:
            CorruptError: the record does not agree with its own check.
        """
        fields = open_document(data, "ref", RECORD_LIMIT)
        record = RefRecord(
            fields.count("generation", 1),
            fields.optional_digest("previous"),
            fields.optional_digest("root"),
            _nonce(fields, "nonce"),
        )
        check = fields.digest("check")
        fields.end()
        actual = Digest.of(canonical.encode(record._body()))
        if actual != check:
            raise CorruptError("ref record", f"its check is {check}, its fields give {actual}")
        if (record.generation == 1) != (record.previous is None):
            raise MalformedError("ref record", "only the first generation has no previous record")
        return record


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one operation did to one subject. Whoever can write the store can forge one: it is a note, not a proof.

    ``documents`` and ``objects`` are counts of distinct keys, ``bytes_read`` what was really read, ``method`` how far
    down reading went, ``exceptions`` what was not done, ``details`` typed values (metrics, sizes).
    """

    operation: str
    subject: Digest
    closure: Digest | None
    documents: int
    objects: int
    bytes_read: int
    method: str
    time: str
    where: str
    exceptions: tuple[str, ...] = ()
    details: Json = None

    def encode(self) -> bytes:
        """Document bytes."""
        return close_document(
            "receipt",
            {
                "operation": self.operation,
                "subject": str(self.subject),
                "closure": None if self.closure is None else str(self.closure),
                "documents": self.documents,
                "objects": self.objects,
                "bytes_read": self.bytes_read,
                "method": self.method,
                "time": self.time,
                "where": self.where,
                "exceptions": list(self.exceptions),
                "details": self.details,
            },
            RECEIPT_LIMIT,
        )

    @staticmethod
    def parse(data: bytes) -> Receipt:
        """The receipt of document bytes."""
        fields = open_document(data, "receipt", RECEIPT_LIMIT)
        receipt = Receipt(
            operation=fields.text("operation"),
            subject=fields.digest("subject"),
            closure=fields.optional_digest("closure"),
            documents=fields.count("documents"),
            objects=fields.count("objects"),
            bytes_read=fields.count("bytes_read"),
            method=fields.text("method"),
            time=fields.text("time"),
            where=fields.text("where"),
            exceptions=fields.items("exceptions", _text),
            details=fields.take("details"),
        )
        fields.end()
        if receipt.details is not None:
            values.plain_from_json(receipt.details, "receipt details")
        return receipt


@dataclass(frozen=True, slots=True)
class ShardReceipt:
    """A worker's word that its shard is durable, within one attempt; the commit joins receipts of one attempt only.

    ``failure`` is empty, or why this worker gave up: then there is no shard.
    """

    attempt: str
    index: int
    count: int
    step: int
    parent: Digest | None
    run: Digest | None
    binding: Json
    progress: Progress
    files: Digest | None
    shard: Digest | None
    failure: str = ""

    def encode(self) -> bytes:
        """Document bytes."""
        return close_document(
            "shard-receipt",
            {
                "attempt": self.attempt,
                "index": self.index,
                "count": self.count,
                "step": self.step,
                "parent": None if self.parent is None else str(self.parent),
                "run": None if self.run is None else str(self.run),
                "binding": self.binding,
                "progress": self.progress.to_json(),
                "files": None if self.files is None else str(self.files),
                "shard": None if self.shard is None else str(self.shard),
                "failure": self.failure,
            },
        )

    @staticmethod
    def parse(data: bytes) -> ShardReceipt:
        """The shard receipt of document bytes."""
        fields = open_document(data, "shard-receipt")
        receipt = ShardReceipt(
            attempt=_nonce(fields, "attempt"),
            index=fields.count("index"),
            count=fields.count("count", 1),
            step=fields.count("step"),
            parent=fields.optional_digest("parent"),
            run=fields.optional_digest("run"),
            binding=fields.take("binding"),
            progress=Progress.from_json(fields.take("progress")),
            files=fields.optional_digest("files"),
            shard=fields.optional_digest("shard"),
            failure=fields.text("failure", empty=True),
        )
        fields.end()
        if type(values.plain_from_json(receipt.binding, "binding")) is not dict:
            raise MalformedError("shard receipt", "its binding is not a dict")
        if receipt.index >= receipt.count or (receipt.shard is None) != bool(receipt.failure):
            raise MalformedError("shard receipt", "its index, shard and failure do not fit together")
        return receipt


@dataclass(frozen=True, slots=True)
class Pin:
    """Keeps a root, whole (``shards`` None) or only some shards of it, sorted."""

    shards: tuple[int, ...] | None
    reason: str

    def encode(self) -> bytes:
        """Record bytes."""
        scope: Json = "all" if self.shards is None else [*sorted(set(self.shards))]
        return close_document("pin", {"scope": scope, "reason": self.reason}, RECORD_LIMIT)

    @staticmethod
    def parse(data: bytes) -> Pin:
        """The pin of record bytes."""
        fields = open_document(data, "pin", RECORD_LIMIT)
        scope = fields.take("scope")
        shards = None if scope == "all" else tuple(_index(item) for item in as_list(scope, "pin"))
        pin = Pin(shards, fields.text("reason"))
        fields.end()
        if shards is not None and (not shards or any(left >= right for left, right in pairwise(shards))):
            raise MalformedError("pin", "its shards are not sorted, repeat, or are none")
        return pin


@dataclass(frozen=True, slots=True)
class Retired:
    """Says that the closure of an ancestor may be gone, and why."""

    reason: str

    def encode(self) -> bytes:
        """Record bytes."""
        return close_document("retired", {"reason": self.reason}, RECORD_LIMIT)

    @staticmethod
    def parse(data: bytes) -> Retired:
        """The retirement of record bytes."""
        fields = open_document(data, "retired", RECORD_LIMIT)
        retired = Retired(fields.text("reason"))
        fields.end()
        return retired


@dataclass(frozen=True, slots=True)
class Feature:
    """An addition to the format that this store uses, and why."""

    reason: str

    def encode(self) -> bytes:
        """Record bytes."""
        return close_document("feature", {"reason": self.reason}, RECORD_LIMIT)

    @staticmethod
    def parse(data: bytes) -> Feature:
        """The feature of record bytes."""
        fields = open_document(data, "feature", RECORD_LIMIT)
        feature = Feature(fields.text("reason"))
        fields.end()
        return feature


@dataclass(frozen=True, slots=True)
class Lease:
    """A live writer: where it runs, which process (with its start, so that a reused pid is no proof of life), since
    when."""

    host: str
    process: str
    time: str

    def encode(self) -> bytes:
        """Record bytes."""
        body: dict[str, Json] = {"host": self.host, "process": self.process, "time": self.time}
        return close_document("lease", body, RECORD_LIMIT)

    @staticmethod
    def parse(data: bytes) -> Lease:
        """The lease of record bytes."""
        fields = open_document(data, "lease", RECORD_LIMIT)
        lease = Lease(fields.text("host"), fields.text("process"), fields.text("time"))
        fields.end()
        return lease


@dataclass(frozen=True, slots=True)
class CollectionMarker:
    """A collection that is running: where, in which process (as in a lease), since when, and the nonce by which it
    knows its own marker again."""

    host: str
    process: str
    time: str
    nonce: str

    def encode(self) -> bytes:
        """Record bytes."""
        body: dict[str, Json] = {"host": self.host, "process": self.process, "time": self.time, "nonce": self.nonce}
        return close_document("collection", body, RECORD_LIMIT)

    @staticmethod
    def parse(data: bytes) -> CollectionMarker:
        """The marker of record bytes."""
        fields = open_document(data, "collection", RECORD_LIMIT)
        marker = CollectionMarker(
            fields.text("host"), fields.text("process"), fields.text("time"), _nonce(fields, "nonce")
        )
        fields.end()
        return marker


def attempt_subject(attempt: str) -> Digest:
    """Subject under which the shard receipts of one attempt are published."""
    return Digest.of(f"attempt {attempt}".encode())


def closure_digest(sizes: Iterable[tuple[str, int]]) -> Digest:
    """Digest of a closure: canonical list of its distinct (key, size in bytes), sorted by key."""
    return Digest.of(canonical.encode([[key, size] for key, size in sorted(sizes)]))


def _nonce(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if not NONCE.fullmatch(text):
        raise MalformedError(fields.where, f"field {name!r} is not 32 lowercase hex digits")
    return text


def _index(node: Json) -> int:
    if type(node) is not int or node < 0:
        raise MalformedError("pin", "its scope is neither 'all' nor a list of shards")
    return node


def _text(node: Json) -> str:
    if type(node) is not str:
        raise MalformedError("receipt", "an exception that is not a text")
    return node
