"""Losses and answers by the shards alone; a cache changes no bit of a logit, and neither does company."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ckptstore.errors import UsageError
from trainer.compute.config import PRESETS, Config, Decoding, partition
from trainer.compute.generate import Document, Generation, greedy, response_losses
from trainer.compute.model import Shard, initialise
from trainer.compute.recomputation import answer
from trainer.compute.transport import LocalGroup, local_groups
from trainer.errors import NotFiniteError, ProtocolError

DOCUMENTS = [Document(tuple((3 + 5 * i + 7 * t + t * t) % 90 for t in range(9 + 3 * i)), 4 + i) for i in range(5)]
PROMPTS = [document.ids[: document.start] for document in DOCUMENTS]
END = 95
SHAPE = Decoding(block=4, slots=3, positions=20)  # more prompts than slots, and answers of several blocks


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
    answers = greedy(model, group, PROMPTS, decoding=SHAPE, cap=6, end=END, step=0)
    assert answers == tuple(greedy(model, group, [p], decoding=SHAPE, cap=6, end=END, step=0)[0] for p in PROMPTS)


@pytest.mark.parametrize("cuts", [(2,), (1, 3)])
def test_every_worker_ends_with_the_answers_of_the_whole_model(runs: Any, compute: str, cuts: tuple[int, ...]) -> None:
    scenario = runs.scenario.but(compute=compute, std=0.3)
    probe = greedy(scenario.build(0, 4), local_groups(1)[0], PROMPTS, decoding=SHAPE, cap=8, end=END, step=0)
    end = probe[1].ids[4]  # a token that does come, so that answers end at different times

    def answer(shard: Shard, group: LocalGroup) -> tuple[Generation, ...]:
        return greedy(shard, group, PROMPTS, decoding=SHAPE, cap=12, end=end, step=32)

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
    (capped,) = greedy(model, group, PROMPTS[:1], decoding=SHAPE, cap=7, end=END, step=0)
    assert (capped.ids, capped.ended) == (tuple(answer), False)
    assert capped.margin == pytest.approx(min(margins), rel=1e-3)
    end = answer[3]
    first = answer.index(end)
    (ended,) = greedy(model, group, PROMPTS[:1], decoding=SHAPE, cap=7, end=end, step=0)
    assert (ended.ids, ended.ended) == (tuple(answer[:first]), True)
    assert ended.margin == pytest.approx(min(margins[: first + 1]), rel=1e-3)


def test_of_equal_logits_the_first_token_is_taken(runs: Any) -> None:
    model, group = runs.scenario.build(0, 4), local_groups(1)[0]
    with torch.no_grad():
        model.head_weight.fill_(0.5)
    (answer,) = greedy(model, group, PROMPTS[:1], decoding=SHAPE, cap=2, end=END, step=0)
    assert answer == Generation((0, 0), False, 0.0)


def logits_of(
    shard: Shard,
    group: LocalGroup,
    prompts: Sequence[Sequence[int]],
    *,
    decoding: Decoding = SHAPE,
    cap: int = 12,
    cache: bool = True,
) -> tuple[tuple[Generation, ...], list[Tensor]]:
    """The answers, and for each prompt the logits of all its tokens; no logits on any rank but the first."""
    seen: dict[int, list[Tensor]] = defaultdict(list)
    answers = greedy(
        shard,
        group,
        prompts,
        decoding=decoding,
        cap=cap,
        end=END,
        step=0,
        cache=cache,
        on_logits=lambda case, logits: seen[case].append(logits.clone()),
    )
    assert bool(seen) == (group.rank == 0)
    return answers, [torch.stack(seen[case]) for case in range(len(prompts))] if seen else []


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3)])
def test_logits_with_a_cache_are_those_of_computing_every_prefix_again(
    runs: Any, compute: str, cuts: tuple[int, ...]
) -> None:
    scenario = runs.scenario.but(compute=compute, std=0.3)
    cached = by_shards(runs, scenario, cuts, lambda shard, group: logits_of(shard, group, PROMPTS))
    again = by_shards(runs, scenario, cuts, lambda shard, group: logits_of(shard, group, PROMPTS, cache=False))
    assert [answers for answers, _ in cached] == [answers for answers, _ in again]
    assert same_bits(cached[0][1], again[0][1])
    assert sum(map(len, cached[0][1])) == sum(len(one.ids) + one.ended for one in cached[0][0])


def bits_of(cfg: Config, compute: str, lengths: Sequence[int], cap: int, decoding: Decoding) -> None:
    """Cached in company, cached alone, and computed again alone: the same logits."""
    model, group = Shard(cfg, 0, cfg.layers, True, compute), local_groups(1)[0]
    initialise(model, seed=5, std=0.08)
    prompts = [tuple((11 * i + 17 * t + t * t) % cfg.vocab for t in range(n)) for i, n in enumerate(lengths)]
    answers, together = logits_of(model, group, prompts, decoding=decoding, cap=cap)
    for number, prompt in enumerate(prompts):
        for cache in (True, False):
            alone = logits_of(model, group, [prompt], decoding=decoding, cap=cap, cache=cache)
            assert alone[0] == (answers[number],)
            assert same_bits(alone[1], [together[number]])


@pytest.mark.parametrize(("block", "slots"), [(8, 8), (16, 4), (1, 16)])
def test_logits_of_the_demo_model_depend_on_the_prompt_only(
    exact_arithmetic: None, compute: str, block: int, slots: int
) -> None:
    bits_of(PRESETS["demo"], compute, [15, 16, 17, 40, 3], 5, Decoding(block, slots, 48))


@pytest.mark.deep
def test_logits_of_a_model_of_135m_parameters_depend_on_the_prompt_only(exact_arithmetic: None, compute: str) -> None:
    bits_of(PRESETS["smollm2-135m"], compute, [16, 26, 47], 6, Decoding(8, 8, 56))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_too_logits_depend_on_the_prompt_only(exact_arithmetic: None, dtype: str) -> None:
    with torch.device("cuda"):
        model = Shard(PRESETS["demo"], 0, 4, True, dtype)
    initialise(model, seed=5, std=0.08)
    group = local_groups(1, device="cuda")[0]
    prompts = [tuple((11 * i + 17 * t) % 260 for t in range(n)) for i, n in enumerate((15, 16, 40))]
    shape = Decoding(8, 8, 48)
    answers, together = logits_of(model, group, prompts, decoding=shape, cap=6)
    for number, prompt in enumerate(prompts):
        alone = logits_of(model, group, [prompt], decoding=shape, cap=6, cache=False)
        assert alone[0] == (answers[number],)
        assert same_bits(alone[1], [together[number]])


def test_a_sample_of_answers_is_computed_again_and_found_equal_by_all_workers(runs: Any) -> None:
    scenario = runs.scenario.but(std=0.3)

    def sampled(shard: Shard, group: LocalGroup) -> Any:
        return answer(shard, group, PROMPTS, [1, 4], decoding=SHAPE, cap=6, end=END, step=7)

    (first, found), (second, other) = by_shards(runs, scenario, (2,), sampled)
    assert first == second
    assert (found.cases, found.differs) == (other.cases, other.differs) == (2, None)
    assert found.tokens == other.tokens == len(first[1].ids) + len(first[4].ids)
    assert found.steps == other.steps == found.tokens + first[1].ended + first[4].ended


class Drifting(Shard):
    """Gives other hidden states in its fourth pass, as keys that were kept and are wrong would."""

    def blocks(self, x: Tensor, places: Any, keeps: Any) -> Tensor:
        done = super().blocks(x, places, keeps)
        self.passes = getattr(self, "passes", 0) + 1
        return done * (1 + 2**-7) if self.passes == 4 else done


def test_a_logit_that_is_not_that_of_recomputation_is_found_and_named_on_all_workers(runs: Any) -> None:
    scenario = runs.scenario.but(std=0.3, shard=Drifting)

    def sampled(shard: Shard, group: LocalGroup) -> Any:
        return answer(shard, group, PROMPTS[:2], [1, 0], decoding=SHAPE, cap=6, end=END, step=7)[1].differs

    found = by_shards(runs, scenario, (2,), sampled)
    assert found[0] == found[1]
    assert found[0] is not None


@pytest.mark.parametrize("value", [nan, inf])
def test_a_model_that_gives_no_numbers_is_refused_on_every_worker(runs: Any, value: float) -> None:
    def broken(shard: Shard, group: LocalGroup) -> str:
        if group.rank == 0:
            with torch.no_grad():
                shard.model.norm.weight.fill_(value)
        with pytest.raises(NotFiniteError, match="prompt 0 after 3 updates"):
            greedy(shard, group, PROMPTS, decoding=SHAPE, cap=3, end=END, step=3)
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
    greedy(model, group, PROMPTS, decoding=SHAPE, cap=2, end=END, step=0)
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
        greedy(model, group, [()], decoding=SHAPE, cap=4, end=END, step=0)
    with pytest.raises(UsageError):
        greedy(model, group, PROMPTS, decoding=SHAPE, cap=0, end=END, step=0)
    with pytest.raises(UsageError, match="8 tokens and an answer of 13 are more than 20 positions"):
        greedy(model, group, PROMPTS, decoding=SHAPE, cap=13, end=END, step=0)
    assert greedy(model, group, [], decoding=SHAPE, cap=4, end=END, step=0) == ()
    assert response_losses(model, group, [], step=0) == ()
