"""Two workers and a coordinator, each a process: whichever of them raises, dies or stalls, and wherever, all that still
run come to the same verdict, and none of them waits for ever (B012, B054, B055, B064).

Public sources: meta-pytorch/torchft#192, #163, uw-syfi/piper#18; alan-turing-institute/autocast#386,
radixark/miles#2516, KempnerInstitute/KempnerForge#49, NVIDIA/nccl#2349; TensorAuto/OpenTau#396;
NVIDIA-NeMo/Megatron-Bridge#4865.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.errors import BackendError, CommitAbortedError, ConflictError
from ckptstore.store import Store
from tests.support import operations
from tests.support.children import Child
from tests.support.faulty import FaultyBackend
from tests.support.invariants import broken, temporaries
from tests.support.training import commit_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")

DEADLINE = 1.5
"""Seconds that each participant waits for the others."""

WORKERS = {
    "it begins": None,
    "it captures": None,
    "it writes an object": ("before", "create", "objects/", 1),
    "an object is written": ("after", "create", "objects/", 1),
    "it writes a page": ("before", "create", "documents/", 1),
    "it writes the shard document": ("before", "create", "documents/", 2),
    "the shard document is written": ("after", "create", "documents/", 2),
    "it publishes its receipt": ("before", "create", "receipts/", 1),
    "its receipt is published": ("after", "create", "receipts/", 1),
    "it gives its lease back": ("before", "delete", "leases/", 1),
    "it asks for the verdict": ("before", "get", "refs/", 1),
    "it asks again": ("before", "get", "refs/", 2),
}
COORDINATOR = {
    "it begins": None,
    "it collects": ("before", "list", "receipts/", 1),
    "it has looked for receipts": ("after", "list", "receipts/", 1),
    "it reads a receipt": ("before", "get", "receipts/", 1),
    "it reads a shard": ("before", "get", "documents/", 1),
    "it looks for an object": ("before", "stat", "objects/", 1),
    "it writes the checkpoint": ("before", "create", "documents/", 1),
    "the checkpoint is written": ("after", "create", "documents/", 1),
    "it writes the metrics": ("before", "create", "receipts/", 1),
    "it moves the ref": ("before", "create", "refs/", 1),
    "the ref is moved": ("after", "create", "refs/", 1),
    "it has committed": None,
}
"""When something happens: a call of the participant's own backend, or a place in its own code."""

