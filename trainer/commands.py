"""The trainer's commands: the experiment, its preparation alone, its S3 server, and what launchers start on hosts."""

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
from trainer.interruption import interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if sys.platform == "win32":
        print(
            "trainer: Windows is not supported, because workers need process groups and pipes of POSIX", file=sys.stderr
        )
        return UsageError.exit_code
    signal.signal(signal.SIGTERM, _interrupt)
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (CkptStoreError, OSError) as error:
        known = of_system(error, options.name) if isinstance(error, OSError) else error
        print(f"trainer: {known}", file=sys.stderr)
        return known.exit_code
    except KeyboardInterrupt:
        return interrupted()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    from trainer.hosts.backend import KINDS

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
    lifecycle.add_argument(
        "--operator",
        metavar="URL",
        help="the operator's store: a directory or s3://bucket/prefix, or s3 for a bucket of an S3 server that the run "
        "starts itself (default: a folder of the run)",
    )
    lifecycle.add_argument(
        "--sabotage", action="store_true", help="flip one bit after the restore; the run has to fail"
    )
    lifecycle.add_argument(
        "--allow-numerics-drift",
        action="store_true",
        help="go on where a host computes otherwise than the one that made a checkpoint; the next checkpoint tells in "
        "what, and equality is claimed no more",
    )
    lifecycle.add_argument(
        "--hosts",
        choices=KINDS,
        help="what a host is: namespaces of this machine, process groups of it, or machines that ssh reaches "
        "(default: namespaces where this machine has them, else process groups)",
    )
    lifecycle.add_argument(
        "--machines", type=Path, metavar="FILE", help="how machines are reached, for --hosts ssh (docs/launchers.md)"
    )
    lifecycle.add_argument("--fresh", action="store_true", help="start a new interpreter for each worker")
    lifecycle.set_defaults(name="lifecycle", command=_lifecycle)

    run = commands.add_parser(
        "run",
        help="train a plan to its end, whatever hosts are lost on the way",
        description="Train without a scripted step: a lost or stalled worker is noticed, a spare host takes its shard "
        "over, the newest whole checkpoint is restored and training goes on. If this command itself is ended, the same "
        "command goes on from where it was. Exit code 0 once the last checkpoint is committed; 5 if no spare host is "
        "left, with everything kept.",
    )
    _numerics_options(run)
    run.add_argument(
        "--out", type=Path, default=Path("out/run"), metavar="DIR", help="folder for everything (default: %(default)s)"
    )
    run.add_argument(
        "--spares", type=int, default=1, metavar="N", help="spare hosts for the whole run (default: %(default)s)"
    )
    run.add_argument("--every", type=int, metavar="K", help="updates between commits (default: as in the plan)")
    run.add_argument(
        "--operator", metavar="URL", help="the operator's store: a directory or s3://bucket/prefix (default: in DIR)"
    )
    run.add_argument(
        "--stop-for-commits", action="store_true", help="train on only once a checkpoint is committed (same roots)"
    )
    run.set_defaults(name="run", command=_run)

    prepare = commands.add_parser(
        "prepare",
        help="freeze plan, inputs and sources and print the prepared identity",
        description="Write the folders plan, inputs and sources, store them as trees, and print their digests.",
    )
    _prepared_options(prepare)
    prepare.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the three folders")
    prepare.add_argument("--store", metavar="URL", help="store for the trees (default: DIR/store)")
    prepare.set_defaults(name="prepare", command=_prepare)

    _repartition_parser(commands)
    _replay_parser(commands)

    export = commands.add_parser(
        "export",
        help="write a checkpoint of a run as a Hugging Face directory",
        description="Write config.json, the tokenizer, one safetensors file for each shard and their index. Each part "
        "is written by a process of its own; with --shard only one of them, from any store that has it.",
    )
    export.add_argument("root", help="digest of the checkpoint, its beginning, or a ref")
    export.add_argument("--store", required=True, metavar="URL", help="the store that has it")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty folder")
    export.add_argument("--shard", type=int, metavar="N", help="write the part of this shard and nothing else")
    export.set_defaults(name="export", command=_export)

    orders = commands.add_parser(
        "orders",
        help="write the orders of workers that another launcher starts",
        description="Begin a leg of a prepared run, from the head of a ref to a commit, write the workers' orders "
        "beside the plan, and print what a shell needs to run it with torchrun.",
    )
    orders.add_argument("folder", type=Path, metavar="DIR", help="the prepared folder, which all workers see")
    orders.add_argument("--last", type=int, metavar="N", help="last update (default: the plan's next commit)")
    orders.add_argument("--ref", default="main", metavar="NAME", help="ref in DIR/store (default: %(default)s)")
    orders.set_defaults(name="orders", command=_orders)

    commit = commands.add_parser(
        "commit",
        help="commit what workers of another launcher have saved",
        description="Join the shards of the leg that was begun last, and print the root.",
    )
    commit.add_argument("folder", type=Path, metavar="DIR", help="the prepared folder")
    commit.set_defaults(name="commit", command=_commit)

    server = commands.add_parser(
        "s3server",
        help="start the S3 server that a run left behind",
        description="Serve the data that a run with --operator s3 kept, under the same address and with the same keys, "
        "and print what a shell needs to reach it. Ctrl-C ends it.",
    )
    server.add_argument("folder", type=Path, metavar="DIR", help="the folder s3 of the run")
    server.set_defaults(name="s3server", command=_s3server)

    pull = commands.add_parser(
        "pull",
        help="pull a host's shard of checkpoints (for launchers)",
        description="Fetch one shard of checkpoints from the operator's store into the store of a host.",
    )
    pull.add_argument("--host", type=Path, required=True, metavar="DIR", help="folder with the host's store")
    pull.add_argument("--name", required=True, help="of the file of events")
    pull.add_argument("--operator", required=True, metavar="URL", help="the operator's store")
    pull.add_argument("--shard", type=int, required=True, metavar="N", help="the shard that the host owns")
    pull.add_argument("--root", action="append", required=True, metavar="DIGEST", help="a checkpoint; repeatable")
    pull.add_argument("--area", type=Path, required=True, metavar="DIR", help="folder of the run")
    pull.add_argument("--allow", type=Path, action="append", default=[], metavar="DIR", help="what else of it is used")
    pull.add_argument("--pipe", type=int, required=True, metavar="FD", help="descriptor that events are written to")
    pull.add_argument("--try-to-write", action="store_true", help="find out that the operator's store refuses it")
    pull.set_defaults(name="pull", command=_pull)

    agent = commands.add_parser(
        "agent",
        help="start and end the workers of a host (for launchers)",
        description="Speak JSON lines with a controller over standard input and output; with the controller, all ends.",
    )
    agent.add_argument("--host", type=Path, required=True, metavar="DIR", help="the host's folder")
    agent.add_argument("--heartbeat", type=float, default=1.0, metavar="SECONDS", help="between two signs of life")
    agent.add_argument("--bare", action="store_true", help="import no torch: each worker is a new interpreter")
    agent.set_defaults(name="agent", command=_agent)

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
    worker.add_argument(
        "--cuts",
        type=_cuts,
        metavar="LAYERS",
        help="layers at which the second and each further shard begins, as in 1,3, or none for one shard; for a group "
        "that restores a checkpoint of these shards (default: as the plan says)",
    )
    worker.set_defaults(name="worker", command=_worker)
    return parser


