"""Losses and answers by the shards alone."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ckptstore.errors import UsageError
from trainer.compute.config import partition
from trainer.compute.generate import Document, Generation, greedy, response_losses
from trainer.compute.model import Shard
from trainer.compute.transport import LocalGroup, local_groups
from trainer.errors import NotFiniteError, ProtocolError

DOCUMENTS = [Document(tuple((3 + 5 * i + 7 * t + t * t) % 90 for t in range(9 + 3 * i)), 4 + i) for i in range(5)]
PROMPTS = [document.ids[: document.start] for document in DOCUMENTS]
END = 95


def by_shards(runs: Any, scenario: Any, cuts: tuple[int, ...], work: Any) -> list[Any]:
    """``work(shard, group)`` on every shard; one result a rank."""
    owners = partition(scenario.cfg, cuts)

    def one(group: LocalGroup) -> Any:
        own = owners[group.rank]
        return work(scenario.build(own.first, own.last), group)

    return list(runs.in_threads(local_groups(len(owners)), one))


@pytest.mark.parametrize("cuts", [(2,), (1, 3)])
def test_every_worker_ends_with_the_losses_of_the_whole_model(runs: Any, compute: str, cuts: tuple[int, ...]) -> None:
    scenario = runs.scenario.but(compute=compute)

    def losses(shard: Shard, group: LocalGroup) -> tuple[float, ...]:
        return response_losses(shard, group, DOCUMENTS, step=32)

    (alone,) = by_shards(runs, scenario, (), losses)
    assert by_shards(runs, scenario, cuts, losses) == [alone] * (len(cuts) + 1)


def test_a_loss_is_the_mean_cross_entropy_of_the_response_tokens(runs: Any) -> None:
    model = runs.scenario.build(0, 4)
    expected = []
    with torch.no_grad():
        for document in DOCUMENTS:
            ids = torch.tensor([document.ids])
            logits = model.logits(model.body(model.embed(ids)))[0]
            expected.append(float(F.cross_entropy(logits[document.start - 1 : -1], ids[0, document.start :])))
    got = response_losses(model, local_groups(1)[0], DOCUMENTS, step=0)
    assert got == pytest.approx(expected, rel=1e-5)


def test_a_result_depends_on_its_own_document_only(runs: Any) -> None:
    model, group = runs.scenario.build(0, 4), local_groups(1)[0]
    together = response_losses(model, group, DOCUMENTS, step=0)
    assert together == tuple(response_losses(model, group, [d], step=0)[0] for d in DOCUMENTS)
    answers = greedy(model, group, PROMPTS, cap=6, end=END, step=0)
    assert answers == tuple(greedy(model, group, [p], cap=6, end=END, step=0)[0] for p in PROMPTS)


@pytest.mark.parametrize("cuts", [(2,), (1, 3)])
def test_every_worker_ends_with_the_answers_of_the_whole_model(runs: Any, compute: str, cuts: tuple[int, ...]) -> None:
    scenario = runs.scenario.but(compute=compute, std=0.3)
    probe = greedy(scenario.build(0, 4), local_groups(1)[0], PROMPTS, cap=8, end=END, step=0)
    end = probe[1].ids[4]  # a token that does come, so that answers end at different times

    def answer(shard: Shard, group: LocalGroup) -> tuple[Generation, ...]:
        return greedy(shard, group, PROMPTS, cap=12, end=end, step=32)

    (alone,) = by_shards(runs, scenario, (), answer)
    assert by_shards(runs, scenario, cuts, answer) == [alone] * (len(cuts) + 1)
    assert {len(generation.ids) for generation in alone} != {12}


def test_an_answer_is_the_likeliest_token_of_each_prefix_until_the_end(runs: Any) -> None:
    model, group = runs.scenario.but(std=0.3).build(0, 4), local_groups(1)[0]

    def next_token(prefix: list[int]) -> tuple[int, float]:
        with torch.no_grad():
            logits = model.logits(model.body(model.embed(torch.tensor([prefix]))))[0, -1]
        top = logits.topk(2)
        return int(top.indices[0]), float(top.values[0]) - float(top.values[1])

    prefix, margins = list(PROMPTS[0]), []
    for _ in range(7):
        token, margin = next_token(prefix)
        prefix.append(token)
        margins.append(margin)
    answer = prefix[len(PROMPTS[0]) :]
    (capped,) = greedy(model, group, PROMPTS[:1], cap=7, end=END, step=0)
    assert (capped.ids, capped.ended) == (tuple(answer), False)
    assert capped.margin == pytest.approx(min(margins), rel=1e-3)
    end = answer[3]
    first = answer.index(end)
    (ended,) = greedy(model, group, PROMPTS[:1], cap=7, end=end, step=0)
    assert (ended.ids, ended.ended) == (tuple(answer[:first]), True)
    assert ended.margin == pytest.approx(min(margins[: first + 1]), rel=1e-3)


def test_of_equal_logits_the_first_token_is_taken(runs: Any) -> None:
    model, group = runs.scenario.build(0, 4), local_groups(1)[0]
    with torch.no_grad():
        model.head_weight.fill_(0.5)
    (answer,) = greedy(model, group, PROMPTS[:1], cap=2, end=END, step=0)
    assert answer == Generation((0, 0), False, 0.0)


def test_progress_is_reported_after_each_round(runs: Any) -> None:
    model, group, seen = runs.scenario.build(0, 4), local_groups(1)[0], []
    greedy(model, group, PROMPTS, cap=3, end=END, step=0, on_token=seen.append)
    assert seen == [5, 5, 5]


@pytest.mark.parametrize("value", [nan, inf])
def test_a_model_that_gives_no_numbers_is_refused_on_every_worker(runs: Any, value: float) -> None:
    def broken(shard: Shard, group: LocalGroup) -> str:
        if group.rank == 0:
            with torch.no_grad():
                shard.model.norm.weight.fill_(value)
        with pytest.raises(NotFiniteError, match="prompt 0 after 3 updates"):
            greedy(shard, group, PROMPTS, cap=3, end=END, step=3)
        with pytest.raises(NotFiniteError, match="document 0 after 3 updates") as caught:
            response_losses(shard, group, DOCUMENTS, step=3)
        return str(caught.value)

    assert len(by_shards(runs, runs.scenario, (2,), broken)) == 2


def test_workers_that_evaluate_different_stages_are_refused(runs: Any) -> None:
    def confused(shard: Shard, group: LocalGroup) -> Any:
        return response_losses(shard, group, DOCUMENTS, step=32 + group.rank)

    with pytest.raises(ProtocolError, match="update is 32 instead of 33"):
        by_shards(runs, runs.scenario, (2,), confused)


def test_evaluation_leaves_no_trace(runs: Any) -> None:
    model, group = runs.scenario.build(0, 4), local_groups(1)[0]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()
    response_losses(model, group, DOCUMENTS, step=0)
    greedy(model, group, PROMPTS, cap=2, end=END, step=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("ids", "start"), [((1, 2), 0), ((1, 2), 2), ((), 1)])
def test_a_document_without_prompt_or_response_is_refused(ids: tuple[int, ...], start: int) -> None:
    with pytest.raises(UsageError):
        Document(ids, start)


def test_nothing_to_continue_is_refused(runs: Any) -> None:
    model, group = runs.scenario.build(0, 4), local_groups(1)[0]
    with pytest.raises(UsageError):
        greedy(model, group, [()], cap=4, end=END, step=0)
    with pytest.raises(UsageError):
        greedy(model, group, PROMPTS, cap=0, end=END, step=0)
    assert greedy(model, group, [], cap=4, end=END, step=0) == ()
    assert response_losses(model, group, [], step=0) == ()
