"""The durability ledger: where copies of a checkpoint are, and when each was last read back, by whom and how.

It is drawn up from receipts. They are notes, so a ledger tells what is known and proves nothing; a copy counts as
verified only by a receipt of a readback that reached the medium.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from ckptstore.backends import normalized
from ckptstore.errors import CkptStoreError
from ckptstore.findings import Finding
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key
from ckptstore.format.records import Receipt
from ckptstore.readbacks.actors import this_actor
from ckptstore.readbacks.copies import Copy, Holder, KeyCopies, RootCopies
from ckptstore.readbacks.coverage import Closures, Evidence, Keys, cover
from ckptstore.readbacks.notes import Note, cover_by_notes, notes_about
from ckptstore.readbacks.readbacks import Part, Readback, readback_of, receipts_about
from ckptstore.remotes import remotes_of
from ckptstore.store import Store
from ckptstore.threads import in_threads


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is known at one time.

    Args:
        at: that time, in UTC.
        roots: the checkpoints that were asked for and could be read.
        holders: all stores that are known, this one first.
        findings: what is wrong with receipts, which then do not count.
        faults: checkpoints and remotes that could not be asked, by what they are.
        learned: receipts that other stores have and this one has not.
    """

    at: datetime
    roots: tuple[RootCopies, ...]
    holders: tuple[Holder, ...]
    findings: tuple[Finding, ...] = ()
    faults: tuple[CkptStoreError, ...] = ()
    learned: tuple[Receipt, ...] = ()


def ledger(
    store: Store, roots: Sequence[Digest] | None = None, *, files: bool = True, ask: Mapping[str, Store] | None = None
) -> Ledger:
    """Draw up the ledger of checkpoints, from the receipts in ``store``. Nothing is written.

    Args:
        store: has the documents of the checkpoints, and receipts of pushes and pulls to and from others.
        roots: the checkpoints; by default those that refs name.
        files: whether the trees of files and of the preparation belong to what there must be copies of.
        ask: remotes by name, opened, that are asked for their own receipts about ``roots``, and which keys they have.

    Raises:
        CorruptError: a ref cannot be read, and ``roots`` is not given.
    """
    asked = dict.fromkeys(_heads(store) if roots is None else roots)
    return _Drawing(store).draw(list(asked), files, ask or {})