def _repartition_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    repartition = commands.add_parser(
        "repartition",
        help="give a checkpoint to another number of workers",
        description="Make the checkpoint of the same state for other shards, and let the ref name it. Chunks of "
        "256 KiB or more stay as they lie; only packs and documents are written, and the state root stays. Its "
        "generators are those of the parent's shards in turn, which it says among its deviations.",
    )
    repartition.add_argument("root", metavar="ROOT", help="a root, a prefix of one, or a ref")
    repartition.add_argument(
        "--cuts",
        type=_cuts,
        required=True,
        metavar="LAYERS",
        help="layers at which the second and each further shard begins, as in 1,3, or none for one shard",
    )
    repartition.add_argument("--store", metavar="URL", help="the store that holds it (default: CKPT_STORE)")
    repartition.add_argument(
        "--ref", metavar="NAME", help="the ref that is moved, or made (default: the one that names the checkpoint)"
    )
    repartition.set_defaults(name="repartition", command=_repartition)


def _cuts(text: str) -> tuple[int, ...]:
    from trainer.compute.config import parse_cuts

    try:
        return parse_cuts(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _replay_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="make the updates between two checkpoints again and compare",
        description="Make the updates between two checkpoints again, in fresh processes and in a folder of its own, "
        "from the plan, inputs and sources that the checkpoints name, and compare every update and every root on the "
        "way, bit for bit. It runs the code that is stored with the checkpoints. Exit codes: 0 equal, and a receipt is "
        "kept in the store; 1 different, the first update and tensor are named; 5 this machine computes otherwise; the "
        "others are those of ckpt.",
    )
    replay.add_argument("begin", metavar="FROM", help="a root, a prefix of one, or a ref; start: the starting weights")
    replay.add_argument("end", metavar="TO", help="a descendant of it; checkpoints in between are compared too")
    replay.add_argument("--store", metavar="URL", help="the store that holds them (default: CKPT_STORE)")
    replay.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for everything that is made; if it is not empty, DIR-2, DIR-3 and so on (default: a temporary "
        "one, kept only if something differs)",
    )
    replay.add_argument(
        "--anyway", action="store_true", help="go on where the canary says that equality is not to be expected"
    )
    replay.set_defaults(name="replay", command=_replay)


