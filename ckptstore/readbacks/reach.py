"""What the kept checkpoints of a store lead to: which of its keys nothing leads to, what is missing, and whom a damaged
key hurts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptstore.errors import CkptStoreError, CorruptError, MalformedError, NotFoundError
from ckptstore.findings import Finding, Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key, document_key, retired_key
from ckptstore.format.records import RECORD_LIMIT, RefRecord
from ckptstore.readbacks.kept import Kept, kept_checkpoints
from ckptstore.readbacks.references import References

if TYPE_CHECKING:
    from ckptstore.store import Store

_PLACED = 32  # closures that are read to say where in a checkpoint a damaged key belongs


@dataclass(slots=True)
class Reach:
    """What checkpoints lead to.

    Args:
        kept: heads and pins.
        reached: keys that something leads to.
        needed: of them, those that have to be there.
        roots: the checkpoints whose closures have to be there, by the shards of them that are kept (None: all).
    """

    kept: Kept
    reached: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    roots: dict[Digest, tuple[int, ...] | None] = field(default_factory=dict)


class Reacher:
    """Walks from refs and pins through the documents of a store.

    Args:
        store: the store.
        present: its keys.
        records: those of refs that were read already, by key.
        known: what documents lead to, of those that were read already.
        read: reads another document; None if it cannot be had.
    """

    def __init__(
        self,
        store: Store,
        present: Collection[str],
        records: Mapping[str, tuple[RefRecord, Digest]],
        known: dict[str, References],
        read: Callable[[str], References | None],
    ) -> None:
        self._store = store
        self._present = present
        self._records = records
        self._retired: set[str] = set()
        self._known = known
        self._read = read

    def walk(self) -> Reach:
        """All that is led to. A checkpoint that a ref has named before, and no line of parents leads to any more, is
        reached; it need not be there."""
        found = Reach(kept_checkpoints(self._store))
        self._retired = {stat.key for stat in self._store.backend.list("retired/")}
        for root in found.kept.heads.values():
            self._line(found, root)
        for root in found.kept.pinned:
            if root not in found.roots:
                self._pinned(found, root)
        for digest in found.kept.parts:
            closure = self._closure(digest, None)
            found.reached |= closure
            found.needed |= closure
        for root in self._named_before():
            if document_key(root) not in self._present:
                continue
            # Of one that was retired the document stays as history, and what it names is not asked for.
            is_gone = root not in found.roots and retired_key(root) in self._retired
            found.reached |= {document_key(root)} if is_gone else self._closure(root, None)
        return found

    def given_up(self, roots: Collection[Digest]) -> bool:
        """Whether all these checkpoints were retired, also while this walk was under way."""
        return bool(roots) and all(self._store.backend.stat(retired_key(root)) is not None for root in roots)

    def hurt(self, found: Reach, bad: Collection[str]) -> dict[str, list[Digest]]:
        """Kept checkpoints by the damaged or missing key that they need."""
        hurt: dict[str, list[Digest]] = {}
        if bad:
            for root, shards in found.roots.items():
                for key in self._closure(root, shards).intersection(bad):
                    hurt.setdefault(key, []).append(root)
        return hurt

    def _line(self, found: Reach, head: Digest) -> None:
        """A checkpoint that is kept, and its ancestors: their documents always, their closures if not retired."""
        root: Digest | None = head
        while root is not None and found.roots.get(root, ()) is not None:
            if root == head or retired_key(root) not in self._retired:
                found.roots[root] = None
                closure = self._closure(root, None)
            else:
                closure = {document_key(root)}
            found.reached |= closure
            found.needed |= closure
            root = self._parent(root)

    def _pinned(self, found: Reach, root: Digest) -> None:
        """A checkpoint that is pinned. Of one that is here in part, the ancestors need not be here."""
        try:
            shards = self._store.scope(root)
        except CkptStoreError:  # a pin that cannot be read is a finding itself
            shards = None
        if shards is None:
            self._line(found, root)
            return
        found.roots[root] = shards
        closure = self._closure(root, shards)
        found.reached |= closure
        found.needed |= closure
        parent = self._parent(root)
        while parent is not None and document_key(parent) in self._present:
            found.reached.add(document_key(parent))
            parent = self._parent(parent)

    def _parent(self, root: Digest) -> Digest | None:
        named = self._references(document_key(root))
        return None if named is None else named.parent

    def _closure(self, root: Digest, shards: tuple[int, ...] | None) -> set[str]:
        """Keys of a closure, as far as its documents can be read."""
        key = document_key(root)
        found, named = {key}, self._references(key)
        if named is None:
            return found
        wanted = range(len(named.shards)) if shards is None else [i for i in shards if i < len(named.shards)]
        waiting = [*named.keys, *(named.shards[index] for index in wanted)]
        while waiting:
            key = waiting.pop()
            if key in found:
                continue
            found.add(key)
            inner = self._references(key) if key.startswith("documents/") else None
            waiting += [] if inner is None else inner.keys
        return found

    def _references(self, key: str) -> References | None:
        if key not in self._known:
            read = self._read(key)
            if read is None:
                return None
            self._known[key] = read
        return self._known[key]

    def _named_before(self) -> Iterator[Digest]:
        """Roots that refs name or named. Records that were not read for their age are read now."""
        for stat in self._store.backend.list("refs/"):
            known = self._records.get(stat.key)
            try:
                record = known[0] if known else RefRecord.parse(self._store.backend.get(stat.key, 0, RECORD_LIMIT + 1))
            except (NotFoundError, CorruptError, MalformedError):
                continue  # a damaged record is a finding itself
            if record.root is not None:
                yield record.root


def placed(
    store: Store, findings: Mapping[str, Finding], hurt: Mapping[str, list[Digest]], found: Reach
) -> dict[str, Finding]:
    """The findings about keys, with the place in a checkpoint that each hurts: shard, role, tensor, chunk or file."""
    placed: dict[str, Finding] = {}
    for _ in range(_PLACED):
        key = next((key for key in findings if key in hurt and key not in placed), None)
        if key is None:
            break
        places = _places(store, hurt[key][0], found)
        for other, finding in findings.items():
            if other not in placed and (other in places or other == key):
                place = places.get(other, Place(checkpoint=hurt[key][0], part=finding.place.part))
                placed[other] = Finding(finding.kind, place, other, finding.message, finding.expected, finding.actual)
    return {key: placed.get(key, finding) for key, finding in findings.items()}


def _places(store: Store, root: Digest, found: Reach) -> dict[str, Place]:
    from ckptstore.closure import read_closure

    wrong: list[Finding] = []
    closure = read_closure(store.objects, root, found.roots.get(root), wrong.append)
    places = {finding.key: finding.place for finding in wrong}
    for key, need in closure.objects.items():
        if digest_of_key(key) is not None:
            places[key] = next(iter(need.slots.values()), need.places[0])
    return places
