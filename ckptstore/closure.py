"""The closure of a root: every document and object that its checkpoint needs, and how its parts fit together.

Reads documents only. What is wrong goes to a report: :func:`~ckptstore.findings.raise_finding` for those who need a
whole closure, a list for those who want to know everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckptstore.ahead import Ahead
from ckptstore.errors import MalformedError, UsageError
from ckptstore.findings import Finding, Kind, Place, Report, raise_finding
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, object_key
from ckptstore.format.packs import PackLayout, Slot
from ckptstore.format.page import Entry, Role, TensorEntry, parse_page, show_role
from ckptstore.format.progress import count_updates, part_problems, problems
from ckptstore.format.shard import Shard
from ckptstore.format.state import Leaves, join_leaves, rng_root, shard_leaves, state_root
from ckptstore.format.tensors import SHORT
from ckptstore.format.tree import File, Preparation, Tree
from ckptstore.objects import Objects, malformed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack as the layout rule says: digest, length in bytes, and its slots by chunk digest."""

    digest: Digest
    length: int
    slots: dict[Digest, Slot]


@dataclass(slots=True)
class ShardView:
    """A shard with its entries in order, and its packs by role."""

    digest: Digest
    shard: Shard
    place: Place
    entries: list[Entry] = field(default_factory=list)
    packs: dict[Role, list[Pack]] = field(default_factory=dict)
    whole: bool = True

    def tensors(self) -> Iterator[TensorEntry]:
        """The tensor entries in order."""
        return (entry for entry in self.entries if isinstance(entry, TensorEntry))

    def leaves(self) -> Leaves:
        """The state leaves of this shard."""
        return shard_leaves(self.entries, self.shard.optimizers, self.shard.aliases)


@dataclass(slots=True)
class Need:
    """An object that the closure needs: its length in bytes, every place that uses it, and, if it is a pack, a place
    for each (offset, length, chunk) that some shard takes out of it."""

    digest: Digest
    length: int
    places: list[Place] = field(default_factory=list)
    slots: dict[tuple[int, int, Digest], Place] = field(default_factory=dict)


@dataclass(slots=True)
class Closure:
    """What a root needs: documents (key to size in bytes, parents before children) and objects (key to need)."""

    root: Digest | None
    checkpoint: Checkpoint | None = None
    shards: dict[int, ShardView] = field(default_factory=dict)
    trees: dict[Digest, Tree] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    objects: dict[str, Need] = field(default_factory=dict)

    def sizes(self) -> list[tuple[str, int]]:
        """(key, size in bytes) of every distinct key."""
        return [*self.documents.items(), *((key, need.length) for key, need in self.objects.items())]


def read_closure(
    objects: Objects,
    root: Digest,
    shards: Collection[int] | None = None,
    report: Report = raise_finding,
    *,
    files: bool = True,
) -> Closure:
    """Read and check all documents of a root.

    Args:
        objects: the store to read from.
        root: digest of the checkpoint document.
        shards: only these shards (a partial store); state root, coverage and counters can then not be recomputed.
        report: takes each finding; if it does not raise, reading goes on with what can be read.
        files: whether the trees of files and of the preparation belong to what is read.

    Returns:
        The closure; parts that could not be read are absent from it.
    """
    return _Reader(objects, root, report).read(shards, files)


def read_parts(
    objects: Objects,
    shards: Sequence[Digest],
    run: Digest | None,
    files: Digest | None,
    kept: MutableMapping[str, bytes] | None = None,
) -> Closure:
    """The closure of a checkpoint that is being made, without its own document, read and checked. Of its objects
    nothing is said yet.

    Args:
        objects: the store.
        shards: the shards, in order.
        run, files: preparation and tree that belong to it.
        kept: bytes of preparations and trees by key, from one checkpoint to the next; they are not read again as long
            as nothing makes their last readback doubtful.

    Raises:
        CkptStoreError: the first finding.
    """
    reader = _Reader(objects, None, raise_finding, kept)
    reader.read_shards(list(enumerate(shards)), len(shards))
    reader.read_files(run, files)
    for key in reader.kept.keys() - reader.closure.documents.keys():
        del reader.kept[key]
    return reader.closure


def read_shard(objects: Objects, digest: Digest, index: int, count: int) -> Closure:
    """The documents of one shard that may belong to no checkpoint yet, read and checked; raises the first finding."""
    reader = _Reader(objects, None, raise_finding)
    reader.read_shards([(index, digest)], count)
    return reader.closure


