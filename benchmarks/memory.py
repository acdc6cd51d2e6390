"""How much memory each operation takes above the state that it works on, and whether that stays under the bound.

``python benchmarks/memory.py [--gib 4.0] [--small 2000] [--bound 256] [--folder DIR] [--json]`` makes a state of that
size (weights and both moments of AdamW: large tensors, and ``--small`` of 2 KiB that lie in packs) and saves it, loads
it, verifies it, pushes it to another directory and to an S3 server on the loopback, and pulls it back from there: each
in a process of its own, which is looked at by its peak of resident memory.

* *save*, *load*: the peak above what was resident right before, when the state and the libraries were there;
* *verify*, *push*, *pull*: the peak of the whole process of the command ``ckpt``, which never has the state.

Ends with 1 if one of them is over the bound (MiB), with 75 if the disk is too small. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ckptstore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the server is that of the lifecycle and the tests

MIB = 2**20
BUCKET = "benchmark"
SMALL_ITEMS = 512  # of 4 bytes, three times: weight and two moments
LARGE = 12
NO_ROOM = 75  # EX_TEMPFAIL

Figures = dict[str, Any]


# -- what is measured, each in a process of its own -------------------------------------------------------------------


def save(folder: str, size: int, small: int) -> Figures:
    """Save the state to a directory, and say its root."""
    import ckptstore

    state = training_state(size, small)
    store = ckptstore.open(folder, create=True)
    before = begin()
    attempt = store.begin("main")
    root = store.commit(attempt, [store.save_shard(state, attempt, step=1)])
    assert root == store.head("main")
    return ended(before)


def load(folder: str, size: int, small: int) -> Figures:
    """Load it into a state of other values."""
    import ckptstore

    state = training_state(size, small, first=1)
    store = ckptstore.open(folder)
    root = store.resolve("main")
    before = begin()
    restored = store.restore(root, state)
    assert restored.bytes_read > size * 0.99
    return ended(before)


def verify(folder: str) -> Figures:
    """Read it all back from the disk."""
    return command("verify", "--store", folder, "main")


def push(folder: str, url: str) -> Figures:
    """Push it to another store, with a readback of every byte."""
    made(url)
    return command("push", "--store", folder, "main", url, "--ref", "main")


def pull(url: str, folder: str) -> Figures:
    """Pull it from another store into a directory, with a readback of every byte."""
    made(folder)
    return command("pull", "--store", folder, "main", url, "--ref", "main")


def made(url: str) -> None:
    """Make an empty store."""
    import ckptstore

    ckptstore.open(url, create=True)


def command(*arguments: str) -> Figures:
    """Run ``ckpt`` in this process."""
    from ckptstore_cli.main import main as ckpt

    begin()
    with redirect_stdout(sys.stderr):
        try:
            ckpt(arguments)
        except SystemExit as done:
            if done.code:
                raise
    return ended(0)


WORK: dict[str, Callable[..., Figures]] = {work.__name__: work for work in (save, load, verify, push, pull)}


def training_state(size: int, small: int, first: int = 0) -> ckptstore.TrainingState:
    """A model and AdamW with ``size`` bytes in all, without a chunk that occurs twice; ``first`` shifts all values."""
    import torch
    from torch import nn

    import ckptstore

    large = (size - 3 * small * SMALL_ITEMS * 4) // (3 * LARGE * 4)
    if large < 1:
        raise SystemExit(f"a state has at least {3 * small * SMALL_ITEMS * 4 // MIB + 1} MiB")
    lengths = [large] * LARGE + [SMALL_ITEMS] * small
    following = first

    def values(length: int) -> torch.Tensor:
        nonlocal following
        following += length
        return torch.arange(following - length, following, dtype=torch.int32).view(torch.float32)

    model = nn.ParameterList([nn.Parameter(values(length)) for length in lengths])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter, length in zip(model, lengths, strict=True):
        moments = {"exp_avg": values(length), "exp_avg_sq": values(length)}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return ckptstore.TrainingState(model=model, optimizer=optimizer)


def begin() -> int:
    """Bytes that are resident now; the peak is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def ended(before: int) -> Figures:
    """The peak since :func:`begin`, and how far it lies above ``before``."""
    peak = resident("VmHWM")
    return {"peak": peak, "above": peak - before}


def resident(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


# -- all of them ------------------------------------------------------------------------------------------------------


def measured(name: str, *arguments: object) -> Figures:
    """The figures of one piece of work in a new process, with its seconds."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--work", json.dumps([name, *arguments])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: Figures = json.loads(done.stdout)
    return {"name": name, "seconds": time.perf_counter() - start, **figures}


def all_of_them(folder: Path, size: int, small: int) -> list[Figures]:
    """Every operation, one after the other; no more than two copies of the state are on disk at a time."""
    from trainer.lifecycle.s3server import S3Server

    store, copy = folder / "store", folder / "copy"
    found = [measured(name, str(store), size, small) for name in ("save", "load")]
    found.append(measured("verify", str(store)))
    found.append(measured("push", str(store), str(copy)) | {"name": "push to a directory"})
    shutil.rmtree(copy)
    with S3Server(folder / "server") as server:
        server.create_bucket(BUCKET)
        os.environ.update(server.environment())
        url = f"s3://{BUCKET}/memory?addressing=path"
        found.append(measured("push", str(store), url) | {"name": "push to S3"})
        shutil.rmtree(store)
        found.append(measured("pull", url, str(copy)) | {"name": "pull from S3"})
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state")
    parser.add_argument(
        "--small", type=int, default=2_000, help="number of small tensors, three times that with moments"
    )
    parser.add_argument("--bound", type=int, default=256, help="MiB above the state")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one object a line")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        name, *arguments = json.loads(options.work)
        print(json.dumps(WORK[name](*arguments)))
        return 0
    size = int(options.gib * 2**30)
    folder = Path(tempfile.mkdtemp(prefix="memory-", dir=options.folder))
    try:
        free = shutil.disk_usage(folder).free
        if free < 2.5 * size:
            print(f"{free / MIB:,.0f} MiB free in {folder}, {2.5 * size / MIB:,.0f} are needed", file=sys.stderr)
            return NO_ROOM
        found = all_of_them(folder, size, options.small)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        for figures in found:
            print(json.dumps(figures))
    else:
        print(f"{'':20} {'above state, MiB':>17} {'whole process, MiB':>19} {'seconds':>8}")
        for figures in found:
            above, peak = figures["above"] / MIB, figures["peak"] / MIB
            over = "  over the bound" if above >= options.bound else ""
            print(f"{figures['name']:20} {above:17,.0f} {peak:19,.0f} {figures['seconds']:8.1f}{over}")
    return int(any(figures["above"] >= options.bound * MIB for figures in found))


if __name__ == "__main__":
    sys.exit(main())
