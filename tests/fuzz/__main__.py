"""``python -m tests.fuzz``: fuzz a target for as long as one likes, look at an input, keep one.

::

    python -m tests.fuzz --list
    python -m tests.fuzz --target checkpoint --runs 1000000              guided by coverage, if atheris is installed
    python -m tests.fuzz --target checkpoint --runs 100000 --plain       by the mutator of the tests alone
    python -m tests.fuzz --target checkpoint --look crash-1f2e           what it does with this file, made short
    python -m tests.fuzz --target checkpoint --keep crash-1f2e --name "a scope of text"
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory


def main() -> int:
    """Do what the arguments say; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the names of all targets")
    parser.add_argument("--target", help="which one")
    parser.add_argument("--runs", type=int, default=100_000, help="inputs to try")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without coverage")
    parser.add_argument("--artifacts", type=Path, default=Path(), help="folder for inputs that broke a promise")
    parser.add_argument("--look", type=Path, help="give this file to the target, and make it short")
    parser.add_argument("--keep", type=Path, help="add this file, made short, to what every test run tries")
    parser.add_argument("--name", help="what is wrong with it, for --keep")
    given = parser.parse_args()
    guided = not (given.plain or given.list or given.look or given.keep)
    if guided:
        if find_spec("atheris") is None:
            parser.error("atheris is not installed (pip install --require-hashes -r requirements-deep.txt); or --plain")
        from tests.fuzz.guided import run

        if given.target is None:
            parser.error("--target is missing; --list names them")
        run(given.target, given.runs, given.seed, given.artifacts)

    from tests.fuzz import catalogue
    from tests.fuzz.minimise import complaint, minimised

    if given.list or given.target not in catalogue.targets():
        print(*catalogue.targets(), sep="\n")
        return 0 if given.list else 2
    target = catalogue.targets()[given.target]
    with TemporaryDirectory(prefix="fuzz-") as scratch:
        folder = Path(scratch)
        if given.look or given.keep:
            data = minimised(target, (given.look or given.keep).read_bytes(), folder)
            print(complaint(target, data, folder) or "no promise is broken", repr(data), sep="\n")
            if given.keep:
                catalogue.keep(target.name, given.name or parser.error("--keep wants a --name"), data)
            return 0
        from tests.fuzz.plain import fuzz

        broken = fuzz(target, given.runs, Random(given.seed), folder)
        for said, data in broken.items():
            short = minimised(target, data, folder)
            print(said, repr(short), sep="\n")
        return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
