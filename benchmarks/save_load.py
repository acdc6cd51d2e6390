"""Save, load and verify side by side with torch.save and safetensors, as ratios measured in one run.

``python benchmarks/save_load.py [--gb 1.0] [--small 5000] [--rounds 3]`` prints medians, and the ratio of
each to this store's save or load. Every save is followed by an fsync, for the peers too; loads are warm.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptstore


def synced(path: Path) -> None:
    """Make a file and its name durable, as a store does."""
    for target in (path, path.parent):
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def make_model(gigabytes: float, small: int) -> nn.Module:
    """A model of large tensors (``gigabytes``), or of ``small`` tensors of 4 KiB if that is given."""
    sizes = [1024] * small if small else [int(gigabytes * 1e9 / 4 / 24)] * 24
    return nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])


def one_round(model: nn.Module, folder: Path) -> dict[str, float]:
    """Seconds of each operation, once, in turn."""
    state = ckptstore.TrainingState(model=model)
    store = ckptstore.open(folder / "store", create=True)
    fresh: dict[str, torch.Tensor] = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def save() -> None:
        attempt = store.begin("main")
        store.commit(attempt, [store.save_shard(state, attempt, step=1)])

    def load(into: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
        for name, tensor in source.items():
            into[name].copy_(tensor)

    times = {"ckptstore save": timed(save)}
    root = store.resolve("main")
    times["ckptstore save, unchanged"] = timed(save)
    times["torch.save"] = timed(lambda: (torch.save(fresh, folder / "t.pt"), synced(folder / "t.pt")))
    times["safetensors save"] = timed(lambda: (save_file(fresh, folder / "s.st"), synced(folder / "s.st")))
    times["ckptstore load, verified and armed"] = timed(lambda: store.restore(root, state))
    times["torch.load"] = timed(lambda: load(fresh, torch.load(folder / "t.pt", weights_only=True)))
    times["safetensors load"] = timed(lambda: load(fresh, load_file(folder / "s.st")))
    times["ckptstore verify, from the disk"] = timed(lambda: store.verify(root))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state in 1e9 bytes")
    parser.add_argument("--small", type=int, default=0, help="instead: this many tensors of 4 KiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    model = make_model(options.gb, options.small)
    rounds = []
    for _ in range(options.rounds):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        rounds.append(one_round(model, folder))
        shutil.rmtree(folder)
    medians = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    for name, seconds in medians.items():
        base = medians["ckptstore load, verified and armed" if "load" in name else "ckptstore save"]
        print(f"{name:36} {seconds:8.3f} s   {seconds / base:6.2f} x")


if __name__ == "__main__":
    main()
