"""Lineages: what refs, pins and parents say of the order of checkpoints. Nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TypeVar

from ckptstore.collection.inventory import Inventory, add_new_names
from ckptstore.errors import BackendError, CkptStoreError, CorruptError, UnsupportedVersionError
from ckptstore.findings import Finding, Place
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.records import Pin
from ckptstore.objects import Objects
from ckptstore.pins import read_pin
from ckptstore.refs import Refs
from ckptstore.threads import in_threads

S = TypeVar("S")
R = TypeVar("R")

_UNLISTED = 1000  # generations that may have come after a listing

Problem = Callable[[str], object]
"""Takes a reason for which nothing may be deleted."""


@dataclass(frozen=True, slots=True)
class Node:
    """What of a checkpoint document says what it needs and where it stands."""

    root: Digest
    step: int
    parent: Digest | None
    shards: tuple[Digest, ...]
    run: Digest | None
    files: Digest | None


@dataclass(slots=True)
class Named:
    """What refs and pins name.

    Args:
        heads: names of refs by the root that they name now.
        before: names of refs by a root that a record of theirs names, the heads among them.
        pins: by what they keep.
    """

    heads: dict[Digest, list[str]] = field(default_factory=dict)
    before: dict[Digest, list[str]] = field(default_factory=dict)
    pins: dict[Digest, list[Pin]] = field(default_factory=dict)

    def pinned_shards(self, root: Digest) -> tuple[int, ...] | None:
        """The shards that pins keep of a pinned root; None: all.

        A ref keeps whole checkpoints: what one names, or named before, is whole whatever pins there are.
        """
        if root in self.before:
            return None
        kept: set[int] = set()
        for pin in self.pins.get(root, ()):
            if pin.shards is None:
                return None
            kept.update(pin.shards)
        return tuple(sorted(kept))


class Origin(Enum):
    """What leads to a lineage."""

    HEAD = "head"
    RECORD = "record"  # an older record of a ref that was set back, moved elsewhere, or names nothing now
    PIN = "pin"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Checkpoints from the newest to the oldest, each the parent of the one before.

    Those that belong to a lineage of an earlier origin are not repeated in one of a later.
    """

    origin: Origin
    name: str
    nodes: tuple[Node, ...]


def read_names(objects: Objects, inventory: Inventory, problem: Problem) -> Named:
    """Read all records of refs, and all pins. What cannot be read is a problem: nobody knows what it keeps."""
    try:
        add_new_names(objects.backend, inventory)
    except CorruptError as error:
        problem(str(error))
    named = Named()
    refs = Refs(objects.backend)
    for name, listed in sorted(inventory.refs.items()):
        try:
            head = refs.head(name)
        except CkptStoreError as error:
            problem(str(error))
            continue
        newest = 0 if head is None else head.generation
        if newest > len(listed) + _UNLISTED:  # a planted record may claim to be the last of all generations
            problem(f"ref {name}: of {newest} generations only {len(listed)} are there: nobody knows what it named")
            continue
        generations = range(1, newest + 1)
        for found in in_threads(partial(_attempt, partial(_named_by, refs, name)), generations, objects.threads):
            if isinstance(found, CkptStoreError):
                problem(str(found))
            elif found is not None and name not in named.before.setdefault(found, []):
                named.before[found].append(name)
        if head is not None and head.root is not None:
            named.heads.setdefault(head.root, []).append(name)
    keys = [(root, key) for root, keys in sorted(inventory.pins.items()) for key in sorted(keys)]
    reading = partial(_attempt, lambda item: read_pin(objects.backend, item[1]))
    for (root, _), pin in zip(keys, in_threads(reading, keys, objects.threads), strict=True):
        if isinstance(pin, CkptStoreError):
            problem(str(pin))
        else:
            named.pins.setdefault(root, []).append(pin)
    return named


