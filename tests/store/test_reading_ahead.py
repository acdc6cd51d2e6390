"""Documents that are fetched ahead over a network: the same findings in the same order, each read once."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest, TrainingState
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.protocol import ReadbackMethod, Traits
from ckptstore.format.keys import document_key
from ckptstore.store import Store
from tests.support.states import memory_store
from tests.support.training import commit_state


class FarBackend(MemoryBackend):
    """Memory that says that it is behind a network, and counts what is read."""

    def __init__(self, near: MemoryBackend) -> None:
        super().__init__()
        for stat in near.list(""):
            self.create(stat.key, near.get(stat.key))
        self.read: Counter[str] = Counter()

    @property
    def traits(self) -> Traits:
        return Traits(threads=8, network=True)

    def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
        self.read[key] += 1
        return super().readback(key, length)


@pytest.fixture(scope="module")
def near() -> tuple[MemoryBackend, Digest]:
    """Three shards of several pages each, and files."""
    store = memory_store()
    torch.manual_seed(0)
    states = [
        TrainingState(
            model=nn.ParameterDict(
                {f"{name}{index:04d}": nn.Parameter(torch.full((2,), 1.0 * index)) for index in range(2500)}
            )
        )
        for name in "abc"
    ]
    root = commit_state(store, "main", states, 1)
    backend = store.backend
    assert isinstance(backend, MemoryBackend)
    return backend, root


def test_each_document_is_read_once(near: tuple[MemoryBackend, Digest]) -> None:
    backend, root = near
    far = FarBackend(backend)
    closure = Store(far).closure(root)
    assert far.read == Counter(dict.fromkeys(closure.documents, 1))
    assert len(closure.documents) == 1 + 3 + 9
    assert closure.documents == Store(backend).closure(root).documents
    assert list(closure.documents) == list(Store(backend).closure(root).documents), "parents before children"


@pytest.mark.parametrize("damage", ["bit", "missing", "swapped"])
def test_findings_and_their_order_are_those_of_reading_one_after_the_other(
    near: tuple[MemoryBackend, Digest], damage: str
) -> None:
    backend, root = near
    documents = list(Store(backend).closure(root).documents)
    for chosen in (documents[1:2], documents[2:9:3], documents[::-2][:-1], documents):
        plain, far = FarBackend(backend), FarBackend(backend)
        for place, key in enumerate(chosen):
            for store in (plain, far):
                data = store.get(key)
                store.delete(key)
                if damage == "bit":
                    store.create(key, bytes([data[0] ^ 1]) + data[1:])
                elif damage == "swapped":
                    store.create(key, backend.get(documents[place]) if documents[place] != key else b"{}")
        local = Local(plain)
        found = Store(local).verify(root).findings
        assert found
        assert Store(far).verify(root).findings == found
        with pytest.raises(ckptstore.CkptStoreError) as one:
            Store(local).closure(root)
        with pytest.raises(type(one.value)) as other:
            Store(far).closure(root)
        assert str(one.value) == str(other.value)


class Local(MemoryBackend):
    """The same bytes, next to the reader."""

    def __init__(self, of: MemoryBackend) -> None:
        super().__init__()
        for stat in of.list(""):
            self.create(stat.key, of.get(stat.key))


def test_a_checkpoint_that_names_one_shard_twice_reads_it_once(near: tuple[MemoryBackend, Digest]) -> None:
    """And ends in the same findings."""
    from tests.support.documents import rewrite_checkpoint

    backend, root = near
    copy = Local(backend)
    store = Store(copy)
    forged = rewrite_checkpoint(store, root, lambda c: {"shards": (c.shards[0], c.shards[0], c.shards[2])})
    far = FarBackend(copy)
    assert Store(far).verify(forged).findings == store.verify(forged).findings
    assert far.read[document_key(store.checkpoint(root).shards[0])] == 1


class MeetingBackend(FarBackend):
    """Some reads end only when another is under way, so that they cannot be done one after the other."""

    def __init__(self, near: MemoryBackend, keys: set[str]) -> None:
        super().__init__(near)
        self.keys = keys
        self.meeting = threading.Barrier(2)
        self.lock = threading.Lock()
        self.under_way = self.most = 0

    def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            if key in self.keys:
                self.meeting.wait(30)
            return super().readback(key, length)
        finally:
            with self.lock:
                self.under_way -= 1


def test_pages_are_fetched_at_the_same_time_in_a_bounded_number_of_threads(near: tuple[MemoryBackend, Digest]) -> None:
    backend, root = near
    store = Store(backend)
    pages = [document_key(page.digest) for view in store.closure(root).shards.values() for page in view.shard.pages]
    far = MeetingBackend(backend, set(pages[:-1]))
    Store(far).closure(root)
    assert far.most <= far.traits.threads


def test_a_restore_fetches_chunks_at_the_same_time_in_a_bounded_number_of_threads() -> None:
    store = memory_store()
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(300, 300)) for _ in range(24)])
    values = [weight.clone() for weight in model]
    root = commit_state(store, "main", [TrainingState(model=model)], 1)
    backend = store.backend
    assert isinstance(backend, MemoryBackend)
    far = MeetingBackend(backend, set(store.closure(root).objects))
    with torch.no_grad():
        for weight in model:
            weight.zero_()
    Store(far).restore(root, TrainingState(model=model))
    assert all(torch.equal(old, new) for old, new in zip(values, model, strict=True))
    assert far.most <= far.traits.threads
    assert max(far.read.values()) == 1
