"""The rules: what may happen in a world of two stores, in any order."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.machine import accidents, work
from tests.machine.model import Harm
from tests.machine.states import Recipe
from tests.machine.upkeep import let_go, look_at_everything, mend, newest
from tests.machine.world import NAMES, Kill, World

REFS = ("best", "main")

stores = st.sampled_from(NAMES)
refs = st.sampled_from(REFS)
numbers = st.integers(0, 2**16)
recipes = st.builds(Recipe, st.integers(0, 2), st.integers(0, 1), st.integers(0, 2), st.integers(0, 2))
kills = st.none() | st.builds(Kill, st.integers(0, 70), st.booleans())

_folders = itertools.count()


class Stores(RuleBasedStateMachine):
    """Anything that may be done to stores; every step is compared with the model.

    ``folder`` is where the stores are made, None for memory; ``taken`` counts the steps by what became of them.
    """

    folder: Path | None = None
    taken: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the state of the generator is part of every root
        self.world = World(None if self.folder is None else self.folder / f"{next(_folders)}")

    def teardown(self) -> None:
        self.world.check(everything=True)
        self.world.close()

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        self.world.check()

    def _took(self, step: str) -> None:
        self.taken[step] += 1

    def _is_in_folders(self) -> bool:
        return self.folder is not None

    def _has_refs(self) -> bool:
        return any(self.world.held[name].refs for name in NAMES)

    def _has_roots(self) -> bool:
        return any(self.world.roots(name) for name in NAMES)

    def _has_whole(self) -> bool:
        return any(self.world.whole(name) for name in NAMES)

    def _has_pins(self) -> bool:
        return any(self.world.held[name].pins for name in NAMES)

    @initialize(recipe=recipes, shards=st.sampled_from([1, 2]))
    def begin(self, recipe: Recipe, shards: int) -> None:
        work.save(self.world, "near", "main", recipe, shards)

    # -- training -----------------------------------------------------------------------------------------------------

    @rule(name=stores, ref=refs, recipe=recipes, shards=st.sampled_from([1, 1, 2]), kill=kills)
    def save(self, name: str, ref: str, recipe: Recipe, shards: int, kill: Kill | None) -> None:
        told = work.save(self.world, name, ref, recipe, shards, kill)
        self._took(f"save, {shards} shards: {told}")

    @rule(name=stores, ref=refs, recipe=recipes, kill=kills)
    def give_up(self, name: str, ref: str, recipe: Recipe, kill: Kill | None) -> None:
        self._took(f"give up: {work.give_up(self.world, name, ref, recipe, kill)}")

    # -- copies -------------------------------------------------------------------------------------------------------

    @precondition(_has_whole)
    @rule(source=stores, number=numbers, ref=st.none() | refs, pull=st.booleans(), kill=kills)
    def copy(self, source: str, number: int, ref: str | None, pull: bool, kill: Kill | None) -> None:
        if roots := self.world.whole(source):
            told = work.push(self.world, source, _other(source), roots[number % len(roots)], ref, pull, kill)
            self._took(f"{'pull' if pull else 'push'}: {told}")

    @precondition(_has_whole)
    @rule(source=stores, number=numbers, shard=st.integers(0, 1), kill=kills)
    def copy_a_shard(self, source: str, number: int, shard: int, kill: Kill | None) -> None:
        truths = self.world.model.truths
        if roots := [root for root in self.world.whole(source) if len(truths[root].shards) == 2]:
            told = work.pull_shard(self.world, source, _other(source), roots[number % len(roots)], shard, kill)
            self._took(f"pull a shard: {told}")

    # -- names --------------------------------------------------------------------------------------------------------

    @precondition(_has_whole)
    @rule(name=stores, ref=refs, number=st.none() | numbers, kill=kills)
    def move_ref(self, name: str, ref: str, number: int | None, kill: Kill | None) -> None:
        roots = self.world.whole(name)
        if roots or number is None:
            told = work.move(self.world, name, ref, None if number is None else roots[number % len(roots)], kill)
            self._took(f"move a ref: {told}")

    @precondition(_has_whole)
    @rule(name=stores, number=numbers, shards=st.none() | st.sampled_from([(0,), (1,), (0, 1)]), kill=kills)
    def pin(self, name: str, number: int, shards: tuple[int, ...] | None, kill: Kill | None) -> None:
        if roots := self.world.whole(name):
            root = roots[number % len(roots)]
            if shards is None or len(self.world.model.truths[root].shards) == 2:
                self._took(f"pin: {work.pin(self.world, name, root, shards, kill)}")

    @precondition(_has_pins)
    @rule(name=stores, number=numbers)
    def unpin(self, name: str, number: int) -> None:
        if self.world.held[name].pins:
            work.unpin(self.world, name, number)
            self._took("unpin")

    # -- accidents ----------------------------------------------------------------------------------------------------

    @precondition(_has_roots)
    @rule(name=stores, number=numbers, harm=st.sampled_from(Harm))
    def harm(self, name: str, number: int, harm: Harm) -> None:
        accidents.harm(self.world, name, number, harm)
        self._took(f"damage: {harm.value}")

    @precondition(_has_refs)
    @rule(name=stores, ref=refs, number=numbers)
    def harm_a_ref(self, name: str, ref: str, number: int) -> None:
        if ref in self.world.held[name].refs:
            accidents.harm_ref(self.world, name, ref, number)
            self._took("damage: ref")

    @rule(name=stores)
    def reopen(self, name: str) -> None:
        self.world.reopen(name)
        self._took("reopen")

    @precondition(_is_in_folders)
    @rule(name=stores)
    def drop_the_catalogue(self, name: str) -> None:
        self._took(f"catalogue: {accidents.drop_catalogue(self.world, name)}")

    # -- upkeep -------------------------------------------------------------------------------------------------------

    @precondition(_has_whole)
    @rule(name=stores, number=numbers, kill=kills)
    def repair(self, name: str, number: int, kill: Kill | None) -> None:
        if roots := self.world.whole(name):
            told = mend(self.world, name, _other(name), roots[number % len(roots)], kill)
            self._took(f"repair: {told}")

    @rule(name=stores, keep_last=st.none() | st.integers(1, 2), kill=kills)
    def collect(self, name: str, keep_last: int | None, kill: Kill | None) -> None:
        self._took(f"collection: {let_go(self.world, name, keep_last, kill)}")

    @precondition(_has_roots)
    @rule(name=stores)
    def scrub(self, name: str) -> None:
        self._took(f"scrub: {look_at_everything(self.world, name)}")

    @precondition(_has_refs)
    @rule(name=stores, ref=refs)
    def latest(self, name: str, ref: str) -> None:
        self._took(f"latest: {newest(self.world, name, ref)}")

    # -- looking ------------------------------------------------------------------------------------------------------

    @precondition(_has_roots)
    @rule(name=stores, number=numbers, shard=st.integers(0, 1), atomic=st.booleans())
    def restore(self, name: str, number: int, shard: int, atomic: bool) -> None:
        if roots := self.world.whole(name):
            root = roots[number % len(roots)]
            shard %= len(self.world.model.truths[root].shards)
            self._took(f"restore: {self.world.restore(name, root, shard, atomic=atomic)}")

    @precondition(_has_roots)
    @rule(name=stores, number=numbers)
    def verify(self, name: str, number: int) -> None:
        if roots := self.world.roots(name):
            found = self.world.verify(name, roots[number % len(roots)], note=True)
            self._took(f"verify: {'damage' if found else 'whole'}")

    @precondition(_has_whole)
    @rule(left=st.tuples(stores, numbers), right=st.tuples(stores, numbers))
    def diff(self, left: tuple[str, int], right: tuple[str, int]) -> None:
        roots = [self.world.whole(name) for name, _ in (left, right)]
        if all(roots):
            sides = [
                (name, there[number % len(there)]) for (name, number), there in zip((left, right), roots, strict=True)
            ]
            self._took(f"diff: {self.world.diff(sides[0], sides[1])}")


def _other(name: str) -> str:
    return NAMES[1 - NAMES.index(name)]
