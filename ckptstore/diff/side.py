"""One side of a comparison: a checkpoint of a store, read only as far as somebody asks, and counted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from ckptstore.chunks import ChunkSource
from ckptstore.closure import Pack, ShardView
from ckptstore.errors import MalformedError
from ckptstore.findings import Finding, Kind, Place, Report, raise_finding
from ckptstore.format.canonical import Json, encode
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key
from ckptstore.format.packs import PackLayout
from ckptstore.format.page import Entry, HyperEntry, Role, TensorEntry, parse_page, show_role, sort_key
from ckptstore.format.shard import PageRef, Shard
from ckptstore.objects import Objects, malformed

T = TypeVar("T")

Key: TypeAlias = "tuple[Role, str]"
"""What names an entry: its role and path."""


class CountingObjects(Objects):
    """Counts what is really read, and keeps the finding of each refused read."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects.backend, medium=objects.medium)
        self.documents_read = 0
        self.objects_read = 0
        self.bytes_read = 0
        self.last: Finding | None = None

    def read(self, digest: Digest, length: int, place: Place, report: Report = raise_finding) -> bytes | None:
        self.last = None
        data = super().read(digest, length, place, self._kept(report))
        if data is not None:
            self.objects_read += 1
            self.bytes_read += len(data)
        return data

    def document(self, digest: Digest, place: Place, report: Report = raise_finding) -> bytes | None:
        data = super().document(digest, place, report)
        if data is not None:
            self.documents_read += 1
            self.bytes_read += len(data)
        return data

    def _kept(self, report: Report) -> Report:
        def keep(finding: Finding) -> None:
            self.last = finding
            report(finding)

        return keep


class Documents:
    """Parsed documents by digest, read once, whichever side names them."""

    def __init__(self) -> None:
        self._parsed: dict[Digest, object] = {}

    def load(
        self, objects: Objects, digest: Digest, parse: Callable[[bytes], T], place: Place, report: Report
    ) -> T | None:
        """The document; None after a reported finding."""
        if digest not in self._parsed:
            data = objects.document(digest, place, report)
            if data is None:
                return None
            try:
                self._parsed[digest] = parse(data)
            except MalformedError as error:
                report(malformed(place, document_key(digest), error))
                return None
        return self._parsed[digest]  # type: ignore[return-value]


