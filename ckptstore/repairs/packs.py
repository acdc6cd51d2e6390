"""Packs from pieces: a pack that nobody has whole is put together again from the chunks that it is made of.

A flipped bit spoils one chunk of a pack, and the others still stand in it. Each chunk is hashed, wherever it comes
from, and so is the pack in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ckptstore.backends.protocol import ReadBackend
from ckptstore.closure import Closure, Need, read_closure
from ckptstore.errors import CkptStoreError
from ckptstore.findings import Finding
from ckptstore.format.digest import Digest
from ckptstore.format.keys import object_key
from ckptstore.names import checkpoints
from ckptstore.objects import Objects
from ckptstore.repairs.donors import Donor, Donors
from ckptstore.store import Store

LOOKS = 64
"""Checkpoints of each store whose packs are looked through for a chunk: first ancestors, then others."""

HERE = "what is left of it here"


@dataclass(slots=True)
class Pieces:
    """Chunks that were found so far, by digest, and the names of those who gave them."""

    found: dict[Digest, bytes] = field(default_factory=dict)
    givers: dict[Digest, str] = field(default_factory=dict)

    def take(self, giver: str, digest: Digest, data: bytes | None) -> bool:
        """Take a chunk if these are its bytes; whether they are."""
        if data is None or Digest.of(data) != digest:
            return False
        if digest not in self.found:
            self.found[digest] = data
            self.givers[digest] = giver
        return True

    def lacking(self, needs: Iterable[Need]) -> set[Digest]:
        """The chunks of these packs that nobody gave yet."""
        return {digest for need in needs for _, _, digest in need.slots if digest not in self.found}


def put_together(need: Need, pieces: Pieces) -> tuple[str, bytes] | None:
    """The bytes of a pack and who gave them; None if a piece is lacking, or the pieces do not make the pack."""
    if not need.slots or pieces.lacking([need]):
        return None
    end = 0
    parts, givers = [], []
    for offset, length, digest in sorted(need.slots, key=lambda slot: slot[0]):
        if offset != end:
            return None
        parts.append(pieces.found[digest])
        givers.append(pieces.givers[digest])
        end += length
    data = b"".join(parts)
    if Digest.of(data) != need.digest:
        return None
    return f"its chunks: {', '.join(dict.fromkeys(givers))}", data


def gather(
    here: Store, root: Digest, closure: Closure, broken: Mapping[str, Need], donors: Donors, pieces: Pieces
) -> None:
    """Look for the chunks of broken packs: in what is left of those packs, here and in other stores, in other packs of
    the same checkpoint and of others, and among whole objects.

    Args:
        here: the store that is repaired.
        root: the checkpoint.
        closure: what is known of it.
        broken: the packs by key.
        donors: the other stores.
        pieces: takes what is found.
    """
    _from_same_packs(here.backend, HERE, broken, pieces)
    for donor, store in donors.stores():
        _from_same_packs(_Quiet(donors, donor, store.backend), donor.name, broken, pieces)
    for name, store in _everyone(here, donors):
        if not (wanted := pieces.lacking(broken.values())):
            return
        for digest in wanted:
            pieces.take(name, digest, _whole(store, digest, broken))
        known = [closure] if store is here else []
        for other in _closures(store, root, known):
            _from_other_packs(store, name, other, broken, pieces)
            if not pieces.lacking(broken.values()):
                return


def _everyone(here: Store, donors: Donors) -> Iterator[tuple[str, Store]]:
    yield "other packs here", here
    for donor, store in donors.stores():
        yield donor.name, store


def _from_same_packs(backend: ReadBackend | _Quiet, name: str, broken: Mapping[str, Need], pieces: Pieces) -> None:
    for key, need in broken.items():
        for offset, length, digest in need.slots:
            if digest not in pieces.found:
                pieces.take(name, digest, _read(backend, key, offset, length))


def _from_other_packs(store: Store, name: str, other: Closure, broken: Mapping[str, Need], pieces: Pieces) -> None:
    wanted = pieces.lacking(broken.values())
    for key, need in other.objects.items():
        for offset, length, digest in need.slots if key not in broken else ():
            if digest in wanted and pieces.take(name, digest, _read(store.backend, key, offset, length)):
                wanted.discard(digest)


def _whole(store: Store, digest: Digest, broken: Mapping[str, Need]) -> bytes | None:
    """A chunk that is an object of its own: of a file of a tree, or a pack that it fills alone."""
    length = next(length for need in broken.values() for _, length, other in need.slots if other == digest)
    key = object_key(digest)
    return None if key in broken else _read(store.backend, key, 0, length + 1)


def _closures(store: Store, root: Digest, known: list[Closure]) -> Iterator[Closure]:
    """What the checkpoints of a store need, as far as their documents can be read: this one, ancestors, others."""
    yield from known
    objects = Objects(store.backend)
    for name in islice(_names(store, root, {closure.root for closure in known}), LOOKS):
        found: list[Finding] = []
        try:
            yield read_closure(objects, name, None, found.append, files=False)
        except CkptStoreError:
            continue


def _names(store: Store, root: Digest, seen: set[Digest | None]) -> Iterator[Digest]:
    """Roots of checkpoints, each once: this one, its ancestors, then the others of the store."""
    for listed in ((name for name, _ in store.history(root)), checkpoints(store.backend)):
        try:
            for name in listed:
                if name not in seen:
                    seen.add(name)
                    yield name
        except CkptStoreError:  # the history ends at a damaged one, and a listing at what is no file
            continue


@dataclass(frozen=True, slots=True)
class _Quiet:
    """A donor's bytes; what fails is noted with the donors."""

    donors: Donors
    donor: Donor
    backend: ReadBackend

    def get(self, key: str, offset: int, length: int) -> bytes:
        """Bytes of a key, none if there are none."""
        return self.donors.get(self.donor, self.backend, key, offset, length) or b""


def _read(backend: ReadBackend | _Quiet, key: str, offset: int, length: int) -> bytes | None:
    try:
        return backend.get(key, offset, length)
    except CkptStoreError:
        return None
