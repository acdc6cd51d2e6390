"""Dropout: masks that no partition and no recomputation changes, and masks for which the generators are needed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import Digest, Store
from ckptstore.errors import UsageError
from tests.trainer.attack import Attack
from tests.trainer.conftest import in_threads
from tests.trainer.pair import Pair, store_preparation
from tests.trainer.small import small_profile
from trainer.compute.dropout import DERIVED, GENERATORS, MASKS, Dropout
from trainer.preparation import planning, prepare
from trainer.preparation.plan import Plan
from trainer.workers.orders import Restore


def test_derived_masks_give_the_same_bits_whoever_owns_a_layer_and_whether_it_is_recomputed(
    runs: Any, compute: str
) -> None:
    scenario = runs.scenario.but(compute=compute, dropout=Dropout(0.1, DERIVED, "seed"), updates=2, batches=[])
    expected = runs.whole(scenario.but(recompute=False))
    for cuts in ((2,), (1, 3)):
        assert runs.partitioned(scenario, cuts).differs_from(expected) == []
    assert runs.partitioned(scenario.but(dropout=None), (2,)).differs_from(expected) != []
    assert runs.partitioned(scenario.but(dropout=Dropout(0.1, DERIVED, "another")), (2,)).differs_from(expected) != []


def test_derived_masks_draw_from_no_global_generator(runs: Any) -> None:
    before = torch.get_rng_state()
    runs.partitioned(runs.scenario.but(updates=1, batches=[], dropout=Dropout(0.1, DERIVED, "seed")), (2,))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_drops_as_many_as_it_says_keeps_the_mean_and_is_new_for_each_tensor_of_a_pass(
    dtype: torch.dtype,
) -> None:
    dropout = Dropout(0.25, DERIVED, "seed")
    ones = torch.ones(64, 256, dtype=dtype)
    drop = dropout.begin(3, 1, 2)
    first, second = drop(ones), drop(ones)
    assert first.dtype == dtype
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert float(first.float().mean()) == pytest.approx(1.0, abs=0.02)
    assert not torch.equal(first, second)
    again = dropout.begin(3, 1, 2)
    assert torch.equal(again(ones), first)
    assert torch.equal(again(ones), second)
    for place in ((4, 1, 2), (3, 0, 2), (3, 1, 3)):
        assert not torch.equal(dropout.begin(*place)(ones), first)


@pytest.mark.parametrize(("rate", "masks"), [(0.0, DERIVED), (1.0, DERIVED), (-0.1, GENERATORS), (0.1, "none")])
def test_a_dropout_that_makes_no_sense_is_refused(rate: float, masks: str) -> None:
    with pytest.raises(UsageError, match="dropout"):
        Dropout(rate, masks, "seed")


def test_a_plan_says_what_is_dropped_and_the_experiments_own_drops_nothing(tmp_path: Path) -> None:
    profile = planning.with_dropout(small_profile(), DERIVED)
    plan = prepare.prepare(profile, tmp_path, compute="float32").plan
    assert plan.dropout == Dropout(0.1, DERIVED, "demo 1")
    assert Plan.parse(plan.encode()) == plan
    assert planning.with_dropout(small_profile(), None) == small_profile()
    assert small_profile().dropout is None


def alone(folder: Path, masks: str) -> tuple[Pair, Store]:
    """A worker that owns the whole model: two would share this process's generators."""
    profile = planning.with_dropout(replace(small_profile(), cuts=()), masks)
    profile = replace(profile, drill=replace(profile.drill, shard=0))
    prepared = prepare.prepare(profile, folder / "prepared", compute="float32")
    operator = ckptstore.open(folder / "operator", create=True)
    return Pair(folder / "first", prepared, store_preparation(prepared, operator), in_threads), operator


def forgotten(pair: Pair, root: Digest) -> None:
    """Restore all but the generators, as if they had been left out."""
    pair.each(Restore(root, "store"))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("masks", [GENERATORS, pytest.param(DERIVED, marks=pytest.mark.deep)])
def test_the_generators_decide_the_bits_exactly_where_masks_come_from_them(
    process: None, tmp_path: Path, masks: str
) -> None:
    """The last of the ways to go wrong: generators that are not restored."""
    pair, operator = alone(tmp_path, masks)
    pair.started().train(1, 1)
    begin = pair.commit(operator, 1)
    pair.train(2, 2)
    end = operator.checkpoint(pair.commit(operator, 2))
    attempt = operator.begin("again")
    pair.restored(operator, begin).train(2, 2)
    assert pair.save(attempt, 2)[0].shard == end.shards[0]
    forgotten(pair, begin)
    pair.train(2, 2)
    assert pair.save(attempt, 2)[0].shard != end.shards[0], "the states of generators are part of a shard"
    states = [event["state"] for event in pair.said(0) if event.name == "update" and event["update"] == 2]
    assert states[1] == states[0]
    assert (states[2] == states[0]) == (masks == DERIVED)


@pytest.mark.deep
@pytest.mark.parametrize("masks", MASKS)
def test_a_run_that_drops_is_recovered_to_the_root_of_the_run_without_a_loss(tmp_path: Path, masks: str) -> None:
    code, out, errors = Attack(tmp_path / "run", "--dropout", masks).end()
    assert code == 0, f"{out}\n{errors}"
    assert "equal: root, and losses and norms of 2 updates, bit for bit" in out