class History:
    """Checkpoint documents by root, each read and checked once; of each only a few fields are held.

    Args:
        objects: the store.
        ends: whether a lineage may end at a root whose document cannot be read, because somebody let it go by name.
        problem: takes what cannot be read otherwise.
    """

    def __init__(self, objects: Objects, ends: Callable[[Digest], bool], problem: Problem) -> None:
        self._objects = objects
        self._ends = ends
        self._problem = problem
        self._known: dict[Digest, Node | None] = {}

    def node(self, root: Digest, why: str) -> Node | None:
        """The checkpoint, or None where the line ends because its document cannot be read, which is a problem unless
        somebody let it go. ``why`` says what leads there."""
        if root not in self._known:
            try:
                self._known[root] = read_node(self._objects, root)
            except CkptStoreError as error:
                if isinstance(error, UnsupportedVersionError | BackendError) or not self._ends(root):
                    self._problem(f"checkpoint {root} ({why}): {error}")
                self._known[root] = None
        return self._known[root]

    def walk(self, root: Digest, why: str) -> Iterator[Node]:
        """A checkpoint and its ancestors, newest first, as far as their documents can be read."""
        node = self.node(root, why)
        while node is not None:
            yield node
            node = None if node.parent is None else self.node(node.parent, f"an ancestor of {root.short}, {why}")

    def peek(self, root: Digest) -> Node | None:
        """The checkpoint if it was met and can be read."""
        return self._known.get(root)

    def has_met(self, root: Digest) -> bool:
        """Whether something leads to it, readable or not."""
        return root in self._known

    def known(self) -> set[Digest]:
        """All roots that were met and can be read."""
        return {root for root, node in self._known.items() if node is not None}


def read_node(objects: Objects, root: Digest) -> Node:
    """Read a checkpoint document. Raises the finding about one that is missing, damaged or no checkpoint."""
    data = objects.document(root, Place(checkpoint=root, part="checkpoint document"), raise_plain)
    assert data is not None
    item = Checkpoint.parse(data)
    return Node(root, item.step, item.parent, item.shards, item.run, item.files)


def raise_plain(finding: Finding) -> None:
    """A report that raises the first finding, without a hint: the collection gives its own."""
    raise finding.error()


def lineages(history: History, named: Named, pinned: Collection[Digest]) -> list[Lineage]:
    """All lineages: those of heads that no other head descends from, then those that only older records of refs lead
    to, then those of ``pinned`` checkpoints."""
    taken: set[Digest] = set()
    found: list[Lineage] = []
    sources: list[tuple[Origin, Mapping[Digest, Sequence[str]]]] = [
        (Origin.HEAD, named.heads),
        (Origin.RECORD, named.before),
        (Origin.PIN, {root: ["a pin"] for root in pinned}),
    ]
    for origin, names in sources:
        inner: set[Digest] = set()
        tips: dict[Digest, str] = {}
        for root, leading in sorted(names.items()):
            if root in taken:
                continue
            name = " and ".join(leading)
            tips[root] = name
            for node in history.walk(root, _why(origin, name)):
                if node.parent is None or node.parent in inner or node.parent in taken:
                    break
                inner.add(node.parent)
        here: set[Digest] = set()
        for root, name in tips.items():
            if root in inner:
                continue
            line = []
            for node in history.walk(root, _why(origin, name)):
                if node.root in taken:
                    break
                line.append(node)
            if line:
                found.append(Lineage(origin, name, tuple(line)))
                here.update(node.root for node in line)
        taken |= here
    return found


def _why(origin: Origin, name: str) -> str:
    match origin:
        case Origin.HEAD:
            return f"head of {name}"
        case Origin.RECORD:
            return f"named before by {name}"
        case Origin.PIN:
            return "pinned"


def _named_by(refs: Refs, name: str, generation: int) -> Digest | None:
    return refs.record(name, generation).root


def _attempt(work: Callable[[S], R], item: S) -> R | CkptStoreError:
    """What ``work`` returns, or the error that it raised: one that fails must not hide the others."""
    try:
        return work(item)
    except CkptStoreError as error:
        return error
