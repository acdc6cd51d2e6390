"""Whatever is done to stores, in any order, killed anywhere, with anything damaged: they are as a plain dict says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machine.machine import REFS, Stores
from tests.machine.model import Harm
from tests.machine.states import Recipe
from tests.machine.world import NAMES, Kill

QUICK = settings(
    max_examples=4,
    stateful_step_count=14,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
DEEP = settings(QUICK, derandomize=False, max_examples=50, stateful_step_count=40, print_blob=True)


def run(profile: settings, folder: Path | None) -> Counter[str]:
    """The steps that were taken, by what became of them."""

    class Here(Stores):
        taken: ClassVar[Counter[str]] = Counter()

    Here.folder = folder
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_state_machine_as_test(Here, settings=profile)
    finally:
        torch.set_num_threads(threads)
    return Here.taken


def walk(folder: Path | None, rounds: int) -> Counter[str]:
    """Take every step once in each round, in an order that follows from the number of the round."""

    class Here(Stores):
        taken: ClassVar[Counter[str]] = Counter()

    Here.folder = folder
    choose = Random(rounds)  # of its own: the global one is part of what is saved
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = Here()
        here.begin(Recipe(0, 0, 0, 0), 2)
        for _ in range(rounds):
            for step in choose.sample(STEPS, len(STEPS)):
                if folder is not None or step is not _lose_the_catalogue:
                    step(here, choose)
                    here.everything_is_as_the_model_says()
        here.teardown()
    finally:
        torch.set_num_threads(threads)
    return Here.taken


def _recipe(choose: Random) -> Recipe:
    return Recipe(choose.randrange(3), choose.randrange(2), choose.randrange(3), choose.randrange(3))


def _kill(choose: Random) -> Kill | None:
    return None if choose.random() < 0.6 else Kill(choose.randrange(70), choose.random() < 0.5)


def _lose_the_catalogue(here: Stores, choose: Random) -> None:
    here.drop_the_catalogue(name=choose.choice(NAMES))


STEPS: list[Callable[[Stores, Random], None]] = [
    lambda here, c: here.save(c.choice(NAMES), c.choice(REFS), _recipe(c), 1, None),
    lambda here, c: here.save(c.choice(NAMES), c.choice(REFS), _recipe(c), 2, None),
    lambda here, c: here.save(c.choice(NAMES), c.choice(REFS), _recipe(c), 1, Kill(c.randrange(70), True)),
    lambda here, c: here.give_up(c.choice(NAMES), c.choice(REFS), _recipe(c), _kill(c)),
    lambda here, c: here.copy(c.choice(NAMES), c.randrange(99), c.choice([None, *REFS]), False, _kill(c)),
    lambda here, c: here.copy(c.choice(NAMES), c.randrange(99), c.choice([None, *REFS]), True, None),
    lambda here, c: here.copy_a_shard(c.choice(NAMES), c.randrange(99), c.randrange(2), _kill(c)),
    lambda here, c: here.move_ref(c.choice(NAMES), c.choice(REFS), c.randrange(99), _kill(c)),
    lambda here, c: here.pin(c.choice(NAMES), c.randrange(99), c.choice([None, (0,)]), _kill(c)),
    lambda here, c: here.unpin(c.choice(NAMES), c.randrange(99)),
    lambda here, c: here.harm(c.choice(NAMES), c.randrange(999), c.choice(list(Harm))),
    lambda here, c: here.harm_a_ref(c.choice(NAMES), c.choice(REFS), c.randrange(999)),
    lambda here, c: here.reopen(c.choice(NAMES)),
    _lose_the_catalogue,
    lambda here, c: here.repair(c.choice(NAMES), c.randrange(99), _kill(c)),
    lambda here, c: here.collect(c.choice(NAMES), c.choice([None, 1, 2]), _kill(c)),
    lambda here, c: here.scrub(c.choice(NAMES)),
    lambda here, c: here.latest(c.choice(NAMES), c.choice(REFS)),
    lambda here, c: here.restore(c.choice(NAMES), c.randrange(99), c.randrange(2), c.random() < 0.5),
    lambda here, c: here.verify(c.choice(NAMES), c.randrange(99)),
    lambda here, c: here.diff((c.choice(NAMES), c.randrange(99)), (c.choice(NAMES), c.randrange(99))),
]
"""Every rule of the machine, with what chooses its arguments."""


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_stores_are_always_as_the_model_says(tmp_path: Path, kind: str) -> None:
    assert sum(run(QUICK, tmp_path if kind == "directory" else None).values()) >= 20


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_long_walk_through_everything_ends_as_the_model_says(tmp_path: Path, kind: str) -> None:
    """Every step several times, in an order that is the same each time."""
    taken = walk(tmp_path if kind == "directory" else None, rounds=3)
    assert {step.partition(":")[0].partition(",")[0] for step in taken} >= {
        "save",
        "push",
        "repair",
        "collection",
        "diff",
    }


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_stores_are_always_as_the_model_says_in_thousands_of_steps(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = run(DEEP, tmp_path if kind == "directory" else None)
    with capsys.disabled():
        print(f"\n{sum(taken.values()):,} steps on {kind}")
        for step, count in sorted(taken.items()):
            print(f"  {count:6,} {step}")
    assert sum(taken.values()) > 1000
