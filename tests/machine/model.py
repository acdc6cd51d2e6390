"""What a world of stores must hold, in plain dicts and sets: no code of the library decides anything here, but for the
documents' own parsers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key, document_key, object_key
from ckptstore.format.page import parse_page
from ckptstore.format.shard import Shard
from tests.support.invariants import children


class Harm(Enum):
    """What happened to a key."""

    FLIPPED = "flipped"
    CUT = "cut"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Truth:
    """A checkpoint: its step, parent, and what each shard restores to."""

    step: int
    parent: Digest | None
    shards: tuple[dict[str, Any], ...]


@dataclass(slots=True)
class Holding:
    """What one store must hold.

    Attributes:
        refs: the roots that each ref named, oldest first; a root that it names again at once counts once.
        whole: roots whose closure is there, or was before it was damaged.
        partial: roots of which only these shards are there.
        pins: by nonce, the root and the shards (None: all) of each pin.
        retired: roots whose closure went with a collection.
        damage: by key, what was done to it and the bytes that are there now.
    """

    refs: dict[str, list[Digest | None]] = field(default_factory=dict)
    whole: set[Digest] = field(default_factory=set)
    partial: dict[Digest, set[int]] = field(default_factory=dict)
    pins: dict[str, tuple[Digest, tuple[int, ...] | None]] = field(default_factory=dict)
    retired: set[Digest] = field(default_factory=set)
    damage: dict[str, tuple[Harm, bytes | None]] = field(default_factory=dict)

    def head(self, ref: str) -> Digest | None:
        """The root that a ref names."""
        return self.refs[ref][-1] if ref in self.refs else None


@dataclass(slots=True)
class Model:
    """Everything that is true whatever happened to a store: good bytes by key, and checkpoints by root."""

    good: dict[str, bytes] = field(default_factory=dict)
    truths: dict[Digest, Truth] = field(default_factory=dict)
    _below: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def learn(self, key: str, data: bytes) -> bool:
        """Take in the bytes of an object or document, if they are those of its name; whether they are."""
        if key in self.good:
            return self.good[key] == data
        if Digest.of(data) != digest_of_key(key):
            return False
        self.good[key] = data
        return True

    def below(self, key: str) -> tuple[str, ...]:
        """Keys that a document needs."""
        if key not in self._below:
            self._below[key] = tuple(children(self.good[key])) if key.startswith("documents/") else ()
        return self._below[key]

    def checkpoint(self, root: Digest) -> Checkpoint:
        return Checkpoint.parse(self.good[document_key(root)])

    def lineage(self, root: Digest) -> Iterator[Digest]:
        """``root`` and its ancestors, newest first."""
        current: Digest | None = root
        while current is not None:
            yield current
            current = self.truths[current].parent

    def closure(self, root: Digest, shards: set[int] | None = None) -> set[str]:
        """All keys of a root, or of some of its shards."""
        own = document_key(root)
        listed = self.checkpoint(root).shards
        todo = [document_key(digest) for index, digest in enumerate(listed) if shards is None or index in shards]
        found = {own}
        while todo:
            key = todo.pop()
            if key not in found:
                found.add(key)
                todo += self.below(key)
        return found

    def faults(self, held: Holding, keys: set[str], root: Digest, shards: set[int] | None = None) -> dict[str, str]:
        """What a verification of a root, or of some of its shards, must find: by key, one kind of its findings.

        What lies behind a damaged document is not seen. ``keys`` are those that are in the store.
        """
        own = document_key(root)
        if own in held.damage:
            return {own: _kind(held, own)}
        found: dict[str, str] = {}
        for index, digest in enumerate(self.checkpoint(root).shards):
            if shards is None or index in shards:
                found |= self._shard_faults(held, digest)
        if shards is None:
            found |= self._history_faults(held, keys, root)
        return found

    def _shard_faults(self, held: Holding, digest: Digest) -> dict[str, str]:
        key = document_key(digest)
        if key in held.damage:
            return {key: _kind(held, key)}
        shard = Shard.parse(self.good[key])
        pages = [document_key(page.digest) for page in shard.pages]
        bad = {page: _kind(held, page) for page in pages if page in held.damage}
        if bad:
            return bad  # which objects it needs is only known with all of its pages
        packs = [object_key(pack) for packs in shard.packs for pack in packs.digests]
        chunks = [chunk for page in pages for chunk in self.below(page)]
        return {key: _kind(held, key) for key in (*packs, *chunks) if key in held.damage}

    def _history_faults(self, held: Holding, keys: set[str], root: Digest) -> dict[str, str]:
        found: dict[str, str] = {}
        for past in list(self.lineage(root))[1:]:
            key = document_key(past)
            if key not in keys:
                return {**found, key: "ancestor"}
            if key in held.damage:
                return {**found, key: "corrupt"}
            there = all(document_key(shard) in keys for shard in self.checkpoint(past).shards)
            if not there and f"retired/{past.hex}" not in keys:
                found[key] = "ancestor"
        return found

    def entries(self, root: Digest) -> dict[tuple[str, ...], Digest]:
        """Tensor digest by role and path, of all shards."""
        found = {}
        for digest in self.checkpoint(root).shards:
            for page in Shard.parse(self.good[document_key(digest)]).pages:
                for entry in parse_page(self.good[document_key(page.digest)]):
                    tensor = getattr(entry, "digest", None)
                    if tensor is not None:
                        found[(*entry.role, entry.path)] = tensor
        return found


def _kind(held: Holding, key: str) -> str:
    """The kind of finding that the damage of a key must give."""
    harm, _ = held.damage[key]
    if harm is Harm.GONE:
        return "missing"
    # Nobody knows how long a document should be.
    return "truncated" if harm is Harm.CUT and key.startswith("objects/") else "corrupt"
