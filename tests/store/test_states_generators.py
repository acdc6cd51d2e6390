"""Generators of Python, NumPy and torch, global and given by name, come back as what they are (faults B001, B006)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptstore import TrainingState
from ckptstore.errors import MismatchError, RefusedError, UsageError
from ckptstore.format import values
from ckptstore.store import Store
from tests.support.documents import rewrite_shard
from tests.support.states import copy_through, save

KINDS: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "python": random.Random,
    "numpy-pcg64": np.random.default_rng,
    "numpy-pcg64dxsm": lambda seed: np.random.Generator(np.random.PCG64DXSM(seed)),
    "numpy-philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "numpy-sfc64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "numpy-mt19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "numpy-legacy": np.random.RandomState,
    "numpy-legacy-pcg64": lambda seed: np.random.RandomState(np.random.PCG64(seed)),
}


def draw(generator: Any) -> list[Any]:
    """Numbers of each sort that the generator keeps something back for."""
    if isinstance(generator, torch.Generator):
        return [*torch.rand(3, generator=generator).tolist(), *torch.randn(3, generator=generator).tolist()]
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), generator.getrandbits(7)]
    if isinstance(generator, np.random.Generator):
        return [generator.random(), int(generator.integers(0, 9, dtype=np.uint32)), generator.standard_normal()]
    return [generator.random_sample(), generator.standard_normal(), int(generator.randint(9))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_given_by_name_draws_on_where_it_was(store: Store, kind: str) -> None:
    """B001: the same numbers, those included that were drawn and kept for the next time."""
    generator, fresh = KINDS[kind](1), KINDS[kind](2)
    draw(generator)
    root = save(store, {"generators": {"own": generator}})
    expected = [draw(generator) for _ in range(3)]
    store.restore(root, TrainingState(generators={"own": fresh}))
    assert [draw(fresh) for _ in range(3)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_one_kind_is_not_for_another(store: Store, kind: str) -> None:
    """B006: refused by name, and nothing was changed."""
    root = save(store, {"model": nn.Linear(2, 2), "generators": {"own": KINDS[kind](1)}})
    for other in KINDS:
        if other == kind:
            continue
        fresh, live = nn.Linear(2, 2), KINDS[other](2)
        before, twin = fresh.weight.clone(), KINDS[other](2)
        with pytest.raises(MismatchError, match=r"generator generator\.own (cannot take|does not keep) its stored"):
            store.restore(root, TrainingState(model=fresh, generators={"own": live}))
        assert torch.equal(fresh.weight, before)
        assert draw(live) == draw(twin)


class Named(random.Random):
    """A generator of somebody else's, which cannot be made without an argument."""

    def __new__(cls, name: str) -> Named:
        return super().__new__(cls, name)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def test_a_generator_of_a_class_of_its_own_comes_back(store: Store) -> None:
    """A kind of lost state: saved, and then no restore could take it."""
    generator, fresh = Named("a"), Named("b")
    root = save(store, {"generators": {"own": generator}})
    expected = draw(generator)
    store.restore(root, TrainingState(generators={"own": fresh}))
    assert draw(fresh) == expected
    assert fresh.name == "b"


def test_generators_that_are_missing_or_new_are_named(store: Store) -> None:
    root = save(store, {"generators": [random.Random(1)]})
    with pytest.raises(MismatchError, match=r"generator generator\.0 is stored and not live"):
        store.restore(root, TrainingState())
    with pytest.raises(MismatchError, match=r"generator generator\.1 is live and not stored"):
        store.restore(root, TrainingState(generators=[random.Random(), random.Random()]))


def test_one_generator_needs_no_list() -> None:
    assert copy_through({"generators": random.Random(1)}, {"generators": random.Random(2)})


def test_a_generator_without_a_state_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match=r"generator generator\.os: it gives no state"):
        TrainingState(generators={"os": random.SystemRandom()}).capture()
    with pytest.raises(UsageError, match=r"own is a builtins.int, not a Generator or"):
        TrainingState(generators={"own": 5})  # type: ignore[dict-item]


OTHERS: dict[str, list[Any]] = {
    "python": [(3, (1, 2), None), (4, tuple(range(625)), None), 5, (2, tuple(range(625)), None)],
    "numpy": [("MT19937", b"xx", 1, 0, 0.0), ("MT18", b"\0" * 2496, 1, 0, 0.0), {"bit_generator": "PCG64"}, b""],
    "torch.cpu": [b"zz", None, "state", (1,)],
    "generator.own": [5, {"bit_generator": "PCG64", "state": {}}, (3, (0,) * 625, "x")],
}


@pytest.mark.parametrize(("name", "state"), [(name, state) for name in OTHERS for state in OTHERS[name]])
def test_a_state_of_an_unknown_kind_or_version_is_refused_with_nothing_changed(
    store: Store, name: str, state: Any
) -> None:
    """B006 (redai-studio/Relax#317), for values that are well formed and no state of this generator."""
    own = np.random.default_rng(3)
    root = save(store, {"model": nn.Linear(2, 2), "generators": {"own": own}})
    forged = rewrite_shard(
        store,
        root,
        0,
        lambda shard: {
            "rng": tuple(replace(e, value=values.to_json(state)) if e.name == name else e for e in shard.rng)
        },
    )
    fresh = nn.Linear(2, 2)
    before = fresh.weight.clone()
    present = random.getstate(), torch.get_rng_state(), own.bit_generator.state
    with pytest.raises(MismatchError, match=rf"generator {name} (cannot take|does not keep) its stored state"):
        store.restore(forged, TrainingState(model=fresh, generators={"own": own}))
    assert torch.equal(fresh.weight, before)
    assert random.getstate() == present[0]
    assert torch.equal(torch.get_rng_state(), present[1])
    assert own.bit_generator.state == present[2]


@pytest.fixture
def other_bits() -> Iterator[None]:
    """NumPy's global generator with other bits than those of old."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    yield
    np.random.set_bit_generator(before)


@pytest.mark.usefixtures("other_bits")
def test_the_global_generator_of_numpy_may_have_other_bits(store: Store) -> None:
    root = save(store, {})
    expected = np.random.random(3).tolist()
    np.random.random(5)
    store.restore(root, TrainingState())
    assert np.random.random(3).tolist() == expected


def test_capturing_draws_nothing() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index, union-attr]
    state = TrainingState(model=nn.Linear(1, 1), generators=[np.random.default_rng(1), random.Random(1)])
    after_init = torch.get_rng_state()
    state.capture()
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index, union-attr]
    assert torch.equal(torch.get_rng_state(), after_init)
