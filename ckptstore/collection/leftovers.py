"""What nothing needs, in the order in which it goes: whatever names something goes before what it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ckptstore.backends.protocol import Stat
from ckptstore.collection.keeping import Keeping
from ckptstore.collection.lineage import raise_plain
from ckptstore.collection.reach import kind_of
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    CorruptError,
    MalformedError,
    NotFoundError,
    UnsupportedVersionError,
)
from ckptstore.findings import Place
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import STORE_KEY, digest_of_key, document_key, object_key
from ckptstore.format.records import RECORD_LIMIT, ShardReceipt, attempt_subject
from ckptstore.pins import holding
from ckptstore.threads import in_threads

_ORDER = (("checkpoint",), ("shard", "preparation"), ("page", "tree"))
"""Kinds of documents by stage."""


@dataclass(frozen=True, slots=True)
class Held:
    """A key that would go, were it not held by the endpoint until ``until`` (UTC)."""

    key: str
    size: int
    until: datetime


class Leftovers:
    """What nothing that is kept needs. Documents are read, to know what they are.

    Attributes:
        checkpoints: roots and steps of those among them that are checkpoints.
        stages: the keys that go, stage by stage: receipts, unnamed checkpoints, shards and preparations, pages and
            trees, objects.
        held: what would go, were it not held by the endpoint. What a held document needs stays, too.
    """

    def __init__(self, keeping: Keeping) -> None:
        self.checkpoints: list[tuple[Digest, int]] = []
        self.held: list[Held] = []
        self._keeping = keeping
        self._backend = keeping.objects.backend
        self._kinds: dict[bytes, str] = {}
        found = self._read()
        self._keep_on_purpose(found)
        self._keep_held_documents()
        left = keeping.inventory.documents
        self._kinds = {raw: kind for raw, kind in self._kinds.items() if raw in left}
        self.checkpoints = [(root, item.step) for root, item in sorted(found.items()) if root.raw in left]
        for root in sorted(keeping.retire):
            if not keeping.knows(root) and root.raw not in self._kinds:
                keeping.problem(f"{root} is not retired by name: there is nothing of that name here")
        self.stages = tuple(map(self._free, self._stages()))

    def _stages(self) -> Iterator[list[Stat]]:
        inventory = self._keeping.inventory
        yield list(self._receipts())
        for kinds in _ORDER:
            found = (raw for raw in sorted(self._kinds) if self._kinds[raw] in kinds)
            yield [Stat(document_key(Digest(raw)), inventory.documents[raw]) for raw in found]
        yield [Stat(object_key(Digest(raw)), size) for raw, size in sorted(inventory.objects.items())]

    def _keep_on_purpose(self, checkpoints: Mapping[Digest, Checkpoint]) -> None:
        """Keep what nothing names and somebody put here all the same: a copy of a checkpoint; what was prepared for a
        run whose first checkpoint is still to come; a tree of which a receipt tells, such as an archive of evidence."""
        keeping = self._keeping
        begun = keeping.runs() | {item.run for item in checkpoints.values()}
        for raw, kind in sorted(self._kinds.items()):
            digest = Digest(raw)
            if digest in keeping.retire or raw not in keeping.inventory.documents:
                continue
            if kind == "checkpoint" and keeping.facts.arrived_whole(digest):
                keeping.keep_arrived(digest)
            elif kind == "preparation" and digest not in begun:
                keeping.keep_other(digest, "prepared for a run that has no checkpoint here yet")
            elif kind in ("preparation", "tree") and keeping.facts.has_receipt(digest):
                keeping.keep_other(digest, "a receipt tells of it")

    def _read(self) -> dict[Digest, Checkpoint]:
        """Find out the kind of each document; returns those that are checkpoints.

        What is not understood is a problem: it may be of a kind of which this release does not know what it keeps.
        """
        checkpoints: dict[Digest, Checkpoint] = {}
        left = sorted(map(Digest, self._keeping.inventory.documents))
        for digest, found in in_threads(self._look, left, self._keeping.objects.threads):
            if isinstance(found, tuple):
                kind, checkpoint = found
                self._kinds[digest.raw] = kind
                if checkpoint is not None:
                    checkpoints[digest] = checkpoint
            elif self._keeping.was_let_go(digest) and not isinstance(found, UnsupportedVersionError | BackendError):
                self._kinds[digest.raw] = "checkpoint"  # whatever it was, it is the first to go
            elif found is not None:
                self._keeping.problem(f"document {digest}, which nothing names: {found}")
        return checkpoints

    def _look(self, digest: Digest) -> tuple[Digest, tuple[str, Checkpoint | None] | CkptStoreError | None]:
        """Kind, and which checkpoint; or why it is not understood; None if it is gone meanwhile."""
        try:
            data = self._keeping.objects.document(digest, Place(part=f"document {digest.short}"), raise_plain)
            assert data is not None
            kind = kind_of(data)
            return digest, (kind, Checkpoint.parse(data) if kind == "checkpoint" else None)
        except NotFoundError:
            return digest, None
        except CkptStoreError as error:
            return digest, error

    def _receipts(self) -> Iterator[Stat]:
        """Receipts about documents that go, and shard receipts: nobody writes, so every attempt has ended."""
        inventory = self._keeping.inventory
        header = Digest.of(self._backend.get(STORE_KEY, 0, RECORD_LIMIT + 1))
        unclear: list[tuple[Digest, Stat]] = []
        for subject, stats in sorted(inventory.receipts.items()):
            if subject.raw in self._kinds:
                yield from stats
            elif subject not in self._keeping.documented and subject != header:
                unclear.extend((subject, stat) for stat in stats)
        for stat, is_of_attempt in in_threads(self._is_of_attempt, unclear, self._keeping.objects.threads):
            if is_of_attempt:
                yield stat

    def _is_of_attempt(self, item: tuple[Digest, Stat]) -> tuple[Stat, bool]:
        """Whether this is a shard receipt. What is not understood stays: it says nothing of what is kept."""
        subject, stat = item
        try:
            receipt = ShardReceipt.parse(self._backend.get(stat.key, 0, DOCUMENT_LIMIT + 1))
        except (MalformedError, CorruptError, NotFoundError):
            return stat, False
        return stat, attempt_subject(receipt.attempt) == subject

    def _keep_held_documents(self) -> None:
        """Keep what held documents need, so that none is left without it."""
        reach, sizes = self._keeping.reach, self._keeping.inventory.documents
        documents = [Stat(document_key(Digest(raw)), sizes[raw]) for raw in sorted(self._kinds) if raw in sizes]
        for stat, until in self._asked(documents):
            if until is not None:
                self.held.append(Held(stat.key, stat.size, until))
                digest = digest_of_key(stat.key)
                assert digest is not None
                try:
                    reach.keep_below(digest)
                except CkptStoreError as error:
                    self._keeping.problem(f"{stat.key}, which is held until {until:%Y-%m-%dT%H:%M:%SZ}: {error}")

    def _free(self, stage: Sequence[Stat]) -> tuple[Stat, ...]:
        """Keys of a stage that are not held."""
        if stage and stage[0].key.startswith("documents/"):  # these have been asked for
            return tuple(stage)
        free = []
        for stat, until in self._asked(stage):
            if until is None:
                free.append(stat)
            else:
                self.held.append(Held(stat.key, stat.size, until))
        return tuple(free)

    def _asked(self, stats: Sequence[Stat]) -> Iterator[tuple[Stat, datetime | None]]:
        """Until when each key is held, None if it is not any more."""
        holder = holding(self._backend)
        if holder is None:
            return iter([(stat, None) for stat in stats])
        now = datetime.now(UTC)

        def ask(stat: Stat) -> tuple[Stat, datetime | None]:
            until = holder.held_until(stat.key)
            return stat, until if until is not None and until > now else None

        return in_threads(ask, stats, self._keeping.objects.threads)