def _prepared_options(parser: argparse.ArgumentParser) -> None:
    from trainer.preparation.plan import KILL, SILENT, STOP

    parser.add_argument(
        "--mode", choices=(KILL, STOP, SILENT), default=KILL, help="how the host is lost (default: kill)"
    )
    _numerics_options(parser)


def _numerics_options(parser: argparse.ArgumentParser) -> None:
    from trainer.compute.dropout import MASKS
    from trainer.compute.numerics import PROFILES as KERNELS
    from trainer.preparation.plan import COMPUTE
    from trainer.preparation.planning import PROFILES

    parser.add_argument("--profile", choices=sorted(PROFILES), default="demo", help="what is trained (default: demo)")
    parser.add_argument(
        "--start",
        type=Path,
        metavar="PATH",
        help="model to train in place of the profile's: a GGUF file, or a Hugging Face directory of the Llama shape "
        "(config.json, safetensors, tokenizer.json, chat template)",
    )
    parser.add_argument(
        "--compute", choices=COMPUTE, help="compute dtype (default: bfloat16 where the CPU has kernels)"
    )
    parser.add_argument("--kernels", choices=sorted(KERNELS), default="native", help="CPU kernels (default: native)")
    parser.add_argument(
        "--dropout",
        choices=MASKS,
        help="train with dropout of 0.1, its masks from seeds derived of update, microbatch and layer, or from the "
        "workers' global generators (default: none)",
    )


def _lifecycle(options: argparse.Namespace) -> int:
    from trainer.lifecycle.access import check

    check(options.operator)  # before anything is made for the run
    from trainer.lifecycle.experiment import run_experiment
    from trainer.lifecycle.record import Settings
    from trainer.preparation.planning import profile, with_dropout

    settings = Settings(
        out=fresh_folder(options.out),
        profile=with_dropout(profile(options.profile), options.dropout),
        operator=options.operator,
        mode=options.mode,
        compute=options.compute,
        kernels=options.kernels,
        sabotage=options.sabotage,
        drift=options.allow_numerics_drift,
        start=options.start,
        hosts=options.hosts,
        machines=options.machines,
        fresh=options.fresh,
    )
    run_experiment(settings, sys.stdout)
    return 0


