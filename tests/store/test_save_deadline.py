"""A save that cannot be done in time raises, and leaves everything as it was."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import BackendError
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend
from tests.support.invariants import broken


@pytest.mark.parametrize("slow", ["objects/", "documents/", "receipts/"])
def test_a_save_out_of_time_moves_no_ref_and_touches_no_state(disk_store: Store, slow: str) -> None:
    faulty = FaultyBackend(disk_store.backend)
    store = Store(faulty)
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(300, 300)) for _ in range(6)])
    with store.run("main", model=model) as run:
        run.resume()
        first = run.save(1)
        run.wait()
        with torch.no_grad():
            for weight in model:
                weight.add_(1.0)
        before = [weight.clone() for weight in model]
        faulty.before("create", lambda _key: time.sleep(0.6), prefix=slow)
        with pytest.raises(BackendError, match="deadline"), ckptstore.deadline(0.5):
            run.save(2, metrics={"loss": 1.0})
        assert disk_store.head("main") == first
        assert broken(disk_store.backend.path) == []  # type: ignore[attr-defined]
        assert list(disk_store.backend.list("leases/")) == []
        assert all(torch.equal(old, new) for old, new in zip(before, model, strict=True))
        faulty.heal()
        second = run.save(2)
    assert disk_store.head("main") == second
    assert broken(disk_store.backend.path) == []  # type: ignore[attr-defined]
