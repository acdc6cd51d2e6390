"""The driver that is guided by coverage: atheris (libFuzzer) over a target, in a process of its own.

The sources are instrumented while they are imported, so nothing of them may have been imported before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NoReturn

MEMORY_MB = 2048
HANG_SECONDS = 60
LONGEST = 4096
"""Bytes of an input: what is slow with long ones is what the bombs are for."""


def run(name: str, runs: int, seed: int, artifacts: Path) -> NoReturn:
    """Fuzz a target ``runs`` times and exit with 0, or with what libFuzzer says for a crash; its input is then
    in the folder ``artifacts``."""
    import atheris

    with atheris.instrument_imports(include=["ckptstore", "ckptstore_cli", "trainer"], enable_loader_override=False):
        from tests.fuzz.catalogue import found, targets
        from tests.fuzz.mutate import mutated
        from tests.fuzz.target import accepts

    target = targets()[name]
    seeds = [*target.seeds(), *found().get(name, {}).values()]
    with TemporaryDirectory(prefix="fuzz-") as scratch:
        corpus = Path(scratch, "corpus")
        corpus.mkdir()
        for number, data in enumerate(seeds):
            (corpus / f"{number:04d}").write_bytes(data)
        folder = Path(scratch, "work")
        folder.mkdir()

        def one(data: bytes) -> None:
            accepts(target, data, folder)

        def mutator(data: bytes, longest: int, number: int) -> bytes:
            random = Random(number)
            if random.random() < 0.4:
                return bytes(atheris.Mutate(data, longest))
            return mutated(target, data, seeds, random)[:longest]

        made: Callable[..., None] = atheris.Setup
        options = [
            f"-runs={runs}",
            f"-seed={seed}",
            f"-max_len={min(target.limit, LONGEST)}",
            f"-timeout={HANG_SECONDS}",
            f"-rss_limit_mb={MEMORY_MB}",
            f"-artifact_prefix={artifacts}/",
            "-print_final_stats=1",
            "-verbosity=0",
        ]
        made([sys.argv[0], *options, str(corpus)], one, custom_mutator=mutator)
        atheris.Fuzz()
    raise SystemExit(0)
