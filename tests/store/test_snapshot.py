"""A snapshot is one moment of the state, whatever happens to the live objects before it is saved."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Cursor, Digest, Snapshot, TrainingState
from ckptstore.errors import RefusedError
from ckptstore.live.tensors import DTYPES
from ckptstore.store import Store
from tests.store.test_tensors import bytes_of, dense_views
from tests.support.faulty import FaultyBackend
from tests.support.states import memory_store


class Loader:
    """A data source whose state is a plain Python list."""

    def __init__(self) -> None:
        self.order = [3, 1, 2]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.order = state["order"]


class Training:
    """A model with a buffer and tied weights, its optimizer with momentum, its schedule and its data."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 300))
        self.model[2].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.loader = Loader()
        self.state = TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=self.loader
        )

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 300)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()


def commit(store: Store, state: TrainingState | Snapshot, step: int = 1) -> Digest:
    attempt = store.begin("main")
    cursors = {"data": Cursor("samples", 4 * step, per_step=4)}
    return store.commit(attempt, [store.save_shard(state, attempt, step=step, cursors=cursors)])


def test_what_happens_while_a_snapshot_is_written_is_not_in_it() -> None:
    """B060 (pytorch/torchtitan#930, WenjieDu/PyPOTS#667, pytorch/pytorch#34765): while the writer is held, a tensor is
    changed in place, a rate is set, a list grows, random numbers are drawn; what is stored is what there was before."""
    training = Training()
    training.update()
    expected = commit(memory_store(), training.state)
    snapshot = Snapshot.of(training.state)

    entered, released = threading.Event(), threading.Event()
    store = memory_store()
    faulty = FaultyBackend(store.backend)
    faulty.before("create", lambda key: (entered.set(), released.wait(60)), nth=1, prefix="objects/")
    with ThreadPoolExecutor(1) as writer:
        saving = writer.submit(commit, Store(faulty), snapshot)
        assert entered.wait(60)
        training.update()
        with torch.no_grad():
            training.model[0].weight.mul_(2)
            training.model[1].running_mean.zero_()
        training.optimizer.param_groups[0]["lr"] = 7.0
        training.loader.order.append(9)
        random.random(), np.random.random(), torch.rand(1)
        released.set()
        assert saving.result() == expected
    assert commit(store, training.state, 2) != expected
    fresh = Training()
    restored = ckptstore.open(store.url).restore(expected, fresh.state)
    assert fresh.loader.order == [3, 1, 2]
    assert fresh.optimizer.param_groups[0]["lr"] == 0.05
    ckptstore.arm(fresh.state, restored)


def test_a_snapshot_can_be_saved_after_the_live_objects_are_gone_and_more_than_once() -> None:
    training = Training()
    training.update()
    expected = commit(memory_store(), training.state)
    snapshot = Snapshot.of(training.state)
    del training
    assert commit(memory_store(), snapshot) == commit(memory_store(), snapshot) == expected


def test_a_snapshot_takes_the_bytes_of_the_tensors_once() -> None:
    """Tied weights are one tensor, and random generators do not move when it is taken."""
    training = Training()
    training.update()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    snapshot = Snapshot.of(training.state)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    parameters = sum(4 * parameter.numel() for parameter in training.model.parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in training.model.buffers())
    steps = sum(1 for _ in training.model.parameters()) * 4
    assert snapshot.nbytes - 3 * parameters - buffers in (0, steps)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_bits_of_any_dtype_are_kept(dtype: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.int16).to(torch.uint8).repeat(16)
    held = nn.Module()
    held.register_buffer("whole", data.clone().view(dtype))
    held.register_buffer("turned", data.clone().view(dtype).reshape(4, -1).t())
    held.register_buffer("nothing", torch.empty(0, 3, dtype=dtype))
    held.register_buffer("scalar", data.clone().view(dtype)[3])
    state = TrainingState(model=held)
    assert commit(memory_store(), Snapshot.of(state)) == commit(memory_store(), state)


@pytest.mark.parametrize("name", dense_views())
def test_any_view_is_kept_as_its_logical_elements(name: str) -> None:
    held = nn.Module()
    view = dense_views()[name]
    held.register_buffer("view", view)
    (source,) = Snapshot.of(TrainingState(model=held)).capture().tensors
    assert bytes_of(source.tensor) == bytes_of(view)


def test_what_could_not_be_saved_is_refused_when_the_snapshot_is_taken() -> None:
    held = nn.Module()
    held.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(RefusedError, match="sparse"):
        Snapshot.of(TrainingState(model=held))


@pytest.mark.gpu
def test_a_snapshot_of_a_device_is_in_memory_of_the_cpu_and_has_its_bits() -> None:
    model = nn.Linear(300, 300, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 300, device="cuda")).sum().backward()
    optimizer.step()
    state = TrainingState(model=model, optimizer=optimizer)
    expected = commit(memory_store(), state)
    snapshot = Snapshot.of(state)
    assert {source.tensor.device.type for source in snapshot.capture().tensors} == {"cpu"}
    with torch.no_grad():
        model.weight.zero_()
    assert commit(memory_store(), snapshot) == expected
