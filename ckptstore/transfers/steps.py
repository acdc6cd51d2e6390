"""What a transfer has to do for each key, decided before anything is done.

Pure: the plan that is printed and the transfer that is made follow from the same steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

from ckptstore.closure import Closure
from ckptstore.findings import Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, retired_key


class Way(Enum):
    """What is done about a key of which a hint says where it stands. A wrong hint costs requests and nothing else."""

    SEND = "send"  # absent a moment ago: created, then read back
    READ = "read"  # may be there: read, and sent only if it is not there or wrong
    ACCEPT = "accept"  # there under a version that was read back a short time ago


@dataclass(frozen=True, slots=True)
class Step:
    """One key: an object of ``size`` bytes, or a document that had ``size`` bytes at the source."""

    key: str
    digest: Digest
    size: int
    place: Place
    way: Way

    @property
    def is_document(self) -> bool:
        """Whether it is a document; its length is then no part of what is promised."""
        return self.key.startswith("documents/")


@dataclass(frozen=True, slots=True)
class Past:
    """An ancestor as the source knows it: the size of its document in bytes, and its shards."""

    root: Digest
    size: int
    shards: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """All steps in their order: objects, retirements, documents of ancestors, then the closure's documents level by
    level, children before parents. What stands within one of these may be done at the same time.

    ``retire``: ancestors whose closure is not at the destination. ``whole``: shards of those whose closure may be
    there, by the key of their document; that must be made sure of before the document is created.
    """

    objects: tuple[Step, ...]
    retire: tuple[Digest, ...]
    history: tuple[Step, ...]
    whole: Mapping[str, tuple[Digest, ...]]
    documents: tuple[tuple[Step, ...], ...]

    def closure(self) -> Iterator[Step]:
        """The steps of the closure: what the receipt is about."""
        yield from self.objects
        for level in self.documents:
            yield from level


def decide(
    closure: Closure,
    history: Sequence[Past],
    there: Set[str],
    retired: Set[str] = frozenset(),
    accepted: Collection[str] = (),
) -> Steps:
    """The steps for a closure and the ancestors of its root.

    Args:
        closure: what has to be at the destination.
        history: the ancestors, newest first.
        there: keys that may be at the destination; any other key was absent a moment ago.
        retired: keys that say there that the closure of an ancestor may be gone.
        accepted: keys of the closure that need not be read again.
    """

    def step(key: str, digest: Digest, size: int, place: Place) -> Step:
        way = Way.ACCEPT if key in accepted else Way.READ if key in there else Way.SEND
        return Step(key, digest, size, place, way)

    def document(key: str, size: int, part: str = "document") -> Step:
        digest = Digest.parse(key.rsplit("/", 1)[1])
        return step(key, digest, size, Place(checkpoint=closure.root, part=f"{part} {digest.short}"))

    gone = dict.fromkeys(past.root for past in lost(history, there))
    return Steps(
        objects=tuple(step(key, need.digest, need.length, need.places[0]) for key, need in closure.objects.items()),
        retire=tuple(root for root in gone if retired_key(root) not in retired),
        history=tuple(document(document_key(past.root), past.size, "ancestor") for past in reversed(history)),
        whole={document_key(past.root): past.shards for past in history if past.root not in gone},
        documents=tuple(
            tuple(document(key, closure.documents[key]) for key in level) for level in _levels(closure) if level
        ),
    )


def lost(history: Sequence[Past], there: Set[str]) -> list[Past]:
    """The ancestors whose closure is not at the destination: a shard of theirs is absent."""
    return [past for past in history if any(document_key(shard) not in there for shard in past.shards)]


def _levels(closure: Closure) -> tuple[list[str], list[str], list[str]]:
    """Keys of the documents: pages and trees, then shards and the preparation, then the checkpoint."""
    above = {document_key(view.digest) for view in closure.shards.values()}
    if closure.checkpoint is not None and closure.checkpoint.run is not None:
        above.add(document_key(closure.checkpoint.run))
    top = set() if closure.root is None else {document_key(closure.root)}
    keys = closure.documents
    return (
        [key for key in keys if key not in above and key not in top],
        [key for key in keys if key in above],
        [key for key in keys if key in top],
    )
