"""Scrub: read a whole store again, what was read back longest ago first, as far as a budget goes.

What was read is noted as it goes (see :mod:`ckptstore.readbacks.notes`), so that the next scrub goes on where this one
ended, however that was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from ckptstore.backends.protocol import ReadbackMethod, Stat
from ckptstore.errors import BackendError, MalformedError, UsageError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY, digest_of_key, receipt_prefix
from ckptstore.format.records import RefRecord
from ckptstore.meter import OnProgress
from ckptstore.objects import Objects
from ckptstore.readbacks.ages import NEVER, Age, Ages, ages_of
from ckptstore.readbacks.budget import Budget, Looking
from ckptstore.readbacks.chains import broken_links
from ckptstore.readbacks.keys import Reading, is_known, read_key
from ckptstore.readbacks.listing import asked_for, listed
from ckptstore.readbacks.notes import Note, Notebook, notes_about, subject_of
from ckptstore.readbacks.reach import Reach, Reacher, placed
from ckptstore.readbacks.references import References, references
from ckptstore.readbacks.scrubbed import Damage, Scrub
from ckptstore.threads import in_threads

if TYPE_CHECKING:
    from ckptstore.store import Store

RECORD_EVERY = 2**30
"""Bytes after which what was read is noted."""

_UNREACHABLE = 8  # keys in a row that a store behind a network does not give: then it is not they that are at fault
_NEVER_DELETED = ("refs/", STORE_KEY)


def scrub(
    store: Store,
    *,
    max_age: float | None = None,
    max_bytes: int | None = None,
    max_seconds: float | None = None,
    keeper: Store | None = None,
    record_every: int = RECORD_EVERY,
    progress: OnProgress | None = None,
) -> Scrub:
    """Read every key of ``store`` back, whether anything leads to it or not: what was read back longest ago first.

    Damage does not end it. What is found good is noted in receipts: after a kill at any moment, the next scrub reads at
    most ``record_every`` bytes again, 4,096 keys, or what was read in a minute, and the keys under way besides (two for
    each thread). If it comes to its end before the budget does, it also finds what is missing and counts what nothing
    leads to; documents that need no reading for their age are read for that, once each, and count as bytes read.

    Args:
        store: the store; one that cannot be written is read as well.
        max_age: seconds; what was read back from where it is kept no longer ago is left out. A receipt dated in the
            future says nothing.
        max_bytes: end before the first key after so many bytes, so it is passed by less than one key.
        max_seconds: end before the first key after so long, however large the checkpoint that it is part of.
        keeper: another store, which keeps the notes as well: they count there and here.
        record_every: bytes after which what was read is noted.
        progress: called with (bytes read, bytes to be read).

    Raises:
        UsageError: a budget that is not above 0.
        BackendError: the store cannot be listed, or gives nothing any more. What was read until then is noted.
    """
    for name, value in (("max_bytes", max_bytes), ("max_seconds", max_seconds), ("record_every", record_every)):
        if value is not None and not value > 0:
            raise UsageError(name, f"{value!r:.40} is not above 0")
    if max_age is not None and not 0 <= max_age <= 10**9:
        raise UsageError("max_age", f"{max_age!r:.40} is not a number of seconds from 0 to 10^9")
    scrubbing = _Scrubbing(store, keeper, Budget(max_bytes, max_seconds), record_every, progress)
    return scrubbing.run(None if max_age is None else timedelta(seconds=max_age))


class _Scrubbing:
    """A scrub while it is done."""

    def __init__(
        self, store: Store, keeper: Store | None, budget: Budget, every: int, progress: OnProgress | None
    ) -> None:
        self.store = store
        self.objects = Objects(store.backend, medium=True)
        self.looking = Looking(store.backend, budget)
        self.budget = budget
        self.notebook = Notebook(store, keeper, every)
        self.keeper = keeper
        self.progress = progress
        self.at = datetime.now(UTC)
        self.sizes: dict[str, int] = {}
        self.findings: dict[str, Finding] = {}
        self.gone: set[str] = set()
        self.known: dict[str, References] = {}
        self.records: dict[str, tuple[RefRecord, Digest]] = {}
        self.good: dict[str, Age] = {}
        self.methods: set[ReadbackMethod] = set()
        self.read_keys = 0
        self.read_bytes = 0
        self.ended_by = ""
        self._silent = 0

    def run(self, max_age: timedelta | None) -> Scrub:
        notes = self._notes()
        mine = "" if self.store.id is None else receipt_prefix(subject_of(self.store.id))
        stats = listed(self.store.backend, self._report)
        self.sizes = {stat.key: stat.size for stat in stats if not mine or not stat.key.startswith(mine)}
        with self.budget.part():
            ages = ages_of(self.store, self.looking, self.sizes.keys(), notes, self.at, max_age)
        known = {key for key in self.sizes if is_known(key)}
        try:
            read = self._count_looks()
            due = [key for key in known if not ages.is_recent(key, max_age) and key not in read]
            due.sort(key=lambda key: (ages.of(key), key.startswith("objects/"), key))
            self._read(due)
            reach, hurt = self._reach(known)
        finally:
            self.notebook.close()
        self.notebook.forget(notes, self.sizes, self.at)
        return self._told(known, due, ages, reach, hurt)

    def _count_looks(self) -> set[str]:
        """Documents that were looked at for the plan. Behind a network nothing else is possible than to read them from
        where they are kept: then they are not read again."""
        looked = self.looking.taken()
        for key, (size, leads_to) in looked.items():
            if self.store.backend.traits.network:
                self._take(Reading(key, size, ReadbackMethod.SERVER, references=leads_to))
            else:
                self.read_bytes += size
                self.known[key] = leads_to
        return looked.keys() & self.good.keys()

    def _report(self, finding: Finding) -> None:
        self.findings.setdefault(finding.key, finding)

    def _notes(self) -> list[Note]:
        """The notes of earlier scrubs. Each scrub reads all of them, so they are not noted themselves."""
        if self.store.id is None:
            return []
        found = {note.readback.digest: note for note in notes_about(self.store.backend, self.store.id, self._report)}
        if self.keeper is not None:
            theirs = notes_about(self.keeper.backend, self.store.id, lambda _finding: None)
            found |= {note.readback.digest: note for note in theirs}
        return list(found.values())

    def _within(self, keys: Iterable[str]) -> Iterator[Stat]:
        """The keys, as long as the budget lasts."""
        for key in keys:
            self.ended_by = self.budget.ended_by
            if self.ended_by:
                return
            self.budget.taken += self.sizes[key]
            yield Stat(key, self.sizes[key])

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, due: Sequence[str]) -> None:
        """Read the keys that are due, until the budget ends."""
        total = sum(self.sizes[key] for key in due)
        total = total if self.budget.max_bytes is None else min(total, self.budget.max_bytes)
        work = partial(read_key, self.objects)
        for reading in in_threads(work, self._within(due), self.objects.threads):
            self._take(reading)
            if self.progress is not None:
                self.progress(min(self.read_bytes, total), total)
        for finding in broken_links(self.sizes, self.records):
            self._report(finding)

    def _take(self, reading: Reading) -> None:
        key = reading.key
        if reading.gone:
            self.gone.add(key)
            if key.startswith(_NEVER_DELETED) and reading.finding is not None:
                self._report(reading.finding)
            return
        self.read_keys += 1
        self.read_bytes += reading.size
        if reading.references is not None:
            self.known[key] = reading.references
        if reading.record is not None:
            self.records[key] = reading.record
        if reading.finding is not None:
            self._report(reading.finding)
        elif reading.method is not None:
            self.good[key] = (reading.method.reaches_medium, datetime.now(UTC))
            self.methods.add(reading.method)
            self.notebook.add(key, reading.size, reading.method)
        self._check_answers(reading.finding)

    def _check_answers(self, finding: Finding | None) -> None:
        """BackendError if a store behind a network has given nothing for a while."""
        self._silent = self._silent + 1 if finding is not None and finding.kind is Kind.UNREADABLE else 0
        if self._silent >= _UNREACHABLE and finding is not None and self.store.backend.traits.network:
            why = f"it gave none of {self._silent} keys in a row: {finding.message}"
            raise BackendError(f"store {self.store.url}", why, "run it again: what was read is noted")

    # -- what leads where ---------------------------------------------------------------------------------------------

    def _reach(self, known: set[str]) -> tuple[Reach | None, dict[str, list[Digest]]]:
        """What the kept checkpoints lead to, and whom it hurts that something is damaged or missing; None and nothing
        if the budget ended."""
        unread = sorted(key for key in known - self.known.keys() if key.startswith("documents/"))
        if self.ended_by or not self._look_at(key for key in unread if key not in self.findings):
            return None, {}
        reacher = Reacher(self.store, self.sizes.keys(), self.records, self.known, self._unlisted)
        found = reacher.walk()
        for fault in found.kept.faults:
            if not any(key and key in str(fault) for key in self.findings):
                self._report(Finding(Kind.of(fault), Place(part=fault.what), "", fault.why))
        for key in sorted(found.needed):
            if (key not in self.sizes or key in self.gone) and not self._look_for(key):
                return None, {}
        hurt = reacher.hurt(found, self.findings.keys())
        for key, roots in list(hurt.items()):  # a collection may have been at work meanwhile
            if self.findings[key].kind is Kind.MISSING and reacher.given_up(roots):
                del self.findings[key], hurt[key]
        self.findings = placed(self.store, self.findings, hurt, found)
        return found, hurt

    def _look_at(self, keys: Iterable[str]) -> bool:
        """What documents lead to that were not read for their age; False if the budget ended."""
        for key, data, finding in in_threads(self._document, self._within(keys), self.objects.threads):
            self._learn(key, data, finding)
        return not self.ended_by

    def _document(self, stat: Stat) -> tuple[str, bytes | None, Finding | None]:
        digest, found = digest_of_key(stat.key), list[Finding]()
        if digest is None:
            return stat.key, None, None
        data = self.store.objects.document(digest, Place(part=f"document {digest.short}"), found.append)
        return stat.key, data, found[0] if found else None

    def _learn(self, key: str, data: bytes | None, finding: Finding | None) -> None:
        if finding is not None and finding.kind is not Kind.MISSING:
            self._report(finding)
        if data is None:
            return
        self.read_bytes += len(data)
        try:
            self.known[key] = references(data)
        except MalformedError as error:
            self._report(Finding(Kind.MALFORMED, Place(part="document"), key, str(error)))

    def _unlisted(self, key: str) -> References | None:
        """What a document leads to that no listing showed."""
        if key not in self.findings and key not in self.sizes:
            self._look_for(key)
        return self.known.get(key)

    def _look_for(self, key: str) -> bool:
        """A key that is asked for by its name: only then it is missing. False if the budget ended."""
        stat = asked_for(self.store.backend, key, self._report)
        if stat is not None:
            self.sizes[key] = stat.size
            for again in self._within([key]):
                self._take(read_key(self.objects, again))
            if self.ended_by or key in self.good or key in self.findings:
                return not self.ended_by
        digest = digest_of_key(key)
        place = Place(part=f"{key.partition('/')[0].removesuffix('s')} {'' if digest is None else digest.short}")
        self._report(Finding(Kind.MISSING, place, key, "not in the store", str(digest), "nothing"))
        return True

    # -- what is told -------------------------------------------------------------------------------------------------

    def _told(
        self, known: set[str], due: Sequence[str], ages: Ages, reach: Reach | None, hurt: Mapping[str, list[Digest]]
    ) -> Scrub:
        met = self.good.keys() | self.findings.keys() | self.gone
        left = [key for key in due if key not in met]
        recent = known.difference(due, self.good)
        after = [max(self.good.get(key, NEVER), ages.of(key)) for key in known - self.findings.keys() - self.gone]
        idle = None if reach is None else self._idle(reach)
        return Scrub(
            url=self.store.url,
            keys=len(self.sizes),
            size=sum(self.sizes.values()),
            read_keys=self.read_keys,
            read_bytes=self.read_bytes,
            recent_keys=len(recent),
            recent_bytes=sum(self.sizes[key] for key in recent),
            left_keys=len(left),
            left_bytes=sum(self.sizes[key] for key in left),
            damaged=tuple(
                Damage(finding, None if reach is None else tuple(hurt.get(key, ())))
                for key, finding in sorted(self.findings.items())
            ),
            unreferenced_keys=None if idle is None else len(idle),
            unreferenced_bytes=None if idle is None else sum(self.sizes[key] for key in idle),
            unknown_keys=len(self.sizes.keys() - known),
            never_keys=sum(not counts for counts, _ in after),
            oldest=min((time for counts, time in after if counts), default=None),
            method=max(self.methods, key=list(ReadbackMethod).index, default=ReadbackMethod.CACHED),
            ended_by=self.ended_by,
            failures=tuple((url, str(error)) for url, error in self.notebook.failures.items()),
            at=self.at,
        )

    def _idle(self, reach: Reach) -> list[str] | None:
        """Objects and documents that nothing leads to; None if a document that leads on cannot be read."""
        if any(key in reach.reached and key.startswith("documents/") for key in self.findings):
            return None
        return [k for k in self.sizes if k.startswith(("objects/", "documents/")) and k not in reach.reached]
