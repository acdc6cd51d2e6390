"""The claim of the trainer: shards that exchange messages make exactly the updates of the whole model, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import fsum, inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer.compute.step
from ckptstore.errors import UsageError
from trainer.compute.batch import Batch, Microbatch
from trainer.compute.config import Config, Recipe, partition
from trainer.compute.model import Places, Shard, initialise
from trainer.compute.step import Step, build_optimizer, square_sum
from trainer.compute.transport import LocalGroup, local_groups
from trainer.errors import CursorError, NotFiniteError, PeerLostError, ProtocolError

WIDE = Config(vocab=320, hidden=256, intermediate=704, layers=6, heads=4, kv_heads=2)


# Equal to the whole model


@pytest.mark.parametrize("cuts", [(), (2,), (1,)])
def test_shards_make_the_updates_of_the_whole_model_bit_for_bit(runs: Any, compute: str, cuts: tuple[int, ...]) -> None:
    scenario = runs.scenario.but(compute=compute)
    expected = runs.whole(scenario)
    got = runs.partitioned(scenario, cuts)
    assert got.differs_from(expected) == []
    # What makes the comparison worth something: clipping bites, a microbatch is partial, and every counter moved.
    assert all(0 < result.coef < 0.5 for result in expected.reports[0])
    assert len({len(micro.ids) for micro in scenario.batches[0].microbatches}) > 1
    assert len({result.denominator for result in expected.reports[0]}) == scenario.updates
    steps = [tensor for name, tensor in got.tensors.items() if name.startswith("step ")]
    assert [int(step) for step in steps] == [scenario.updates] * len(steps)


def test_an_untied_head_is_trained_the_same_way(runs: Any) -> None:
    cfg = Config(vocab=96, hidden=64, intermediate=160, layers=2, heads=4, kv_heads=4, tied=False)
    scenario = runs.scenario.but(cfg=cfg, updates=2)
    assert runs.partitioned(scenario, (1,)).differs_from(runs.whole(scenario)) == []


def test_a_norm_below_the_limit_leaves_gradients_as_they_are(runs: Any) -> None:
    scenario = runs.scenario.but(recipe=Recipe(max_norm=1e3, warmup=3))
    got = runs.partitioned(scenario, (2,))
    assert {result.coef for result in got.reports[0]} == {1.0}
    assert len({result.rate for result in got.reports[0]}) == 3
    assert got.differs_from(runs.whole(scenario)) == []


@pytest.mark.deep
@pytest.mark.parametrize("cuts", [(3,), (2,), (1, 4), (1, 2, 3, 5)])
@pytest.mark.parametrize("recompute", [True, False])
def test_two_three_and_five_shards_of_a_wider_model_are_the_whole_model(
    runs: Any, compute: str, cuts: tuple[int, ...], recompute: bool
) -> None:
    scenario = runs.scenario.but(cfg=WIDE, compute=compute, recompute=recompute, batches=[])
    assert runs.partitioned(scenario, cuts).differs_from(runs.whole(scenario)) == []


# The same comparison notices every way in which the arithmetic could be wrong


def weight_of(batch: Batch, micro: int) -> float:
    return fsum(w for row in batch.microbatches[micro].weights for w in row)


class LocalDenominators(Step):
    def divisor(self, batch: Batch, micro: int) -> float:
        return weight_of(batch, micro)


class MeanOfMicrobatchMeans(Step):
    def divisor(self, batch: Batch, micro: int) -> float:
        return weight_of(batch, micro) * len(batch.microbatches)


class LocalClippingNorms(Step):
    """B018 (torchtitan#596, pytorch#162638): each stage clips by the norm of its own gradients."""

    def norm(self, squares: Any) -> float:
        return super().norm([squares[self.group.rank]])


class EmbeddingGradientDropped(Step):
    def accumulate_tied(self, parameter: nn.Parameter, as_head: Tensor, as_embedding: Tensor) -> None:
        self.accumulate(parameter, as_head)


class HeadGradientDropped(Step):
    def accumulate_tied(self, parameter: nn.Parameter, as_head: Tensor, as_embedding: Tensor) -> None:
        self.accumulate(parameter, as_embedding)


class TiedGradientsUnjoined(Step):
    def accumulate_tied(self, parameter: nn.Parameter, as_head: Tensor, as_embedding: Tensor) -> None:
        self.accumulate(parameter, as_head)
        self.accumulate(parameter, as_embedding)


class MicrobatchSkipped(Step):
    skipping = False

    def backward(self, update: int, index: int) -> None:
        self.skipping = self.group.rank == 1 and update == 2 and index == 2
        super().backward(update, index)
        self.skipping = False

    def accumulate(self, parameter: nn.Parameter, grad: Tensor) -> None:
        if not self.skipping:
            super().accumulate(parameter, grad)


class StaleCursor(Step):
    def check_cursors(self, update: int) -> None:
        if self.group.rank == 1 and update == 3:
            self.optimizer.state[self._inner[0]]["step"] += 1


MUTATIONS = [
    LocalDenominators,
    MeanOfMicrobatchMeans,
    LocalClippingNorms,
    EmbeddingGradientDropped,
    HeadGradientDropped,
    TiedGradientsUnjoined,
    MicrobatchSkipped,
    StaleCursor,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda step: step.__name__)
def test_the_comparison_fails_for_wrong_arithmetic(runs: Any, compute: str, mutation: type[Step]) -> None:
    scenario = runs.scenario.but(compute=compute)
    assert runs.partitioned(scenario, (2,), mutation).differs_from(runs.whole(scenario)) != []


# B017 (OLMo-core#828, pytorch#14253): recomputation changes nothing, and draws nothing


class WithDropout(Shard):
    """Dropout after each layer, from the global generator as modules do it."""

    def layer(self, layer: nn.Module, x: Tensor, places: Places) -> Tensor:
        return F.dropout(super().layer(layer, x, places), 0.1)


def test_recomputation_changes_no_bit(runs: Any, compute: str) -> None:
    scenario = runs.scenario.but(compute=compute)
    kept = runs.partitioned(scenario.but(recompute=False), (2,))
    assert runs.partitioned(scenario, (2,)).differs_from(kept) == []


def test_recomputation_with_dropout_gives_the_same_masks_and_leaves_the_same_generator(
    runs: Any, compute: str, kept_rng: None
) -> None:
    found = []
    for recompute in (True, False):
        torch.manual_seed(11)
        scenario = runs.scenario.but(compute=compute, recompute=recompute, shard=WithDropout)
        found.append((runs.partitioned(scenario, ()), torch.get_rng_state()))
    (with_it, rng_with), (without, rng_without) = found
    assert with_it.differs_from(without) == []
    assert torch.equal(rng_with, rng_without)
    assert without.differs_from(runs.partitioned(scenario, ())) != []  # the masks matter


@pytest.fixture
def kept_rng() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def test_an_update_draws_from_no_global_generator(runs: Any) -> None:
    before, python = torch.get_rng_state(), random.getstate()
    runs.partitioned(runs.scenario.but(updates=1, batches=[]), (2,))
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


# B018: one norm over all stages


def test_the_clipping_norm_is_that_of_all_stages(runs: Any) -> None:
    scenario = runs.scenario.but(recipe=Recipe(max_norm=1e-3))
    alone, together = runs.partitioned(scenario, ()), runs.partitioned(scenario, (2,))
    assert together.differs_from(alone) == []
    assert together.reports[0] == together.reports[1] == alone.reports[0]
    assert all(result.coef < 1e-2 for result in alone.reports[0])


@pytest.mark.parametrize("shape", [(7,), (5, 3), (300, 17), (1, 1)])
def test_a_square_sum_does_not_depend_on_the_order_of_rows_or_on_blocks(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 3
    expected = square_sum(tensor)
    assert square_sum(tensor.flip(0) if tensor.dim() > 1 else tensor) == expected
    monkeypatch.setattr(trainer.compute.step, "_BLOCK", 20)
    assert square_sum(tensor) == expected
    assert expected == pytest.approx(float(tensor.double().square().sum()), rel=1e-12)


# What an update refuses, and what it leaves untouched


def worker(scenario: Any, group: LocalGroup, **options: Any) -> Step:
    owners = partition(scenario.cfg, (2,) if group.world == 2 else ())
    own = owners[group.rank]
    shard = scenario.build(own.first, own.last)
    recipe = options.pop("recipe", scenario.recipe)
    return Step(shard, build_optimizer(shard, recipe), group, owners, recipe, **options)


def untouched(step: Step, scenario: Any) -> bool:
    fresh = scenario.build(step.shard.lo, step.shard.hi).state_dict()
    return all(torch.equal(t, fresh[n]) for n, t in step.shard.state_dict().items()) and not step.optimizer.state


def test_an_update_out_of_turn_is_refused_by_tensor(runs: Any) -> None:
    step = worker(runs.scenario, local_groups(1)[0])
    with pytest.raises(CursorError, match=r"update 2, tensor model\.embed_tokens\.weight"):
        step.run(2, runs.scenario.batches[0])
    step.run(1, runs.scenario.batches[0])
    step.optimizer.state[step.shard.model.norm.weight]["step"] += 1
    with pytest.raises(CursorError, match=r"model\.norm\.weight.* says 2 updates were made, not 1"):
        step.run(2, runs.scenario.batches[1])


def test_workers_with_other_numbers_change_no_weight(runs: Any) -> None:
    scenario = runs.scenario
    first = scenario.batches[0]
    micro = first.microbatches[0]
    heavier = tuple(tuple(w * (1 + 1e-12) for w in row) for row in micro.weights)
    odd = Batch((Microbatch(micro.ids, heavier), *first.microbatches[1:]))
    shorter = Batch(first.microbatches[::-1])
    for what, batch, recipe in (
        ("denominator of update 1", odd, scenario.recipe),
        ("learning rate of update 1", first, Recipe(rate=2e-3, max_norm=0.5)),
        ("positions is 33 instead of 29", shorter, scenario.recipe),
    ):
        steps: dict[int, Step] = {}

        def work(group: LocalGroup, batch: Batch = batch, recipe: Recipe = recipe, steps: Any = steps) -> None:
            steps[group.rank] = worker(scenario, group, recipe=recipe if group.rank else scenario.recipe)
            steps[group.rank].run(1, batch if group.rank else first)

        with pytest.raises(ProtocolError, match=what):
            runs.in_threads(local_groups(2), work)
        assert all(untouched(step, scenario) for step in steps.values())


@pytest.mark.parametrize("value", [nan, inf])
def test_a_gradient_that_is_not_finite_is_refused_by_name_on_every_worker(runs: Any, value: float) -> None:
    scenario, seen = runs.scenario, []

    def work(group: LocalGroup) -> None:
        step = worker(scenario, group)
        if group.rank:
            with torch.no_grad():
                step.shard.model.layers["3"].mlp.down_proj.weight[0, 0] = value
        with pytest.raises(NotFiniteError, match=r"model\.layers\.3\.mlp") as caught:
            step.run(1, scenario.batches[0])
        seen.append(str(caught.value))
        assert not step.optimizer.state

    runs.in_threads(local_groups(2), work)
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_a_worker_may_stop_between_operations_before_any_weight_changes(runs: Any) -> None:
    scenario, seen, steps = runs.scenario, [], {}

    class HostLost(Exception):
        pass

    def work(group: LocalGroup) -> None:
        def on_op(update: int, micro: int, op: str) -> None:
            seen.append((group.rank, update, micro, op))
            if (group.rank, update, micro, op) == (1, 1, 0, "forward"):
                raise HostLost

        steps[group.rank] = worker(scenario, group, on_op=on_op)
        try:
            steps[group.rank].run(1, scenario.batches[0])
        except HostLost:
            group.abort()
        except PeerLostError:
            pass

    runs.in_threads(local_groups(2), work)
    assert [event for event in seen if event[0] == 1] == [(1, 1, 0, "forward")]
    assert (0, 1, 0, "forward") in seen
    assert all(untouched(step, scenario) for step in steps.values())


def test_the_hook_sees_every_operation_of_the_schedule(runs: Any) -> None:
    seen: list[tuple[int, int, str]] = []
    step = worker(runs.scenario, local_groups(1)[0], on_op=lambda *event: seen.append(event))
    step.run(1, runs.scenario.batches[0])
    assert seen[:4] == [(1, 0, "forward"), (1, 0, "head"), (1, 1, "forward"), (1, 0, "backward")]
    assert len(seen) == 9


def test_a_shard_that_is_not_the_ranks_own_is_refused(runs: Any) -> None:
    scenario = runs.scenario
    shard = scenario.build(0, 3)
    optimizer = build_optimizer(shard, scenario.recipe)
    with pytest.raises(UsageError, match="not its shard"):
        Step(shard, optimizer, local_groups(2)[0], partition(scenario.cfg, (2,)), scenario.recipe)
    with pytest.raises(UsageError, match="2 shards in the partition, 1 workers"):
        Step(shard, optimizer, local_groups(1)[0], partition(scenario.cfg, (2,)), scenario.recipe)


# What an update reports


def test_boundary_bytes_are_the_four_tensors_of_every_microbatch(runs: Any, compute: str) -> None:
    scenario = runs.scenario.but(compute=compute)
    zero, one = (results[0] for results in runs.partitioned(scenario, (2,)).reports)
    tensor_bytes = scenario.batches[0].positions * scenario.cfg.hidden * getattr(torch, compute).itemsize
    assert zero.sent_bytes == zero.received_bytes == one.sent_bytes == one.received_bytes == 2 * tensor_bytes


def test_reported_numbers_survive_as_hexadecimal(runs: Any) -> None:
    result = runs.partitioned(runs.scenario, (2,)).reports[1][-1]
    assert {name: float.fromhex(text) for name, text in result.exact.items()} == {
        "loss": result.loss,
        "norm": result.norm,
        "coef": result.coef,
        "denominator": result.denominator,
        "rate": result.rate,
    }
    assert result.update == 4
    assert result.ms > 0


def test_decay_is_on_matrices_only(runs: Any) -> None:
    shard = runs.scenario.build(0, 4)
    matrices, vectors = build_optimizer(shard, runs.scenario.recipe).param_groups
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(shard.parameters()))


def test_training_learns(runs: Any) -> None:
    batch = runs.scenario.batches[0]
    scenario = runs.scenario.but(recipe=Recipe(rate=1e-2), batches=[batch] * 12)
    results = runs.partitioned(scenario, (2,)).reports[0]
    assert results[-1].loss < 0.5 * results[0].loss


def test_gradients_do_not_outlive_an_update(runs: Any) -> None:
    step = worker(runs.scenario, local_groups(1)[0])
    step.run(1, runs.scenario.batches[0])
    assert all(parameter.grad is None for parameter in step.shard.parameters())
    initialise(step.shard, seed=0)
