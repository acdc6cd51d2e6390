"""Donors: other stores that good bytes may come from, in their order. What one of them gives is proven, never believed.

One that cannot be reached is left out from then on, and told once; what another one lies about is told at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

from ckptstore.backends import normalized
from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import BackendError, CkptStoreError, UsageError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format.digest import Digest
from ckptstore.objects import Objects
from ckptstore.remotes import open_remote, remotes_of
from ckptstore.store import Store


@dataclass(slots=True)
class Donor:
    """One other store: how messages call it, and how it is opened; None until it is needed."""

    name: str
    open: Callable[[], Store]
    store: Store | None = None
    objects: Objects | None = None
    down: bool = False
    bad: int = 0
    """Keys that it has and does not give back as they should be."""


class Donors:
    """Stores in the order in which they are asked. Safe for threads."""

    def __init__(self, here: Store, sources: Sequence[Store], *, remotes: bool) -> None:
        """Nothing is opened yet.

        Args:
            here: the store that is repaired.
            sources: asked first, in this order.
            remotes: whether the stores that ``here`` knows are asked after them, by name.

        Raises:
            UsageError: a source is the store that is repaired.
        """
        self.notes: list[str] = []
        self._here = here
        self._lock = Lock()
        self._donors: list[Donor] = []
        for source in sources:
            if source.url == here.url:
                raise UsageError(f"source {source.url}", "it is the store that is to be repaired", "name another copy")
            if all(source.url != donor.name for donor in self._donors):
                self._donors.append(Donor(source.url, _given(source), source, Objects(source.backend)))
        if remotes:
            self._add_remotes({donor.name for donor in self._donors} | {here.url})

    def _add_remotes(self, known: set[str]) -> None:
        try:
            found = remotes_of(self._here)
        except CkptStoreError as error:
            self.notes.append(f"remotes: {error}")
            return
        for name, url in found.items():
            if normalized(url) not in known:
                self._donors.append(Donor(f"remote {name}", lambda name=name: open_remote(self._here, name)))  # type: ignore[misc]

    def stores(self) -> Iterator[tuple[Donor, Store]]:
        """Those that can be reached, in their order, opened when their turn comes."""
        for donor in self._donors:
            store = self._opened(donor)
            if store is not None and not donor.down:
                yield donor, store

    def find(self, digest: Digest, length: int | None, place: Place, *, document: bool) -> tuple[str, bytes] | None:
        """The verified bytes of an object of ``length`` bytes, or of a document, and the name of who has them."""
        for donor, _ in self.stores():
            assert donor.objects is not None
            found: list[Finding] = []
            try:
                if document:
                    data = donor.objects.document(digest, place, found.append)
                else:
                    assert length is not None
                    data = donor.objects.read(digest, length, place, found.append)
            except CkptStoreError as error:
                self._note(donor, error)
                continue
            if data is not None:
                return donor.name, data
            self.hear(donor, found[0])
        return None

    def ask(self, key: str, limit: int) -> Iterator[tuple[str, bytes]]:
        """What each of them has under the key of a record, at most ``limit`` bytes and one more; proven by nothing."""
        for donor, store in self.stores():
            data = self.get(donor, store.backend, key, 0, limit + 1)
            if data is not None:
                yield donor.name, data

    def get(self, donor: Donor, backend: ReadBackend, key: str, offset: int, length: int) -> bytes | None:
        """Bytes of a key of a donor as they are; None if there are none."""
        try:
            return backend.get(key, offset, length)
        except CkptStoreError as error:
            if isinstance(error, BackendError) and self._is_far(donor):
                self._note(donor, error)
            return None

    def hear(self, donor: Donor, finding: Finding) -> None:
        """Take in what is wrong with a key of a donor."""
        if finding.kind is Kind.UNREADABLE and self._is_far(donor):
            self._leave_out(donor, f"{finding.message} [{finding.key}]")
        elif finding.kind is not Kind.MISSING:
            with self._lock:
                donor.bad += 1

    def told(self) -> tuple[str, ...]:
        """A line for each of them that could not be asked, or that has wrong bytes itself."""
        bad = [
            f"{donor.name}: {donor.bad} of the keys asked for {'is' if donor.bad == 1 else 'are'} damaged there, too"
            for donor in self._donors
            if donor.bad
        ]
        return (*self.notes, *bad)

    def _opened(self, donor: Donor) -> Store | None:
        with self._lock:
            if donor.store is None and not donor.down:
                try:
                    donor.store = donor.open()
                except CkptStoreError as error:
                    donor.down = True
                    self.notes.append(f"{donor.name}: {error}")
                else:
                    donor.objects = Objects(donor.store.backend)
            return donor.store

    def _note(self, donor: Donor, error: CkptStoreError) -> None:
        """It failed, or does not hand out what it has (an archived object): in the first case it is left out."""
        if isinstance(error, BackendError) and self._is_far(donor):
            self._leave_out(donor, str(error))
            return
        with self._lock:
            if (line := f"{donor.name}: {error}") not in self.notes:
                self.notes.append(line)

    @staticmethod
    def _is_far(donor: Donor) -> bool:
        """Whether a failure says that it cannot be reached; on a disk one file may fail and the others not."""
        return donor.store is not None and donor.store.backend.traits.network

    def _leave_out(self, donor: Donor, why: str) -> None:
        with self._lock:
            if not donor.down:
                donor.down = True
                self.notes.append(f"{donor.name}: {why}; it is not asked again")


def _given(store: Store) -> Callable[[], Store]:
    return lambda: store