def _run(options: argparse.Namespace) -> int:
    from trainer.preparation.planning import profile, with_dropout
    from trainer.recovery.settings import RunSettings
    from trainer.recovery.training import check_operator, run_training

    settings = RunSettings(
        out=Path(os.path.abspath(options.out)),
        profile=with_dropout(profile(options.profile), options.dropout),
        spares=options.spares,
        every=options.every,
        operator=options.operator,
        compute=options.compute,
        kernels=options.kernels,
        behind=not options.stop_for_commits,
        start=options.start,
    )
    check_operator(options.operator)  # before anything is made for the run
    run_training(settings, sys.stdout)
    return 0


def _prepare(options: argparse.Namespace) -> int:
    import ckptstore
    from trainer.preparation.planning import profile, with_dropout
    from trainer.preparation.prepare import choose_compute, prepare

    if options.store is not None:
        ckptstore.open(options.store, create=True)  # a mistake in it is told before anything is made
    compute = options.compute or choose_compute(options.kernels)
    wanted = with_dropout(profile(options.profile), options.dropout)
    made = prepare(
        wanted,
        options.out,
        compute=compute,
        kernels=options.kernels,
        mode=options.mode,
        start=options.start,
    )
    store = ckptstore.open(str(options.out / "store") if options.store is None else options.store, create=True)
    trees = [store.put_tree(folder) for folder in (made.plan_dir, made.inputs_dir, made.sources_dir)]
    identity = store.put_preparation(*trees)
    for name, digest in zip(("plan", "inputs", "sources"), trees, strict=True):
        print(f"{name:<9} {digest}")
    print(f"{'prepared':<9} {identity}")
    return 0


def _repartition(options: argparse.Namespace) -> int:
    from trainer.repartition import repartition

    repartition(options.root, options.cuts, options.store, options.ref, sys.stdout)
    return 0


def _replay(options: argparse.Namespace) -> int:
    from trainer.replay.command import replay

    out = None if options.out is None else fresh_folder(options.out)
    return replay(options.begin, options.end, options.store, out, sys.stdout, anyway=options.anyway)


def _export(options: argparse.Namespace) -> int:
    import ckptstore
    from trainer.export import export_model, export_part

    store = ckptstore.open(options.store)
    root = store.resolve(options.root)
    if options.shard is not None:
        print(export_part(store, root, options.shard, options.out))
        return 0
    done = export_model(store, root, options.out)
    for name, size in done.files.items():
        print(f"{size:>15,}  {name}")
    print(f"{done.parameters:,} parameters of {root} in {done.directory}")
    return 0


def _orders(options: argparse.Namespace) -> int:
    from trainer.lifecycle import leg

    begun = leg.begin(options.folder, options.last, options.ref)
    origin = "the starting weights" if begun.root is None else str(begun.root)
    print(f"# updates {begun.first} to {begun.last} from {origin}")
    for line in begun.shell():
        print(line)
    return 0


def _commit(options: argparse.Namespace) -> int:
    from trainer.lifecycle import leg

    print(leg.commit(options.folder))
    return 0


def _s3server(options: argparse.Namespace) -> int:
    from trainer.lifecycle.s3folder import serve

    serve(options.folder, sys.stdout)
    return 0


def _pull(options: argparse.Namespace) -> int:
    from ckptstore import Digest
    from trainer.workers import pull

    return pull.run(
        pull.Options(
            name=options.name,
            host=options.host.resolve(),
            operator=options.operator,
            shard=options.shard,
            roots=[Digest.parse(root) for root in options.root],
            area=options.area,
            allow=tuple(options.allow),
            pipe=options.pipe,
            try_to_write=options.try_to_write,
        )
    )


def _agent(options: argparse.Namespace) -> NoReturn:
    from trainer.hosts import agent

    os.chdir(options.host)
    agent.run(options.heartbeat, preload=not options.bare)


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
            cuts=options.cuts,
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
