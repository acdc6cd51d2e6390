"""What a document needs, found by walking down from it: the keys that a collection must not take away."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ckptstore.collection.inventory import Inventory
from ckptstore.collection.lineage import Node, raise_plain, read_node
from ckptstore.errors import MalformedError, UnsupportedVersionError
from ckptstore.findings import Place
from ckptstore.format import canonical
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import document_key, object_key
from ckptstore.format.page import Entry, TensorEntry, parse_page
from ckptstore.format.shard import Shard
from ckptstore.format.tree import Preparation, Tree
from ckptstore.objects import Objects
from ckptstore.threads import in_threads

T = TypeVar("T")

PARSERS: dict[str, Callable[[bytes], Any]] = {
    "checkpoint": Checkpoint.parse,
    "shard": Shard.parse,
    "page": parse_page,
    "preparation": Preparation.parse,
    "tree": Tree.parse,
}
"""The kinds of documents that this release knows."""

_BY_FIRST_NAME = {
    b'"binding"': "checkpoint",
    b'"aliases"': "shard",
    b'"entries"': "page",
    b'"format"': "preparation",
    b'"excluded"': "tree",
}
"""Kinds by the first name in their canonical bytes: pages are large, and so most often parsed only once."""

Key = tuple[bool, Digest]
"""Whether it is an object (else a document), and its digest."""


def kind_of(data: bytes) -> str:
    """The kind of a document's bytes.

    Raises:
        MalformedError: they are no document of a kind that this release knows.
    """
    guess = _BY_FIRST_NAME.get(data[1 : data.find(b":")])
    if guess is not None:
        with suppress(MalformedError):
            PARSERS[guess](data)
            return guess
    node = canonical.decode(data, DOCUMENT_LIMIT)
    kind = node.get("kind") if isinstance(node, dict) else None
    if not isinstance(kind, str) or kind not in PARSERS:
        raise UnsupportedVersionError("document", f"its kind {kind!r:.40} is not known to this release")
    PARSERS[kind](data)
    return kind


class Reach:
    """Walks down from documents and takes what it meets out of an inventory, so that in the end only that is left which
    nothing needs.

    Args:
        objects: the store.
        inventory: its ``documents`` and ``objects`` become those that were not met.
    """

    def __init__(self, objects: Objects, inventory: Inventory) -> None:
        self._objects = objects
        self._inventory = inventory
        self._done: set[bytes] = set()
        self.met_keys = 0
        self.met_bytes = 0

    def keep_document(self, digest: Digest) -> None:
        """Keep a document alone, without what it names."""
        self._meet((False, digest))

    def keep_checkpoint(self, node: Node, shards: Collection[int] | None, *, files: bool) -> None:
        """Keep a closure. What was kept before is not read again.

        Args:
            node: the checkpoint.
            shards: only these, None for all.
            files: whether preparation and trees must be there; else those that are not are passed over.

        Raises:
            CkptStoreError: a document is missing, damaged or of an unknown kind; names it.
        """
        for key in self._checkpoint(node, shards, files, self._done):
            self._meet(key)

    def keep_below(self, digest: Digest) -> None:
        """Keep a document of any kind, and all that it needs. Raises as :meth:`keep_checkpoint`."""
        for key in self._below(digest, self._done):
            self._meet(key)

    @staticmethod
    def keys_below(objects: Objects, digest: Digest) -> list[str]:
        """The keys of a document and of all that it needs, each once, the document's own first. Raises as
        :meth:`keep_checkpoint`."""
        found = Reach(objects, Inventory())._below(digest, set())
        return list(dict.fromkeys(object_key(key) if is_object else document_key(key) for is_object, key in found))

    def check_checkpoint(self, node: Node, shards: Collection[int] | None, *, files: bool) -> None:
        """Raises what :meth:`keep_checkpoint` would raise, and keeps nothing."""
        for _ in self._checkpoint(node, shards, files, set()):
            pass

    def _checkpoint(self, node: Node, shards: Collection[int] | None, files: bool, done: set[bytes]) -> Iterator[Key]:
        """The keys, parents first; ``done`` takes the documents of which all keys were told."""
        yield False, node.root
        place = Place(checkpoint=node.root)
        for index, digest in enumerate(node.shards):
            if shards is None or index in shards:
                yield from self._shard(digest, place.at(shard=index, part="shard document"), done)
        if node.run is not None:
            yield from self._preparation(node.run, place.at(part="preparation"), done, files)
        if node.files is not None:
            yield from self._tree(node.files, place.at(part="files tree"), done, files)

    def _below(self, digest: Digest, done: set[bytes]) -> Iterator[Key]:
        place = Place(part=f"document {digest.short}")
        match kind_of(self._read(digest, place)):
            case "shard":
                yield from self._shard(digest, place, done)
            case "preparation":
                yield from self._preparation(digest, place, done, True)
            case "tree":
                yield from self._tree(digest, place, done, True)
            case "page":
                yield False, digest
                yield from _chunks(parse_page(self._read(digest, place)))
            case _:
                node = read_node(self._objects, digest)
                yield from self._checkpoint(node, None, True, done)

    def _shard(self, digest: Digest, place: Place, done: set[bytes]) -> Iterator[Key]:
        if digest.raw in self._done:
            return
        yield False, digest  # before it is read: it is needed, readable or not
        shard = _parsed(Shard.parse, self._read(digest, place), place)
        pages = [page.digest for page in shard.pages if page.digest.raw not in self._done]
        for page in pages:
            yield False, page
        reading = partial(self._read, place=place.at(part="page"))
        for page, data in zip(pages, in_threads(reading, pages, self._objects.threads), strict=True):
            yield from _chunks(_parsed(parse_page, data, place.at(part=f"page {page.short}")))
            done.add(page.raw)
        for packs in shard.packs:
            for pack in packs.digests:
                yield True, pack
        done.add(digest.raw)

    def _preparation(self, digest: Digest, place: Place, done: set[bytes], needed: bool) -> Iterator[Key]:
        if digest.raw in self._done or not self._is_there(digest, needed):
            return
        yield False, digest
        parts = _parsed(Preparation.parse, self._read(digest, place), place)
        for name in ("plan", "inputs", "sources"):
            yield from self._tree(getattr(parts, name), place.at(part=f"{name} tree"), done, needed)
        if needed:
            done.add(digest.raw)

    def _tree(self, digest: Digest, place: Place, done: set[bytes], needed: bool) -> Iterator[Key]:
        if digest.raw in self._done or not self._is_there(digest, needed):
            return
        yield False, digest
        tree = _parsed(Tree.parse, self._read(digest, place), place)
        for file in tree.files:
            for chunk in file.chunks:
                yield True, chunk
        done.add(digest.raw)

    def _is_there(self, digest: Digest, needed: bool) -> bool:
        """False if a document that need not be there is not."""
        return needed or self._objects.backend.stat(document_key(digest)) is not None

    def _read(self, digest: Digest, place: Place) -> bytes:
        data = self._objects.document(digest, place, raise_plain)
        assert data is not None
        return data

    def _meet(self, key: Key) -> None:
        is_object, digest = key
        size = (self._inventory.objects if is_object else self._inventory.documents).pop(digest.raw, None)
        if size is not None:
            self.met_keys += 1
            self.met_bytes += size


def _chunks(entries: Collection[Entry]) -> Iterator[Key]:
    """The objects that entries name. A short last chunk lies in a pack."""
    for entry in entries:
        if isinstance(entry, TensorEntry):
            for chunk in entry.chunks[:-1] if entry.tail else entry.chunks:
                yield True, chunk


def _parsed(parse: Callable[[bytes], T], data: bytes, place: Place) -> T:
    """What ``parse`` makes of a document; an error names the place."""
    try:
        return parse(data)
    except MalformedError as error:
        raise type(error)(f"{place}", str(error)) from None
