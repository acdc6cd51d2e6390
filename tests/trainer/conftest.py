"""A small training run, made twice: as one whole model with ordinary autograd, and by shards that exchange messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum, sqrt
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import s3 as shared
from trainer.compute import numerics
from trainer.compute.batch import Batch, Microbatch
from trainer.compute.config import Config, Recipe, partition
from trainer.compute.dropout import Dropout
from trainer.compute.model import Shard, initialise
from trainer.compute.result import UpdateResult
from trainer.compute.step import Step, build_optimizer
from trainer.compute.transport import LocalGroup, local_groups

T = TypeVar("T")

TINY = Config(vocab=96, hidden=64, intermediate=160, layers=4, heads=4, kv_heads=2)
CLIPPING = Recipe(rate=1e-3, weight_decay=0.1, max_norm=0.5)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> shared.SharedServer:
    """The S3 server that all tests of this process share; the environment leads there, with all rights."""
    for name, value in shared.environment().items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    return shared.shared()


@pytest.fixture
def exact_arithmetic() -> Iterator[None]:
    """One thread and deterministic kernels, put back afterwards."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    numerics.apply(threads=1)
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(scope="module")
def process() -> Iterator[None]:
    """This process as a worker's: one thread, the plan's kernels. Everything is put back afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in numerics.env_for("native").items():
            patch.setenv(name, value)
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def uneven_batches(vocab: int, updates: int, shapes: Sequence[tuple[int, int]], seed: int = 7) -> list[Batch]:
    """Rows of unequal length with random weights in [0, 2), zero on prompt and padding.

    The second microbatch weighs 2^-14 of that: sums of a few BF16 numbers of one size are exact in FP32 in any order,
    so without it no wrong order of addition could be seen.
    """
    draw = random.Random(seed)

    def row(length: int, scale: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
        end = draw.randint(length // 2, length)
        prompt = draw.randint(1, end // 2)
        ids = tuple(draw.randrange(vocab) if t < end else 0 for t in range(length))
        return ids, tuple(scale * draw.random() if prompt <= t < end else 0.0 for t in range(length))

    def micro(rows: int, length: int, scale: float) -> Microbatch:
        ids, weights = zip(*(row(length, scale) for _ in range(rows)), strict=True)
        return Microbatch(ids, weights)

    scales = [2.0**-13 if i == 1 else 2.0 for i in range(len(shapes))]
    pairs = list(zip(shapes, scales, strict=True))
    return [Batch(tuple(micro(*shape, scale) for shape, scale in pairs)) for _ in range(updates)]


@dataclass
class Scenario:
    """What is trained, how, and on what."""

    cfg: Config = TINY
    compute: str = "float32"
    recipe: Recipe = CLIPPING
    recompute: bool = True
    dropout: Dropout | None = None
    std: float = 0.1
    shapes: tuple[tuple[int, int], ...] = ((4, 33), (4, 17), (2, 29))
    updates: int = 4
    shard: type[Shard] = Shard
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batches = self.batches or uneven_batches(self.cfg.vocab, self.updates, self.shapes)

    def but(self, **changes: object) -> Scenario:
        return replace(self, **changes)  # type: ignore[arg-type]

    def build(self, lo: int, hi: int) -> Shard:
        made = self.shard(self.cfg, lo, hi, lo == 0, self.compute)
        initialise(made, seed=1, std=self.std)
        return made


@dataclass
class Outcome:
    """All tensors by name and role, and what each worker reported of each update."""

    tensors: dict[str, Tensor]
    reports: list[list[UpdateResult]]

    def differs_from(self, other: Outcome) -> list[str]:
        """Names of tensors and updates that are not the same bits as those of one worker; nothing is tolerated."""
        assert self.tensors.keys() == other.tensors.keys()
        names = [
            n
            for n, t in self.tensors.items()
            if t.dtype != other.tensors[n].dtype or not torch.equal(t, other.tensors[n])
        ]
        pairs = [pair for results in self.reports for pair in zip(results, other.reports[0], strict=True)]
        return names + [f"update {a.update}" for a, b in pairs if a.exact != b.exact]


def _collect(shard: Shard, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in shard.named_parameters():
        state = optimizer.state[parameter]
        found |= {
            f"weight {name}": parameter.detach(),
            **{f"{role} {name}": state[role] for role in ("step", "exp_avg", "exp_avg_sq")},
        }
    return found


def whole(scenario: Scenario) -> Outcome:
    """The reference: one model, ``loss.backward()``, and the norm written out."""
    model = scenario.build(0, scenario.cfg.layers)
    optimizer = build_optimizer(model, scenario.recipe)
    results = []
    for update, batch in enumerate(scenario.batches, 1):
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for index, micro in enumerate(batch.microbatches):
            dropping = None if scenario.dropout is None else partial(scenario.dropout.begin, update, index)
            ids, weights = torch.tensor(micro.ids), torch.tensor(micro.weights, dtype=torch.float32)[:, 1:]
            hidden = model.body(model.embed(ids), recompute=scenario.recompute, dropping=dropping)
            loss = (model.token_losses(hidden, ids) * weights).sum() / batch.denominator
            loss.backward()
            losses.append(loss.item())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        squares = [fsum(g.double().square().sum(-1).reshape(-1).tolist()) for g in grads]
        norm = sqrt(fsum(squares))
        coef = min(1.0, scenario.recipe.max_norm / (norm + 1e-6))
        for grad in grads:
            grad.mul_(coef)
        rate = scenario.recipe.rate_at(update)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        results.append(UpdateResult(update, fsum(losses), norm, coef, batch.denominator, rate, 0, 0, 0.0))
    return Outcome(_collect(model, optimizer), [results])


def in_threads(groups: Sequence[LocalGroup], work: Callable[[LocalGroup], T]) -> list[T]:
    """Run ``work`` for each member in a thread of its own; the first failure aborts the others and is raised."""

    def one(group: LocalGroup) -> T:
        try:
            return work(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(one, group) for group in groups]
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:
        # A member that was merely woken says less than the one that failed.
        raise next((e for e in failures if type(e).__name__ != "PeerLostError"), failures[0])
    return [future.result() for future in futures]


def partitioned(scenario: Scenario, cuts: Sequence[int], step_type: type[Step] = Step) -> Outcome:
    """The subject: as many shards as cuts and one more, each with its optimizer, exchanging messages."""
    owners = partition(scenario.cfg, cuts)

    def work(group: LocalGroup) -> tuple[dict[str, Tensor], list[UpdateResult]]:
        own = owners[group.rank]
        shard = scenario.build(own.first, own.last)
        optimizer = build_optimizer(shard, scenario.recipe)
        options = {"recompute": scenario.recompute, "dropout": scenario.dropout}
        step = step_type(shard, optimizer, group, owners, scenario.recipe, **options)
        results = [step.run(update, batch) for update, batch in enumerate(scenario.batches, 1)]
        return _collect(shard, optimizer), results

    parts = in_threads(local_groups(len(owners)), work)
    tensors: dict[str, Tensor] = {}
    for held, _ in parts:
        assert not tensors.keys() & held.keys()
        tensors |= held
    names = [name for owner in partition(scenario.cfg, ()) for name, _ in owner.tensors]
    ordered = {
        f"{role} {n}": tensors[f"{role} {n}"] for n in names for role in ("weight", "step", "exp_avg", "exp_avg_sq")
    }
    return Outcome(ordered, [results for _, results in parts])


@dataclass(frozen=True)
class Runs:
    """The two ways to train, and what they train on by default."""

    scenario: Scenario
    whole: Callable[[Scenario], Outcome]
    partitioned: Callable[..., Outcome]
    in_threads: Callable[..., list[Any]]


@pytest.fixture
def runs(exact_arithmetic: None) -> Runs:
    return Runs(Scenario(), whole, partitioned, in_threads)


@pytest.fixture(
    params=[
        "float32",
        pytest.param("bfloat16", marks=pytest.mark.skipif(not numerics.bf16_supported(), reason="no BF16 kernels")),
    ]
)
def compute(request: pytest.FixtureRequest) -> str:
    """Each compute dtype that this CPU has kernels for."""
    return str(request.param)
