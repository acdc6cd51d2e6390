"""The deletions of a collection, in an order that leaves a store sound at every instant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, cast

from ckptstore.backends.deadline import deadline
from ckptstore.backends.protocol import PruneBackend, Stat
from ckptstore.collection.exclusion import Guard
from ckptstore.errors import BackendError, CkptStoreError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import retired_key
from ckptstore.format.records import Retired
from ckptstore.meter import OnProgress
from ckptstore.threads import in_threads

_BATCH = 1000
_BATCH_SECONDS = 60.0  # no request is tried again for longer than that after a look at the marker
_CHECK_SECONDS = 5.0  # a collection that slept longer than that looks for its marker before it deletes one more key


class Retiring(Protocol):
    """A checkpoint whose closure goes, and why."""

    @property
    def root(self) -> Digest:
        """The checkpoint."""
        ...

    @property
    def reason(self) -> str:
        """Why, for its retirement."""
        ...


class Deletions(Protocol):
    """What goes: see :class:`ckptstore.collection.plan.Plan`."""

    @property
    def retired(self) -> Sequence[Retiring]:
        """Checkpoints whose closures go."""
        ...

    @property
    def stages(self) -> Sequence[Sequence[Stat]]:
        """Keys that go, whatever names others before what it names."""
        ...


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did: keys deleted and their bytes; (key, why) of those that could not be; what to know besides; and
    how many keys of the plan are left."""

    deleted_keys: int
    deleted_bytes: int
    failed: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    left_keys: int = 0

    @property
    def whole(self) -> bool:
        """Whether everything that was to go is gone."""
        return not self.left_keys


def sweep(backend: PruneBackend, plan: Deletions, guard: Guard, progress: OnProgress | None = None) -> Swept:
    """Retire what the plan retires, then delete what it deletes, stage by stage.

    A key that cannot be deleted is reported; its stage is done, and the stages after it are left alone, because what
    could not be deleted may name what is in them. Interrupted anywhere, the next plan finds the rest. Quarantine is
    never touched.

    Args:
        backend: the store, which ``guard`` keeps others out of.
        plan: made inside the same exclusion.
        guard: looked at before each batch.
        progress: called with (bytes done, bytes in all).

    Raises:
        ConflictError: somebody took the marker away; what was not deleted then stays.
        BackendError: a retirement could not be written; nothing was deleted.
    """
    guard.check()
    _retire(backend, plan.retired)
    total = sum(stat.size for stage in plan.stages for stat in stage)
    keys = sum(len(stage) for stage in plan.stages)
    sweeper = _Sweeper(backend, guard, lambda done: progress(done, total) if progress is not None else None)
    for stage in plan.stages:
        sweeper.sweep(stage)
        if sweeper.failed:
            guard.settle()
            break
    notes = []
    remove_stale = cast(Callable[[], object] | None, getattr(backend, "remove_stale_temporaries", None))
    if remove_stale is not None:
        try:
            remove_stale()
        except BackendError as error:
            notes.append(f"temporaries of dead writers stay: {error}")
    capabilities = getattr(backend, "capabilities", None)
    if capabilities is not None and capabilities.versioning and sweeper.deleted:
        notes.append("the bucket keeps old versions: they take room until its lifecycle rules expire them")
    return Swept(
        sweeper.deleted, sweeper.freed, tuple(sweeper.failed.items()), tuple(notes), left_keys=keys - sweeper.deleted
    )


def _retire(backend: PruneBackend, retired: Iterable[Retiring]) -> None:
    def create(item: Retiring) -> None:
        backend.create(retired_key(item.root), Retired(item.reason).encode())

    for _ in in_threads(create, retired, backend.traits.threads):
        pass


class _Sweeper:
    def __init__(self, backend: PruneBackend, guard: Guard, progress: Callable[[int], object]) -> None:
        self.deleted = 0
        self.freed = 0
        self.failed: dict[str, str] = {}
        self._backend = backend
        self._guard = guard
        self._progress = progress
        self._checked = 0.0
        self._by_many = True

    def sweep(self, stage: Sequence[Stat]) -> None:
        """Delete the keys of one stage, in any order; each is gone for good, or in ``failed``, when this returns."""
        for batch in _batches(stage):
            self._guard.check()
            self._checked = time.monotonic()
            failed = self._delete(batch)
            self.failed |= {key: str(error) for key, error in failed.items()}
            gone = [stat for stat in batch if stat.key not in failed]
            self.deleted += len(gone)
            self.freed += sum(stat.size for stat in gone)
            self._progress(self.freed)

    def _delete(self, batch: Sequence[Stat]) -> dict[str, CkptStoreError]:
        keys = [stat.key for stat in batch]
        many = cast(
            Callable[[Sequence[str]], dict[str, CkptStoreError] | None] | None,
            getattr(self._backend, "delete_many", None),
        )
        if many is not None and self._by_many:
            with deadline(_BATCH_SECONDS):
                failed = many(keys)
            if failed is not None:
                return failed
            self._by_many = False
        results = in_threads(self._delete_one, keys, self._backend.traits.threads)
        return {key: error for key, error in results if error is not None}

    def _delete_one(self, key: str) -> tuple[str, CkptStoreError | None]:
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self._guard.check()
            self._checked = time.monotonic()
        try:
            self._backend.delete(key)
        except CkptStoreError as error:
            return key, error
        return key, None


def _batches(stage: Sequence[Stat]) -> Iterator[tuple[Stat, ...]]:
    stats = iter(stage)
    while batch := tuple(islice(stats, _BATCH)):
        yield batch