KINDS = ("raises", "is interrupted", "is killed", "is stopped")


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to whom, and when."""

    who: str
    kind: str
    when: str

    def __str__(self) -> str:
        return f"{self.who} {self.kind} when {self.when}"


ALL = [
    *(Case(who, kind, when) for who in ("worker 0", "worker 1") for when in WORKERS for kind in KINDS),
    *(Case("coordinator", kind, when) for when in COORDINATOR for kind in KINDS),
]
FEW = [
    Case("worker 1", "is killed", "it captures"),
    Case("worker 0", "is stopped", "it publishes its receipt"),
    Case("worker 1", "raises", "it writes the shard document"),
    Case("coordinator", "is stopped", "it moves the ref"),
    Case("coordinator", "is killed", "the ref is moved"),
    Case("coordinator", "raises", "it writes the checkpoint"),
]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with operations.one_thread():
        yield


class Interrupted(BaseException):
    """Stands for an interrupt from the keyboard, which no handler of errors catches."""


class Group:
    """The participants of one attempt, of which one has a fault."""

    def __init__(self, path: Path, folder: Path, number: int, case: Case) -> None:
        self.case = case
        self._path = path
        self.ref = f"case-{number}x"
        store = ckptstore.open(path)
        self.parent = commit_state(store, self.ref, [state(index, 0.5) for index in range(2)], 1)
        self.attempt = store.begin(self.ref)
        works: dict[str, Callable[[], object]] = {
            "worker 0": lambda: self._worker(0),
            "worker 1": lambda: self._worker(1),
            "coordinator": self._coordinator,
        }
        self.children = {who: Child(work, folder / f"{number} {who.replace(' ', '-')}") for who, work in works.items()}

    def came_to(self) -> dict[str, object]:
        """What each participant learned; None is one that was killed. A stopped one goes on when the others ended."""
        learned = {who: child.wait() for who, child in self.children.items() if who != self.case.who}
        faulty = self.children[self.case.who]
        faulty.go_on()
        learned[self.case.who] = faulty.wait()
        return learned

    def _store(self, who: str, places: dict[str, Any]) -> Store:
        backend = FaultyBackend(DirectoryBackend(self._path))
        place = places.get(self.case.when) if self.case.who == who else None
        if place is not None:
            moment, operation, prefix, nth = place
            getattr(backend, moment)(operation, lambda _key: self._happens(), nth=nth, prefix=prefix)
        return Store(backend)

    def _happens(self) -> None:
        match self.case.kind:
            case "raises":
                raise BackendError("device", "it failed")
            case "is interrupted":
                raise Interrupted
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)

    def _at(self, who: str, when: str) -> None:
        if (self.case.who, self.case.when) == (who, when):
            self._happens()

    def _worker(self, index: int) -> object:
        who = f"worker {index}"
        store = self._store(who, WORKERS)
        receipt = None
        try:
            self._at(who, "it begins")
            own = state(index, 1.0, capturing=lambda: self._at(who, "it captures"))
            receipt = store.save_shard(own, self.attempt, step=2, index=index, count=2)
            return str(store.verdict(self.attempt, receipt, DEADLINE))
        except (CommitAbortedError, ConflictError):
            return "aborted"
        except (ckptstore.CkptStoreError, Interrupted) as error:
            if receipt is None:
                store.give_up(self.attempt, index=index, count=2, step=2, reason=repr(error))
                return self._fenced(store)  # its receipt may have been published before, and taken
            return self._asked_again(store, receipt)

    def _asked_again(self, store: Store, receipt: ckptstore.ShardReceipt) -> object:
        try:
            return str(store.verdict(self.attempt, receipt, DEADLINE))
        except CommitAbortedError:
            return "aborted"

    def _fenced(self, store: Store) -> object:
        store.refs.fence(self.ref, self.attempt.generation)
        record = store.refs.record(self.ref, self.attempt.generation + 1)
        return "aborted" if record.root == self.parent else str(record.root)

    def _coordinator(self) -> object:
        who = "coordinator"
        store = self._store(who, COORDINATOR)
        try:
            self._at(who, "it begins")
            root = store.commit(self.attempt, count=2, deadline=DEADLINE, metrics={"loss": 0.5})
            self._at(who, "it has committed")
        except (CommitAbortedError, ConflictError):
            return "aborted"
        except (ckptstore.CkptStoreError, Interrupted):
            head = store.refs.record(self.ref, self.attempt.generation + 1) if self._is_decided(store) else None
            return "aborted" if head is None or head.root == self.parent else str(head.root)
        return str(root)

    def _is_decided(self, store: Store) -> bool:
        """After an error of its own, a coordinator asks the ref, and leaves what is open to those who wait."""
        head = store.refs.head(self.ref)
        return head is not None and head.generation > self.attempt.generation


class Capturing:
    """State of a user's own; ``capturing`` is called when it is asked for."""

    def __init__(self, number: int, capturing: Callable[[], object]) -> None:
        self._number, self._capturing = number, capturing

    def state_dict(self) -> dict[str, int]:
        self._capturing()
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"number": self._number}


def state(index: int, scale: float, capturing: Callable[[], object] = lambda: None) -> ckptstore.TrainingState:
    model = nn.ModuleDict({"ab"[index]: nn.Linear(30, 30)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.arange(parameter.numel()).reshape(parameter.shape))
    return ckptstore.TrainingState(model=model, values={"own": Capturing(7, capturing)})


def check(path: Path, folder: Path, cases: Sequence[Case]) -> None:
    """Let all these cases happen at once, each with participants and a ref of its own."""
    groups = [Group(path, folder, number, case) for number, case in enumerate(cases)]
    outcomes = [group.came_to() for group in groups]
    store = ckptstore.open(path)
    for group, learned in zip(groups, outcomes, strict=True):
        head = store.head(group.ref)
        verdict = "aborted" if head == group.parent else str(head)
        told = {who: word for who, word in learned.items() if word is not None}
        assert len(told) >= 2
        assert set(told.values()) == {verdict}, f"{group.case}: {learned}, and the ref says {verdict}"
        if group.case.kind != "is killed":
            assert len(told) == 3
        # The attempt is over for good, and the next one is not held up by what is left of it.
        with pytest.raises((CommitAbortedError, ConflictError)):
            store.commit(group.attempt, count=2, deadline=0.0)
        assert store.head(group.ref) == head
        root = commit_state(store, group.ref, [state(index, 2.0) for index in range(2)], 3)
        assert store.checkpoint(root).parent == head
    assert broken(path) == []
    assert temporaries(path) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ckptstore.open(tmp_path / "store", create=True)
    return tmp_path / "store"


def test_whatever_happens_to_a_participant_all_come_to_the_same_verdict(path: Path, tmp_path: Path) -> None:
    check(path, tmp_path, FEW)


@pytest.mark.deep
@pytest.mark.parametrize("start", range(0, len(ALL), 8))
def test_whatever_happens_to_any_participant_at_any_moment_all_come_to_the_same_verdict(
    path: Path, tmp_path: Path, start: int
) -> None:
    check(path, tmp_path, ALL[start : start + 8])