class _Reader:
    def __init__(
        self, objects: Objects, root: Digest | None, report: Report, kept: MutableMapping[str, bytes] | None = None
    ) -> None:
        self.objects = objects
        self.report = report
        self.place = Place(checkpoint=root)
        self.closure = Closure(root)
        self.kept: MutableMapping[str, bytes] = {} if kept is None else kept
        self.parsed: dict[tuple[str, Callable[[bytes], object]], object] = {}
        self.ahead = Ahead(objects)

    def read(self, shards: Collection[int] | None, files: bool) -> Closure:
        closure = self.closure
        assert closure.root is not None
        checkpoint = self._load(closure.root, Checkpoint.parse, self.place.at(part="checkpoint document"))
        if checkpoint is None:
            return closure
        closure.checkpoint = checkpoint
        count = len(checkpoint.shards)
        wanted = range(count) if shards is None else sorted(shards)
        for index in wanted:
            if index >= count:
                raise UsageError(f"shard {index} of {self.place}", f"there are {count} shards, numbered from 0")
        self.read_shards([(index, checkpoint.shards[index]) for index in wanted], count)
        if files:
            self.read_files(checkpoint.run, checkpoint.files)
        if shards is None:
            self._check_whole(checkpoint)
        else:
            self._check_part(checkpoint)
        return closure

    def read_shards(self, shards: Sequence[tuple[int, Digest]], count: int) -> None:
        """Read these shards (index, digest) with their pages."""
        position = {digest: index for index, digest in reversed(shards)}

        def pages(digest: Digest, data: bytes) -> list[Digest]:
            try:
                shard = Shard.parse(data)
            except MalformedError:
                return []
            fits = (shard.index, shard.count) == (position[digest], count)
            return [page.digest for page in shard.pages] if fits else []

        with self.ahead.announced([digest for _, digest in shards], pages):
            for index, digest in shards:
                self._read_shard(index, digest, count)

    def _read_shard(self, index: int, digest: Digest, count: int) -> None:
        place = self.place.at(shard=index)
        shard = self._load(digest, Shard.parse, place.at(part="shard document"))
        if shard is None:
            return
        if (shard.index, shard.count) != (index, count):
            # Not read further: a forged checkpoint could name one shard a thousand times.
            actual, expected = f"{shard.index} of {shard.count}", f"{index} of {count}"
            self._inconsistent(place, document_key(digest), "the shard is of another position", expected, actual)
            return
        view = ShardView(digest, shard, place)
        self.closure.shards[index] = view
        for number, ref in enumerate(shard.pages):
            page_place = place.at(part=f"page {number}", role=ref.role, path=ref.path)
            entries = self._load(ref.digest, parse_page, page_place)
            if entries is None:
                view.whole = False
                continue
            first = entries[0]
            if (len(entries), first.role, first.path) != (ref.count, ref.role, ref.path):
                message = "the page is not the one that the shard describes"
                self._inconsistent(page_place, document_key(ref.digest), message)
                view.whole = False  # and not taken in: a forged shard could name one page a thousand times
                continue
            view.entries.extend(entries)
        if view.whole:
            self._need_objects(view)

    def read_files(self, run: Digest | None, files: Digest | None) -> None:
        trees: list[tuple[Digest, str]] = []
        if run is not None:
            preparation = self._load(run, Preparation.parse, self.place.at(part="preparation"))
            if preparation is not None:
                trees = [(getattr(preparation, name), f"{name} tree") for name in ("plan", "inputs", "sources")]
        if files is not None:
            trees.append((files, "files tree"))
        unread = [digest for digest, _ in trees if document_key(digest) not in self.kept]
        with self.ahead.announced(unread):
            for digest, part in trees:
                self._read_tree(digest, self.place.at(part=part))

    def _need_objects(self, view: ShardView) -> None:
        layouts: dict[Role, PackLayout] = {}
        tails: dict[Role, dict[Digest, Place]] = {}
        for entry in view.tensors():
            for number, (digest, length) in enumerate(zip(entry.chunks, entry.lengths(), strict=True)):
                place = view.place.at(role=entry.role, path=entry.path, chunk=number)
                if length < SHORT:  # only a last one can be
                    layout = layouts.setdefault(entry.role, PackLayout())
                    layout.place(entry.path, digest, length)
                    tails.setdefault(entry.role, {}).setdefault(digest, place)
                    if layout.slots[digest].length != length:
                        message = "two places give the same chunk different lengths"
                        expected, actual = f"{layout.slots[digest].length} bytes", f"{length} bytes"
                        self._inconsistent(place, document_key(view.digest), message, expected, actual)
                else:
                    self._need(digest, length, place)
        listed = {packs.role: packs.digests for packs in view.shard.packs}
        for role in sorted(listed.keys() | layouts.keys()):
            layout = layouts.get(role, PackLayout())
            slots_of = layout.packs()
            digests = listed.get(role, ())
            if len(slots_of) != len(digests):
                message = f"packs of {show_role(role)} do not follow from its entries"
                key = document_key(view.digest)
                self._inconsistent(view.place, key, message, f"{len(slots_of)} packs", f"{len(digests)} packs")
                continue
            packs = []
            for number, (digest, length, slots) in enumerate(zip(digests, layout.lengths(), slots_of, strict=True)):
                need = self._need(digest, length, view.place.at(part=f"pack {number}", role=role))
                for chunk, slot in slots.items():
                    need.slots.setdefault((slot.offset, slot.length, chunk), tails[role][chunk])
                packs.append(Pack(digest, length, slots))
            view.packs[role] = packs

    def _read_tree(self, digest: Digest, place: Place) -> None:
        tree = self._load(digest, Tree.parse, place)
        if tree is None:
            return
        self.closure.trees[digest] = tree
        for file in tree.files:
            self._need_file(file, place)

    def _need_file(self, file: File, place: Place) -> None:
        for number, (digest, length) in enumerate(zip(file.chunks, file.lengths(), strict=True)):
            self._need(digest, length, place.at(path=file.path, chunk=number))

    def _need(self, digest: Digest, length: int, place: Place) -> Need:
        need = self.closure.objects.setdefault(object_key(digest), Need(digest, length))
        if need.length != length:
            message = "two places give the same object different lengths"
            self._inconsistent(place, object_key(digest), message, f"{need.length} bytes", f"{length} bytes")
        need.places.append(place)
        return need

    def _check_whole(self, checkpoint: Checkpoint) -> None:
        """Coverage, state root, rng root and progress: only when every shard could be read whole."""
        views = [self.closure.shards[index] for index in sorted(self.closure.shards)]
        if len(views) != len(checkpoint.shards) or not all(view.whole for view in views):
            return
        assert self.closure.root is not None
        key = document_key(self.closure.root)
        try:
            leaves = [view.leaves() for view in views]
        except MalformedError as error:
            self._inconsistent(self.place, key, str(error))
            return
        joined, wrong = join_leaves(leaves, checkpoint.ties, [(r.path, r.role) for r in checkpoint.replicas])
        for message in [*wrong, *shape_problems(views)]:
            self._inconsistent(self.place, key, message)
        computed = state_root(joined)
        if computed != checkpoint.state_root:
            message = "state root does not follow from its entries"
            self._inconsistent(self.place, key, message, str(computed), str(checkpoint.state_root))
        computed = rng_root([view.shard.rng for view in views])
        if computed != checkpoint.rng_root:
            message = "rng root does not follow from its generators"
            self._inconsistent(self.place, key, message, str(computed), str(checkpoint.rng_root))
        found = count_updates((entry for view in views for entry in view.entries), checkpoint.progress.states)
        for message in problems(checkpoint.step, checkpoint.progress, found):
            self.report(Finding(Kind.PROGRESS, self.place, key, message))

    def _check_part(self, checkpoint: Checkpoint) -> None:
        """What can be said of the counters with only some of the shards at hand."""
        for view in self.closure.shards.values():
            try:
                if view.whole:
                    view.leaves()
            except MalformedError as error:
                self._inconsistent(view.place, document_key(view.digest), str(error))
        entries = (entry for view in self.closure.shards.values() for entry in view.entries)
        assert self.closure.root is not None
        for message in part_problems(checkpoint.step, checkpoint.progress, count_updates(entries, ())):
            self.report(Finding(Kind.PROGRESS, self.place, document_key(self.closure.root), message))

    def _load(self, digest: Digest, parse: Callable[[bytes], T], place: Place) -> T | None:
        """The parsed document, read once however often it is named; None after a reported finding."""
        key = document_key(digest)
        if (key, parse) in self.parsed:  # the parser too: one digest may be named as two kinds
            return self.parsed[key, parse]  # type: ignore[return-value]
        data = self.kept.get(key) if self.objects.read_back_at(key) is not None else None
        if data is None:
            data = self.ahead.document(digest, place, self.report)
        if data is None:
            return None
        if parse in (Tree.parse, Preparation.parse):
            self.kept[key] = data
        self.closure.documents[key] = len(data)
        try:
            self.parsed[key, parse] = parsed = parse(data)
        except MalformedError as error:
            self.report(malformed(place, key, error))
            return None
        return parsed

    def _inconsistent(self, place: Place, key: str, message: str, expected: str = "", actual: str = "") -> None:
        self.report(Finding(Kind.INCONSISTENT, place, key, message, expected, actual))


_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def shape_problems(views: list[ShardView]) -> list[str]:
    """First and second moments whose shape is not their parameter's, in torch's own optimizers.

    Those of others may have any shape: there are optimizers that keep moments of a projection.
    """
    shapes = {e.path: e.shape for view in views for e in view.tensors() if e.role[0] in ("weight", "buffer")}
    wrong = []
    for view in views:
        own = {optimizer.name for optimizer in view.shard.optimizers if optimizer.type.startswith("torch.optim.")}
        for entry in view.tensors():
            name = entry.role[-1]
            if entry.role[0] == "optim" and entry.role[1] in own and name in _MOMENTS:
                shape = shapes.get(entry.path)
                if shape is not None and shape != entry.shape:
                    wrong.append(f"{name} of {entry.path!r:.120} has shape {entry.shape}, its parameter {shape}")
    return wrong
