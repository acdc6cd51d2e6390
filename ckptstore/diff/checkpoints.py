"""Diff: what is not the same in two checkpoints, read from as little as possible.

Digests decide what is equal. A page that both sides share is not read, a tensor whose digest agrees is not read, and of
one that differs only the chunks that differ are. Bits come first: NaNs with equal bits are equal, and zeros of
different sign are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckptstore.diff.changes import Change, plain_changes, progress_changes, tree_changes, value_changes
from ckptstore.diff.difference import Difference, HyperChange, Move, RngChange, TensorChange, TensorSide
from ckptstore.diff.numeric import Comparison, compare, fold
from ckptstore.diff.side import CountingObjects, Documents, Key, Side
from ckptstore.errors import BackendError, CkptStoreError, CorruptError, MalformedError, NotFoundError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.canonical import Json, encode
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.dtypes import item_size
from ckptstore.format.page import HYPER, Entry, HyperEntry, Role, TensorEntry, ValueEntry, show_role, sort_key
from ckptstore.format.tree import Preparation, Tree
from ckptstore.objects import Objects


def diff(left: Objects, left_root: Digest, right: Objects, right_root: Digest) -> Difference:
    """Compare two checkpoints of one store or of two.

    Every document and object that is read is hashed. Of objects, at most one chunk of each side and a few packs are in
    memory at a time.

    Args:
        left, left_root: where the first one is, and its root.
        right, right_root: the same of the second.

    Returns:
        The difference. What cannot be read (a part of a partial store, a damaged object) is in its findings, and what
        depends on it is left out; the rest is compared.

    Raises:
        NotFoundError, CorruptError, MalformedError: one of the two checkpoint documents itself cannot be read.
    """
    left_objects = CountingObjects(left)
    right_objects = left_objects if left is right else CountingObjects(right)
    documents = Documents()
    sides = Side(left_objects, left_root, documents), Side(right_objects, right_root, documents)
    found = Difference(left_root, right_root, True, True) if left_root == right_root else _Comparer(*sides).run()
    return _counted(found, {left_objects, right_objects})


class _Comparer:
    """Compares two sides, part by part."""

    def __init__(self, left: Side, right: Side) -> None:
        self.left = left
        self.right = right
        self.sides = (left, right)
        self.shared: set[Digest] = set()
        self.values: list[Change] = []
        self.tensors: list[TensorChange] = []
        self.layout: list[Move] = []
        self.equal_tensors = 0
        self.hypers: dict[tuple[str, str, bytes, bytes], tuple[Json, Json, set[str], set[int]]] = {}

    def run(self) -> Difference:
        """The difference of two checkpoints with different roots."""
        left, right = self.left.checkpoint, self.right.checkpoint
        for side in self.sides:
            side.read_shards()
        self._read_pages()
        holders = [side.holders() for side in self.sides]
        shared = {ref.digest: ref for _, ref in self.left.pages() if ref.digest in self.shared}.values()
        files = self._file_changes()
        self._compare_shared_hypers()
        for key in sorted(self.left.entries.keys() | self.right.entries.keys(), key=lambda key: sort_key(*key)):
            self._compare(key)
        for ref in shared:
            self._note_move(ref.role, ref.path, ref.count, holders[0][ref.digest], holders[1][ref.digest])
        whole = all(side.whole for side in self.sides)
        return Difference(
            left=self.left_root,
            right=self.right_root,
            same_state=left.state_root == right.state_root,
            same_progress=left.progress == right.progress,
            fields=tuple(plain_changes(_fields(left), _fields(right))),
            progress=progress_changes(left.progress, right.progress),
            binding=tuple(_inner(value_changes("", left.binding, right.binding))),
            deviations=_deviation_changes(left, right),
            hyper=tuple(
                HyperChange(optimizer, name, old, new, tuple(sorted(paths)), tuple(sorted(groups)))
                for (optimizer, name, _, _), (old, new, paths, groups) in sorted(self.hypers.items())
            ),
            implementation=tuple(_implementation_changes(self.left, self.right)),
            tensors=tuple(self.tensors),
            values=tuple(self.values),
            aliases=tuple(plain_changes(*self._alias_names())) if whole else (),
            rng=tuple(_rng_changes(self.left, self.right)),
            layout=tuple(self.layout) if whole else (),
            files=files,
            equal_tensors=self.equal_tensors,
            shared_entries=sum(ref.count for ref in shared),
            findings=tuple(dict.fromkeys((*self.left.findings, *self.right.findings))),
        )

    @property
    def left_root(self) -> Digest:
        """Root of the left side."""
        assert self.left.place.checkpoint is not None
        return self.left.place.checkpoint

    @property
    def right_root(self) -> Digest:
        """Root of the right side."""
        assert self.right.place.checkpoint is not None
        return self.right.place.checkpoint

    def _read_pages(self) -> None:
        """Read the pages that only one side has; another only where an entry of one side may hide in it."""
        pages = [set(side.holders()) for side in self.sides]
        self.shared = pages[0] & pages[1]
        for side, digests in zip(self.sides, pages, strict=True):
            for digest in sorted(digests - self.shared):
                side.read_page(digest)
        due = self._differently_grouped()
        while True:
            for side, other in (self.sides, self.sides[::-1]):
                for key in side.entries.keys() - other.entries.keys():
                    due.update(self.shared.intersection(other.pages_around(key)))
            if not due:
                return
            self.shared -= due
            for digest in sorted(due):
                for side in self.sides:
                    side.read_page(digest)
            due = set()

    def _shared_pairs(self) -> Iterator[tuple[int, int, Digest, str]]:
        """(left shard, right shard, page, optimizer) of shared pages that may hold members of its groups."""
        where = self.right.holders()
        for left, shard in self.left.shards.items():
            for number, ref in enumerate(shard.pages):
                if ref.digest not in self.shared:
                    continue
                following = shard.pages[number + 1] if number + 1 < len(shard.pages) else None
                for optimizer in shard.optimizers:
                    role = encode([HYPER, optimizer.name])
                    if encode(list(ref.role)) > role or (following and encode(list(following.role)) < role):
                        continue
                    for right in where[ref.digest]:
                        yield left, right, ref.digest, optimizer.name

    def _group_pairs(self, left: int, right: int, optimizer: str) -> Iterator[tuple[int, Json, Json]]:
        """(group, hyper-parameters left, right) of two shards' descriptions of one optimizer, where they differ."""
        groups = [
            next((o.groups for o in side.shards[index].optimizers if o.name == optimizer), ())
            for side, index in ((self.left, left), (self.right, right))
        ]
        for number, (before, after) in enumerate(zip(*groups, strict=False)):
            if before.hyper != after.hyper:
                yield number, before.hyper, after.hyper

    def _differently_grouped(self) -> set[Digest]:
        """Shared pages that moved to a shard whose groups are others: only their entries say which group is meant."""
        return {
            digest
            for left, right, digest, optimizer in self._shared_pairs()
            if left != right and next(self._group_pairs(left, right, optimizer), None) is not None
        }

    def _compare_shared_hypers(self) -> None:
        """Groups that changed as a whole, with members on pages that were not read."""
        for left, right, _, optimizer in self._shared_pairs():
            for number, before, after in self._group_pairs(left, right, optimizer):
                self._note_hyper(optimizer, before, after, group=number)

    def _compare(self, key: Key) -> None:
        role, path = key
        left, right = self.left.entries.get(key, {}), self.right.entries.get(key, {})
        if left and right:
            self._note_move(role, path, 1, tuple(left), tuple(right))
        i, j = min(left, default=0), min(right, default=0)
        before, after = left.get(i), right.get(j)
        missing = self.left if before is None else self.right if after is None else None
        if missing is not None and not missing.whole:
            return  # it may be in a document that could not be read
        if isinstance(before, TensorEntry) and isinstance(after, TensorEntry):
            if before.digest == after.digest:
                self.equal_tensors += 1
            else:
                self.tensors.append(self._compare_tensors(i, before, j, after))
        elif isinstance(before, HyperEntry) and isinstance(after, HyperEntry):
            self._note_hyper(role[1], self.left.hyper(i, before), self.right.hyper(j, after), path=path)
        else:
            if isinstance(before, TensorEntry):
                self.tensors.append(TensorChange(path, role, "removed", _tensor_side(before), None))
            if isinstance(after, TensorEntry):
                self.tensors.append(TensorChange(path, role, "added", None, _tensor_side(after)))
            name = f"{show_role(role)} {path!r}"
            self.values += _optional_changes(name, self._value(self.left, i, before), self._value(self.right, j, after))

    @staticmethod
    def _value(side: Side, index: int, entry: Entry | None) -> Json:
        if isinstance(entry, ValueEntry):
            return entry.value
        return side.hyper(index, entry) if isinstance(entry, HyperEntry) else None

    def _compare_tensors(self, i: int, before: TensorEntry, j: int, after: TensorEntry) -> TensorChange:
        path, role = before.path, before.role
        sides = _tensor_side(before), _tensor_side(after)
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            return TensorChange(path, role, "kind", *sides)
        try:
            comparison = fold(self._chunk_comparisons(i, before, j, after))
        except (BackendError, CorruptError, NotFoundError, MalformedError) as error:
            return TensorChange(path, role, "unreadable", *sides, finding=self._finding(error, before))
        first = None if comparison.first is None else _index(comparison.first, before.shape)
        return TensorChange(path, role, "values", *sides, comparison=comparison, first=first)

    def _chunk_comparisons(self, i: int, before: TensorEntry, j: int, after: TensorEntry) -> Iterator[Comparison]:
        if before.inline is not None and after.inline is not None:
            yield compare(before.inline, after.inline, before.dtype)
            return
        for number, (old, new) in enumerate(zip(before.chunks, after.chunks, strict=True)):
            if old == new:
                yield Comparison.unread(before.lengths()[number] // item_size(before.dtype))
                continue
            left, right = self.left.read_chunk(i, before, number), self.right.read_chunk(j, after, number)
            yield compare(left, right, before.dtype)

    def _finding(self, error: CkptStoreError, entry: TensorEntry) -> Finding:
        for side in self.sides:
            last, side.objects.last = side.objects.last, None
            if last is not None:
                return last
        return Finding(Kind.of(error), Place(role=entry.role, path=entry.path), "", str(error))

    def _note_hyper(
        self, optimizer: str, before: Json, after: Json, path: str | None = None, group: int | None = None
    ) -> None:
        for change in _inner(_optional_changes("", before, after)):
            key = (optimizer, change.name, encode(change.left), encode(change.right))
            _, _, paths, groups = self.hypers.setdefault(key, (change.left, change.right, set(), set()))
            if path is not None:
                paths.add(path)
            if group is not None:
                groups.add(group)

    def _note_move(self, role: Role, path: str, entries: int, left: tuple[int, ...], right: tuple[int, ...]) -> None:
        if set(left) != set(right):
            self.layout.append(Move(role, path, entries, tuple(sorted(set(left))), tuple(sorted(set(right)))))

    def _alias_names(self) -> Iterator[dict[str, Json]]:
        for side in self.sides:
            yield {repr(path): repr(owner) for path, owner in side.aliases().items()}

    def _file_changes(self) -> tuple[Change, ...]:
        """Files of the trees that differ: those of the checkpoints, and those of their preparations."""
        left, right = self.left.checkpoint, self.right.checkpoint
        pairs: list[tuple[str, Digest | None, Digest | None]] = [("files", left.files, right.files)]
        if left.run != right.run and left.run is not None and right.run is not None:
            before = self.left.load(left.run, Preparation.parse, "preparation")
            after = self.right.load(right.run, Preparation.parse, "preparation")
            if before is not None and after is not None:
                pairs += [(n, getattr(before, n), getattr(after, n)) for n in ("plan", "inputs", "sources")]
        found: list[Change] = []
        for name, old, new in pairs:
            if old == new:
                continue
            trees = [
                None if digest is None else side.load(digest, Tree.parse, f"{name} tree")
                for side, digest in ((self.left, old), (self.right, new))
            ]
            if (trees[0] is None) == (old is None) and (trees[1] is None) == (new is None):
                found += tree_changes(name, *trees)
        return tuple(found)


def _counted(found: Difference, readers: set[CountingObjects]) -> Difference:
    return replace(
        found,
        documents_read=sum(objects.documents_read for objects in readers),
        objects_read=sum(objects.objects_read for objects in readers),
        bytes_read=sum(objects.bytes_read for objects in readers),
    )


def _fields(checkpoint: Checkpoint) -> dict[str, Json]:
    digests = {name: getattr(checkpoint, name) for name in ("parent", "run", "state_root", "rng_root", "files")}
    return {
        "step": checkpoint.step,
        "shards": len(checkpoint.shards),
        **{name: None if digest is None else str(digest) for name, digest in digests.items()},
    }


def _deviation_changes(left: Checkpoint, right: Checkpoint) -> tuple[Change, ...]:
    sides: list[dict[str, Json]] = [
        {f"{d.code}, expected {d.expected}, actual {d.actual}": "noted" for d in checkpoint.deviations}
        for checkpoint in (left, right)
    ]
    return tuple(plain_changes(*sides))


def _implementation_changes(left: Side, right: Side) -> Iterator[Change]:
    """Optimizer types and implementation selectors, shard by shard; the same change in several shards counts once."""
    if left.whole and right.whole:
        types: list[dict[str, Json]] = [
            {f"optimizer {o.name}": o.type for shard in side.shards.values() for o in shard.optimizers}
            for side in (left, right)
        ]
        yield from plain_changes(*types)
    seen: set[bytes] = set()
    for index in sorted(left.shards.keys() & right.shards.keys()):
        before, after = ({o.name: o for o in side.shards[index].optimizers} for side in (left, right))
        for name in sorted(before.keys() & after.keys()):
            groups = before[name].groups, after[name].groups
            changes = [
                change
                for number, (old, new) in enumerate(zip(*groups, strict=False))
                for change in value_changes(f"optimizer {name} group {number}", old.selectors, new.selectors)
            ]
            if len(groups[0]) != len(groups[1]):
                changes.append(Change(f"optimizer {name} groups", len(groups[0]), len(groups[1])))
            for change in changes:
                key = encode([change.name, change.left, change.right])
                if key not in seen:
                    seen.add(key)
                    yield change


def _rng_changes(left: Side, right: Side) -> Iterator[RngChange]:
    if left.checkpoint.rng_root == right.checkpoint.rng_root:
        return
    for index in range(max(len(left.checkpoint.shards), len(right.checkpoint.shards))):
        states = []
        for side in (left, right):
            if index < len(side.checkpoint.shards) and index not in side.shards:
                break  # its document could not be read
            shard = side.shards.get(index)
            states.append({entry.name: entry.value for entry in shard.rng} if shard else {})
        else:
            before, after = states
            for name in sorted(before.keys() | after.keys()):
                if name not in before:
                    yield RngChange(index, name, "added")
                elif name not in after:
                    yield RngChange(index, name, "removed")
                elif encode(before[name]) != encode(after[name]):
                    yield RngChange(index, name, "different")


def _optional_changes(name: str, left: Json, right: Json) -> Iterable[Change]:
    if left is None or right is None:
        return [Change(name, left, right)] if left != right else []
    return value_changes(name, left, right)


def _inner(changes: Iterable[Change]) -> Iterator[Change]:
    """Changes inside a mapping, without the dot that leads their names."""
    return (Change(change.name.removeprefix("."), change.left, change.right) for change in changes)


def _tensor_side(entry: TensorEntry) -> TensorSide:
    return TensorSide(entry.dtype, entry.shape, entry.digest)


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index in each dimension of the element number ``flat`` in row-major order."""
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))
