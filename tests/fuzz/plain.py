"""The driver of every test run: the seeds, what was found once, and changes to them from a seeded generator."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.fuzz.catalogue import found
from tests.fuzz.minimise import complaint
from tests.fuzz.mutate import mutated
from tests.fuzz.target import Finding, Target, TookTooLong, accepts
from tests.fuzz.watch import watched

_KEPT = 200
"""Accepted inputs to go on from."""


def fuzz(target: Target, runs: int, random: Random, folder: Path) -> dict[str, bytes]:
    """Try ``runs`` inputs; by what was wrong, an input that showed it."""
    seeds = [*target.seeds(), *found().get(target.name, {}).values()]
    pool = list(seeds)
    broken: dict[str, bytes] = {}
    for number in range(runs):
        data = pool[number] if number < len(seeds) else mutated(target, random.choice(pool), seeds, random)
        try:
            with watched():
                accepted = accepts(target, data, folder)
        except (Finding, TookTooLong):
            broken.setdefault(str(complaint(target, data, folder)), data)
            continue
        if accepted and len(pool) < len(seeds) + _KEPT:
            pool.append(data)
    return broken