class Side:
    """One checkpoint: its documents as far as they are needed, and its entries as far as their pages were read."""

    def __init__(self, objects: CountingObjects, root: Digest, documents: Documents) -> None:
        self.objects = objects
        self.place = Place(checkpoint=root)
        self.documents = documents
        self.shards: dict[int, Shard] = {}
        self.entries: dict[Key, dict[int, Entry]] = {}
        self.findings: list[Finding] = []
        self.whole = True
        """Whether all shards and pages that were asked for could be read, so that what was not seen is not there."""
        self._starts: dict[int, list[tuple[bytes, bytes]]] = {}
        self._places: dict[Digest, list[tuple[int, PageRef]]] = {}
        self._packed: dict[tuple[int, Role], ChunkSource] = {}
        # Not by way of what is read already: that the other side has this root says nothing about this store.
        checkpoint = Documents().load(
            objects, root, Checkpoint.parse, self.place.at(part="checkpoint document"), raise_finding
        )
        assert checkpoint is not None
        self.checkpoint = checkpoint

    def load(self, digest: Digest, parse: Callable[[bytes], T], part: str) -> T | None:
        """Another document of this side; None after a finding."""
        return self.documents.load(self.objects, digest, parse, self.place.at(part=part), self.findings.append)

    def read_shards(self) -> None:
        for index, digest in enumerate(self.checkpoint.shards):
            part = f"shard {index} document"
            shard = self.load(digest, Shard.parse, part)
            if shard is not None and (shard.index, shard.count) != (index, len(self.checkpoint.shards)):
                # Not read further: a forged checkpoint could name one shard a thousand times.
                self._inconsistent(self.place.at(part=part), digest, "the shard is of another position")
                shard = None
            if shard is None:
                self.whole = False
                continue
            self.shards[index] = shard
            self._starts[index] = [sort_key(ref.role, ref.path) for ref in shard.pages]
            for ref in shard.pages:
                self._places.setdefault(ref.digest, []).append((index, ref))

    def pages(self) -> Iterator[tuple[int, PageRef]]:
        """(shard, page) in order."""
        return ((index, ref) for index, shard in self.shards.items() for ref in shard.pages)

    def holders(self) -> dict[Digest, tuple[int, ...]]:
        """The shards that hold each page."""
        return {digest: tuple(index for index, _ in places) for digest, places in self._places.items()}

    def read_page(self, digest: Digest) -> None:
        """Take in the entries of a page, for every shard that holds it."""
        for index, ref in self._places.get(digest, ()):
            for entry in self._page(index, ref) or ():
                self.entries.setdefault((entry.role, entry.path), {})[index] = entry

    def pages_around(self, key: Key) -> Iterator[Digest]:
        """In each shard, the page that holds ``key`` if that shard does."""
        wanted = sort_key(*key)
        for index, shard in self.shards.items():
            at = bisect_right(self._starts[index], wanted) - 1
            if at >= 0:
                yield shard.pages[at].digest

    def aliases(self) -> dict[str, str]:
        """Owner by path, of aliases within shards and of ties between them."""
        found = {tie.path: tie.owner for tie in self.checkpoint.ties}
        found.update((alias.path, alias.owner) for shard in self.shards.values() for alias in shard.aliases)
        return found

    def hyper(self, index: int, entry: HyperEntry) -> Json:
        """Hyper-parameters of an entry's group, typed; None if the shard describes no such group."""
        for optimizer in self.shards[index].optimizers:
            if optimizer.name == entry.role[1] and entry.group < len(optimizer.groups):
                return optimizer.groups[entry.group].hyper
        return None

    def read_chunk(self, index: int, entry: TensorEntry, number: int) -> bytes:
        """Chunk ``number`` of an entry of shard ``index``, verified.

        Where a short chunk lies in its pack follows from all entries of its role in the shard, so for one of those all
        pages with that role are read, also those that both sides share.
        """
        view = ShardView(self.checkpoint.shards[index], self.shards[index], self.place.at(shard=index))
        if not entry.tail or number < len(entry.chunks) - 1:
            return ChunkSource(self.objects, view).read(entry, number)
        key = (index, entry.role)
        if key not in self._packed:
            view.packs[entry.role] = self._packs(index, entry.role)
            self._packed[key] = ChunkSource(self.objects, view)
        return self._packed[key].read(entry, number)

    def _packs(self, index: int, role: Role) -> list[Pack]:
        layout = PackLayout()
        shard = self.shards[index]
        wanted = encode(list(role))
        for number, ref in enumerate(shard.pages):
            following = shard.pages[number + 1] if number + 1 < len(shard.pages) else None
            if encode(list(ref.role)) > wanted or (following and encode(list(following.role)) < wanted):
                continue
            entries = self._page(index, ref)
            if entries is None:
                raise self.findings[-1].error()
            for entry in entries:
                if isinstance(entry, TensorEntry) and entry.role == role and entry.tail:
                    layout.place(entry.path, entry.chunks[-1], entry.tail)
        digests = next((packs.digests for packs in shard.packs if packs.role == role), ())
        packs = layout.packs()
        if len(packs) != len(digests):
            what, why = f"{self.place.at(shard=index)}", f"packs of {show_role(role)} do not follow from its entries"
            raise MalformedError(what, why, "run ckpt verify")
        return [Pack(*pack) for pack in zip(digests, layout.lengths(), packs, strict=True)]

    def _page(self, index: int, ref: PageRef) -> tuple[Entry, ...] | None:
        place = self.place.at(shard=index, part=f"page {ref.digest.short}", role=ref.role, path=ref.path)
        entries = self.documents.load(self.objects, ref.digest, parse_page, place, self.findings.append)
        if entries is not None and (len(entries), entries[0].role, entries[0].path) != (ref.count, ref.role, ref.path):
            self._inconsistent(place, ref.digest, "the page is not the one that the shard describes")
            entries = None
        self.whole = self.whole and entries is not None
        return entries

    def _inconsistent(self, place: Place, document: Digest, message: str) -> None:
        self.findings.append(Finding(Kind.INCONSISTENT, place, document_key(document), message))
