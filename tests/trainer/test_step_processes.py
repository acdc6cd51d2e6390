"""The same updates and evaluations by real processes over gloo. Run as a script, this file is one such worker."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CUTS = {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 3)}  # by number of workers
UPDATES = 3


def work(group: Any, compute: str) -> dict[str, Any]:
    """What one worker does and finds: updates, tensors and an evaluation."""
    from trainer.compute.config import PRESETS, Decoding, Recipe, partition
    from trainer.compute.generate import Document, greedy, response_losses
    from trainer.compute.model import Shard, initialise
    from trainer.compute.step import Step, build_optimizer

    cfg, recipe = PRESETS["demo"], Recipe(max_norm=0.5, warmup=2)
    owners = partition(cfg, CUTS[group.world])
    own = owners[group.rank]
    shard = Shard(cfg, own.first, own.last, own.head, compute)
    initialise(shard, seed=3, std=0.1)
    step = Step(shard, build_optimizer(shard, recipe), group, owners, recipe)
    results = [step.run(update, batch(update)) for update in range(1, UPDATES + 1)]
    documents = [Document(tuple(range(10, 40 + i)), 20) for i in range(3)]
    answers = greedy(
        shard, group, [d.ids[:20] for d in documents], decoding=Decoding(8, 4, 32), cap=5, end=258, step=UPDATES
    )
    return {
        "exact": [result.exact for result in results],
        "bytes": [(result.sent_bytes, result.received_bytes) for result in results],
        "tensors": digests(shard, step.optimizer),
        "losses": [loss.hex() for loss in response_losses(shard, group, documents, step=UPDATES)],
        "answers": [(list(answer.ids), answer.ended, answer.margin.hex()) for answer in answers],
    }


def batch(update: int) -> Any:
    from trainer.compute.batch import Batch, Microbatch

    def row(r: int, length: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        ids = tuple((update + 31 * r + 17 * t + t * t) % 260 for t in range(length))
        return ids, tuple(0.25 * ((r + t) % 7) if length // 3 < t < length - r else 0.0 for t in range(length))

    def micro(rows: int, length: int) -> Microbatch:
        ids, weights = zip(*(row(r, length) for r in range(rows)), strict=True)
        return Microbatch(ids, weights)

    return Batch((micro(4, 33), micro(4, 17), micro(2, 29)))


def digests(shard: Any, optimizer: Any) -> dict[str, str]:
    from trainer.compute.transport import raw_bytes

    found = {}
    for name, parameter in shard.named_parameters():
        for role, tensor in (("weight", parameter), *sorted(optimizer.state[parameter].items())):
            found[f"{role} {name}"] = hashlib.sha256(raw_bytes(tensor)).hexdigest()
    return found


def with_dropout(group: Any, recompute: bool) -> dict[str, Any]:
    """Two updates with dropout from the global generator on both stages; tensors and generator afterwards."""
    import torch
    from torch.nn import functional as F

    from trainer.compute.config import Config, Recipe, partition
    from trainer.compute.model import Shard, initialise
    from trainer.compute.step import Step, build_optimizer
    from trainer.compute.transport import raw_bytes

    class WithDropout(Shard):
        def layer(self, layer: Any, x: Any, places: Any) -> Any:
            return F.dropout(super().layer(layer, x, places), 0.1)

    cfg, recipe = Config(vocab=260, hidden=64, intermediate=128, layers=4, heads=4, kv_heads=2), Recipe(max_norm=0.5)
    owners = partition(cfg, CUTS[group.world])
    own = owners[group.rank]
    shard = WithDropout(cfg, own.first, own.last, own.head)
    initialise(shard, seed=3, std=0.1)
    torch.manual_seed(100 + group.rank)
    step = Step(shard, build_optimizer(shard, recipe), group, owners, recipe, recompute=recompute)
    results = [step.run(update, batch(update)).exact for update in (1, 2)]
    return {
        "exact": results,
        "tensors": digests(shard, step.optimizer),
        "rng": hashlib.sha256(raw_bytes(torch.get_rng_state())).hexdigest(),
    }


def start(mode: str, compute: str, world: int = 2) -> list[subprocess.Popen[str]]:
    """The workers of one group on this machine."""
    from trainer.compute import numerics

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        **numerics.env_for("native"),
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return [
        subprocess.Popen(
            [sys.executable, __file__, mode, compute],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(workers: Sequence[subprocess.Popen[str]]) -> list[tuple[int, dict[str, Any], str]]:
    """Exit status, report and error output of each worker, none of which outlives this call."""
    found = []
    try:
        for worker in workers:
            out, errors = worker.communicate(timeout=90)
            found.append((worker.returncode, json.loads(out) if out else {}, errors))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return found


def test_two_processes_over_gloo_do_what_one_process_does() -> None:
    from trainer.compute import numerics

    compute = numerics.compute_dtype()
    found = finish(start("train", compute) + start("alone", compute, world=1))
    assert [status for status, _, _ in found] == [0, 0, 0], [errors for _, _, errors in found]
    zero, one, alone = (report for _, report, _ in found)
    for name in ("exact", "losses", "answers"):
        assert zero[name] == one[name] == alone[name] == alone["threads"][0][name] == alone["threads"][1][name]
    assert {**zero["tensors"], **one["tensors"]} == alone["tensors"]
    assert [zero["tensors"], one["tensors"]] == [thread["tensors"] for thread in alone["threads"]]
    assert not zero["tensors"].keys() & one["tensors"].keys()
    assert zero["bytes"] == one["bytes"] == alone["threads"][0]["bytes"]
    assert alone["bytes"] == [[0, 0]] * UPDATES
    # B017 on two stages, each with its own generator.
    for report in (zero, one):
        assert report["recomputed"] == report["kept"]
    assert zero["kept"]["rng"] != one["kept"]["rng"]


@pytest.mark.deep
@pytest.mark.parametrize("world", [3, 4])
def test_more_processes_do_the_same(world: int) -> None:
    found = finish(start("work", "float32", world) + start("work", "float32", 1))
    assert [status for status, _, _ in found] == [0] * (world + 1), [errors for _, _, errors in found]
    *reports, alone = (report for _, report, _ in found)
    for name in ("exact", "losses", "answers"):
        assert all(report[name] == alone[name] for report in reports)
    assert {name: digest for report in reports for name, digest in report["tensors"].items()} == alone["tensors"]


def test_a_worker_that_is_killed_is_lost_to_its_peer_before_any_weight_changes() -> None:
    (status0, zero, errors0), (status1, one, _) = finish(start("die", "float32"))
    assert status1 == -9
    assert one == {}
    assert status0 == 17, errors0
    assert zero["error"] == "PeerLostError"
    assert "shard 1, seen from shard 0" in zero["message"]
    assert zero["updates"] == 1
    assert zero["steps"] == [1]


def train(compute: str) -> None:
    from trainer.compute.transport import connect

    group = connect(timeout=60)
    report = work(group, compute)
    report |= {"recomputed": with_dropout(group, True), "kept": with_dropout(group, False)}
    print(json.dumps(report), flush=True)
    group.close()


def only_work(compute: str) -> None:
    from trainer.compute.transport import connect

    group = connect(timeout=60)
    print(json.dumps(work(group, compute)), flush=True)
    group.close()


def alone(compute: str) -> None:
    """One worker for the whole model, and two shards in threads of one process."""
    from concurrent.futures import ThreadPoolExecutor

    from trainer.compute.transport import connect, local_groups

    report = work(connect(), compute)
    with ThreadPoolExecutor(2) as pool:
        report["threads"] = list(pool.map(lambda group: work(group, compute), local_groups(2)))
    print(json.dumps(report), flush=True)


def die() -> None:
    """Rank 1 is killed in update 2 after the first microbatch's forward; rank 0 reports what it saw."""
    import signal

    from trainer.compute.config import PRESETS, Recipe, partition
    from trainer.compute.model import Shard, initialise
    from trainer.compute.step import Step, build_optimizer
    from trainer.compute.transport import connect
    from trainer.errors import PeerLostError

    def on_op(update: int, micro: int, op: str) -> None:
        if (group.rank, update, micro, op) == (1, 2, 0, "forward"):
            os.kill(os.getpid(), signal.SIGKILL)

    group = connect(timeout=60)
    cfg, recipe = PRESETS["demo"], Recipe()
    owners = partition(cfg, CUTS[group.world])
    own = owners[group.rank]
    shard = Shard(cfg, own.first, own.last, own.head)
    initialise(shard, seed=3)
    optimizer = build_optimizer(shard, recipe)
    step = Step(shard, optimizer, group, owners, recipe, on_op=on_op)
    made = 0
    try:
        for update in (1, 2):
            step.run(update, batch(update))
            made = update
    except PeerLostError as error:
        steps = sorted({int(state["step"]) for state in optimizer.state.values()})
        report = {"error": type(error).__name__, "message": str(error), "updates": made, "steps": steps}
        print(json.dumps(report), flush=True)
        os._exit(17)  # never run the destructors of a broken group


def main() -> None:
    from trainer.compute import numerics

    numerics.apply(profile="native")
    mode, compute = sys.argv[1:]
    if mode == "die":
        die()
    else:
        {"train": train, "alone": alone, "work": only_work}[mode](compute)


if __name__ == "__main__":
    main()
