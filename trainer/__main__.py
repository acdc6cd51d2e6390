"""``python -m trainer``: the whole experiment, its preparation alone, and the worker that launchers start."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ckptstore.errors import CkptStoreError, UsageError
from trainer.errors import of_system

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if sys.platform == "win32":
        print(
            "trainer: Windows is not supported, because workers need process groups and pipes of POSIX", file=sys.stderr
        )
        return UsageError.exit_code
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return command(options)
    except (CkptStoreError, OSError) as error:
        known = of_system(error, options.name) if isinstance(error, OSError) else error
        print(f"trainer: {known}", file=sys.stderr)
        return known.exit_code
    except KeyboardInterrupt:
        print("trainer: interrupted; no worker is left, and what was made is kept", file=sys.stderr)
        return INTERRUPTED


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Two workers, a lost host, one root.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    lifecycle = commands.add_parser(
        "lifecycle",
        help="run the whole experiment and report on it",
        description="Train, lose a host in the middle of an update, replace it, replay to the same root, continue, "
        "evaluate, report, pack evidence. Exit code 0 only if everything went as planned.",
    )
    _prepared_options(lifecycle)
    lifecycle.add_argument(
        "--out",
        type=Path,
        default=Path("out/lifecycle"),
        metavar="DIR",
        help="folder for everything; if it is not empty, DIR-2, DIR-3 and so on (default: %(default)s)",
    )
    lifecycle.add_argument("--operator", metavar="URL", help="the operator's store (default: a folder of the run)")
    lifecycle.add_argument(
        "--sabotage", action="store_true", help="flip one bit after the restore; the run has to fail"
    )
    lifecycle.set_defaults(name="lifecycle", command=_lifecycle)

    prepare = commands.add_parser(
        "prepare",
        help="freeze plan, inputs and sources and print the prepared identity",
        description="Write the folders plan, inputs and sources, store them as trees, and print their digests.",
    )
    _prepared_options(prepare)
    prepare.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the three folders")
    prepare.add_argument("--store", metavar="URL", help="store for the trees (default: DIR/store)")
    prepare.set_defaults(name="prepare", command=_prepare)

    worker = commands.add_parser(
        "worker",
        help="be one worker of a group (for launchers)",
        description="Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, and carry out orders, "
        "one JSON object a line, from standard input or a file.",
    )
    worker.add_argument("--host", type=Path, required=True, metavar="DIR", help="folder with plan, inputs and store")
    worker.add_argument("--identity", required=True, metavar="DIGEST", help="the prepared identity")
    worker.add_argument("--generation", type=int, default=0, metavar="N", help="number of this group")
    worker.add_argument(
        "--area", type=Path, metavar="DIR", help="folder of the run, of which only --host may be touched"
    )
    worker.add_argument("--allow", type=Path, action="append", default=[], metavar="DIR", help="or this; repeatable")
    worker.add_argument("--pipe", type=int, metavar="FD", help="descriptor that events are written to, beside the file")
    worker.add_argument("--heartbeat", type=float, default=1.0, metavar="SECONDS", help="between two signs of life")
    worker.add_argument("--orders", type=Path, metavar="FILE", help="orders from a file instead of standard input")
    worker.set_defaults(name="worker", command=_worker)
    return parser


def _prepared_options(parser: argparse.ArgumentParser) -> None:
    from trainer.compute.numerics import PROFILES as KERNELS
    from trainer.preparation.plan import COMPUTE, KILL, STOP
    from trainer.preparation.planning import PROFILES

    parser.add_argument("--profile", choices=sorted(PROFILES), default="demo", help="what is trained (default: demo)")
    parser.add_argument("--mode", choices=(KILL, STOP), default=KILL, help="how the host is lost (default: kill)")
    parser.add_argument(
        "--compute", choices=COMPUTE, help="compute dtype (default: bfloat16 where the CPU has kernels)"
    )
    parser.add_argument("--kernels", choices=sorted(KERNELS), default="native", help="CPU kernels (default: native)")


def _lifecycle(options: argparse.Namespace) -> int:
    from trainer.lifecycle.experiment import run_experiment
    from trainer.lifecycle.record import Settings
    from trainer.preparation.planning import profile

    settings = Settings(
        out=fresh_folder(options.out),
        profile=profile(options.profile),
        operator=options.operator,
        mode=options.mode,
        compute=options.compute,
        kernels=options.kernels,
        sabotage=options.sabotage,
    )
    run_experiment(settings, sys.stdout)
    return 0


def _prepare(options: argparse.Namespace) -> int:
    import ckptstore
    from trainer.preparation.planning import profile
    from trainer.preparation.prepare import choose_compute, prepare

    compute = options.compute or choose_compute(options.kernels)
    made = prepare(profile(options.profile), options.out, compute=compute, kernels=options.kernels, mode=options.mode)
    store = ckptstore.open(options.store or str(options.out / "store"), create=True)
    trees = [store.put_tree(folder) for folder in (made.plan_dir, made.inputs_dir, made.sources_dir)]
    identity = store.put_preparation(*trees)
    for name, digest in zip(("plan", "inputs", "sources"), trees, strict=True):
        print(f"{name:<9} {digest}")
    print(f"{'prepared':<9} {identity}")
    return 0


def _worker(options: argparse.Namespace) -> NoReturn:
    from ckptstore import Digest
    from trainer.workers import worker

    source = options.orders.open("rb") if options.orders else sys.stdin.buffer
    worker.run(
        worker.Options(
            host=options.host.resolve(),
            identity=Digest.parse(options.identity),
            generation=options.generation,
            area=options.area,
            allow=tuple(options.allow),
            pipe=options.pipe,
            heartbeat=options.heartbeat,
        ),
        source,
    )


def fresh_folder(wanted: Path) -> Path:
    """``wanted`` if it is absent or empty, else the first free ``wanted-2``, ``wanted-3``; absolute, and made."""
    wanted = Path(os.path.abspath(wanted))
    number, folder = 1, wanted
    while os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