def _heads(store: Store) -> list[Digest]:
    return [root for name in store.refs.names() if (root := store.head(name)) is not None]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a remote said: its id, its receipts about itself, which of the keys it has, and what scrubs read there."""

    id: str | None
    url: str
    receipts: tuple[tuple[Digest, Receipt], ...]
    present: frozenset[str]
    notes: tuple[Note, ...] = ()


class _Drawing:
    """A ledger while it is drawn up."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.id = store.id
        self.now = datetime.now(UTC)
        self.closures = Closures(store.objects)
        self.findings: list[Finding] = []
        self.faults: list[CkptStoreError] = []
        self.closed: dict[Digest, tuple[int, Keys]] = {}

    def draw(self, roots: list[Digest], files: bool, ask: Mapping[str, Store]) -> Ledger:
        for root in roots:
            try:
                self.closed[root] = self._close(root, files)
            except CkptStoreError as error:
                self.faults.append(error)
        wanted = {key for _, keys in self.closed.values() for key in (*keys.documents, *keys.objects)}
        answers = self._answers(ask, wanted)
        local = self._local_receipts()
        told = dict(pair for answer in answers.values() for pair in answer.receipts)
        readbacks = [
            readback
            for digest, receipt in (told | local).items()
            if (readback := readback_of(digest, receipt, self.findings.append)) is not None
        ]
        notes = self._notes(readbacks, answers)
        by_holder = self._by_holder([*readbacks, *(note.readback for note in notes.values())], answers)
        covered = {
            holder: cover(
                [readback for readback in found if readback.digest not in notes],
                wanted,
                self.closures,
                self.now,
                self.findings.append,
            )
            for holder, found in by_holder.items()
        }
        for holder, found in by_holder.items():
            cover_by_notes(covered[holder], [notes[r.digest] for r in found if r.digest in notes], wanted, self.now)
        present = self._present(by_holder, answers, wanted)
        return Ledger(
            at=self.now,
            roots=tuple(self._root(root, step, keys, covered, present) for root, (step, keys) in self.closed.items()),
            holders=tuple(by_holder),
            findings=tuple(self.findings),
            faults=tuple(self.faults),
            learned=tuple(receipt for digest, receipt in told.items() if digest not in local),
        )

    def _close(self, root: Digest, files: bool) -> tuple[int, Keys]:
        part = Part(self.store.scope(root), files)
        closure = self.store.closure(root, part.shards, files=files)
        assert closure.checkpoint is not None
        keys = Keys.of(closure)
        self.closures.know(root, part, keys)
        return closure.checkpoint.step, keys

    def _local_receipts(self) -> dict[Digest, Receipt]:
        """All receipts in this store about documents that it has; others have no closure here."""
        names = {stat.key.split("/")[1] for stat in self.store.backend.list("receipts/")}
        subjects = {document_key(digest): digest for name in names if (digest := _digest(name)) is not None}
        here = self.store.backend.present(subjects.keys())
        reading = partial(receipts_about, self.store.backend, report=self.findings.append)
        about = [digest for key, digest in sorted(subjects.items()) if key in here]
        return dict(pair for found in in_threads(reading, about, self.store.backend.traits.threads) for pair in found)

    def _notes(self, readbacks: list[Readback], answers: Mapping[str, _Answer]) -> dict[Digest, Note]:
        """What scrubs have read in this store, and in others of which it knows the id."""
        ids = {self.id, *(readback.store for readback in readbacks), *(answer.id for answer in answers.values())}
        found = [note for answer in answers.values() for note in answer.notes]
        for identity in sorted(identity for identity in ids if identity is not None):
            found += notes_about(self.store.backend, identity, self.findings.append)
        return {note.readback.digest: note for note in found}

    def _answers(self, ask: Mapping[str, Store], wanted: Collection[str]) -> dict[str, _Answer]:
        answers = {}
        for name, remote in ask.items():
            try:
                answers[name] = self._answer(remote, wanted)
            except CkptStoreError as error:
                self.faults.append(type(error)(f"remote {name}: {error.what}", error.why, error.hint))
        return answers

    def _answer(self, remote: Store, wanted: Collection[str]) -> _Answer:
        """A remote is asked about itself alone: what it says of others, they can say themselves."""
        identity = remote.id
        found = []
        for root in self.closed:
            for digest, receipt in receipts_about(remote.backend, root, self.findings.append):
                readback = readback_of(digest, receipt, self.findings.append)
                if readback is not None and identity is not None and readback.store == identity:
                    found.append((digest, receipt))
        notes = () if identity is None else notes_about(remote.backend, identity, self.findings.append)
        return _Answer(identity, remote.url, tuple(found), frozenset(remote.backend.present(wanted)), tuple(notes))

    def _by_holder(self, readbacks: list[Readback], answers: Mapping[str, _Answer]) -> dict[Holder, list[Readback]]:
        """The readbacks of each store, this one first, then those that have a name, then the others."""
        here = _place(self.store.url)
        newest = sorted(readbacks, key=lambda r: (r.time <= self.now, r.time), reverse=True)
        known = {readback.place: readback.store for readback in reversed(newest) if readback.store is not None}
        found: dict[str, list[Readback]] = {self.id or here: []}
        for readback in newest:
            # Receipts of earlier releases say neither who nor which store.
            ours = self.id if not readback.by and readback.receipt.where == self.store.url else None
            found.setdefault(readback.store or ours or readback.place, []).append(readback)
        urls = {name: normalized(url) for name, url in remotes_of(self.store).items()}
        leads_to = {name: known.get(_place(url), _place(url)) for name, url in urls.items()}
        for name, answer in answers.items():
            urls[name] = answer.url
            leads_to[name] = answer.id or _place(answer.url)
            if answer.id is not None:
                known[_place(answer.url)] = answer.id
        if self.id is not None:
            known[here] = self.id
        holders: dict[Holder, list[Readback]] = {}
        for identity in [*found, *(identity for identity in leads_to.values() if identity not in found)]:
            mine = found.get(identity, [])
            names = tuple(name for name, leads in leads_to.items() if leads == identity)
            is_here = identity == (self.id or here)
            place = mine[0].place if mine else None
            holder = Holder(
                id=next((readback.store for readback in mine if readback.store is not None), None),
                url=self.store.url if is_here else mine[0].receipt.where if mine else urls[names[0]],
                names=names,
                here=is_here,
                replaced=not is_here and not names and place in known and known[place] != identity,
            )
            holders[replace(holder, id=self.id) if is_here else holder] = mine
        return dict(sorted(holders.items(), key=lambda item: (not item[0].here, not item[0].names, item[0].name)))

    def _present(
        self, holders: Collection[Holder], answers: Mapping[str, _Answer], wanted: Collection[str]
    ) -> dict[Holder, Collection[str]]:
        """Keys by holder, of those that were asked."""
        found: dict[Holder, Collection[str]] = {}
        for holder in holders:
            for name in holder.names:
                if name in answers:
                    found[holder] = answers[name].present
            if holder.here and not self.store.backend.traits.network:
                found[holder] = self.store.backend.present(wanted)
        return found

    def _root(
        self,
        root: Digest,
        step: int,
        keys: Keys,
        covered: Mapping[Holder, Mapping[str, Evidence]],
        present: Mapping[Holder, Collection[str]],
    ) -> RootCopies:
        made: dict[tuple[tuple[int, bool | None], ...], tuple[Copy, ...]] = {}
        found = []
        for key, size in (*sorted(keys.documents.items()), *sorted(keys.objects.items())):
            known = [
                (holder, evidence.get(key), key in present[holder] if holder in present else None)
                for holder, evidence in covered.items()
            ]
            same = tuple((id(evidence), there) for _, evidence, there in known)
            if same not in made:
                copies = [Copy(*item) for item in known if item[1] is not None or item[2]]
                copies.sort(key=_best_first, reverse=True)
                made[same] = tuple(copies)
            found.append(KeyCopies(key, size, made[same]))
        return RootCopies(root, step, tuple(found))


def _best_first(copy: Copy) -> tuple[bool, bool, bool, datetime]:
    if copy.evidence is None:
        return False, False, False, datetime.min.replace(tzinfo=UTC)
    return True, *copy.evidence.rank


def _place(url: str) -> str:
    """As :attr:`Readback.place`, for a URL of this host."""
    return f"{this_actor().rpartition('@')[2]} {url}" if url.startswith("file:") else url


def _digest(hexadecimal: str) -> Digest | None:
    try:
        return Digest.parse(hexadecimal)
    except CkptStoreError:
        return None
