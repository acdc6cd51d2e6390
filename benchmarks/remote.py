"""Push to a bucket with a readback of every byte, beside other ways to the same server, as ratios measured in one run.

``python benchmarks/remote.py [--size 256] [--tensors 20000] [--rounds 3] [--threads 8]`` starts an S3 server on the
loopback and pushes a state of 20 tensors (``--size`` in MiB) and one of many tensors of 4 KiB, each in turn with

* *plain*: boto3's put_object and get_object of the same objects by as many threads, nothing hashed;
* *if absent*: the same with If-None-Match, as a store puts, which costs some servers a look;
* *one file*: upload_fileobj and download_fileobj of the same bytes as one file, by as many threads;
* *restic*: backup and check --read-data of that file, if restic is installed.

A ratio is the time of the other divided by ours in the same round, so above 1 we are faster; the median of the rounds
is printed, and the lowest and highest. Every measurement has a process of its own, whose processor time (imports
included) and peak memory are printed too. Requests are counted by the client; those of restic are not known. A second
push, of the same state with 5 % of its tensors changed, ends each case.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

if TYPE_CHECKING:
    import ckptstore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the server is that of the lifecycle and the tests

BUCKET = "benchmark"
SMALL = 4096
CHANGED = 0.05

Figures = dict[str, Any]


# -- what is measured, each in a process of its own -------------------------------------------------------------------


def push(folder: str, url: str, root: str) -> Figures:
    """Push from a directory with a readback of every byte."""
    import ckptstore

    source, target = ckptstore.open(folder), ckptstore.open(url, create=True)
    before = target.traffic
    assert before is not None
    start = time.perf_counter()
    done = ckptstore.push(source, target, ckptstore.Digest.parse(root))
    seconds = time.perf_counter() - start
    traffic = target.traffic
    assert traffic is not None
    traffic = traffic.since(before)
    return {
        "seconds": seconds,
        "requests": dict(traffic.requests),
        "sent": traffic.sent_bytes,
        "received": traffic.received_bytes,
        "keys": done.sent_keys,
        "present": done.present_keys,
    }


def plain(folder: str, prefix: str, threads: int, **options: str) -> Figures:
    """Put and get the same objects, and hash nothing."""
    client, requests = _client(threads)
    paths = [path for kind in ("objects", "documents") for path in Path(folder, kind).rglob("*") if path.is_file()]

    def put_and_get(path: Path) -> int:
        key = f"{prefix}/{path.relative_to(folder)}"
        client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes(), **options)
        return len(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        received = sum(pool.map(put_and_get, paths))
    return {"seconds": time.perf_counter() - start, "requests": dict(requests), "received": received}


def if_absent(folder: str, prefix: str, threads: int) -> Figures:
    """The same, each put on condition that the key is not there."""
    return plain(folder, prefix, threads, IfNoneMatch="*")


def one_file(path: str, key: str, threads: int) -> Figures:
    """Upload one file in parts, and download it again, to nowhere."""
    from boto3.s3.transfer import TransferConfig

    client, requests = _client(threads)
    config = TransferConfig(max_concurrency=threads)
    start = time.perf_counter()
    with open(path, "rb") as file:
        client.upload_fileobj(file, BUCKET, key, Config=config)
    with open(os.devnull, "wb") as nowhere:
        client.download_fileobj(BUCKET, key, nowhere, Config=config)
    return {"seconds": time.perf_counter() - start, "requests": dict(requests)}


def restic(path: str, repository: str, threads: int) -> Figures:
    """Back up one file, and read all of it back."""
    environment = {**os.environ, "RESTIC_PASSWORD": "benchmark", "RESTIC_REPOSITORY": repository}
    common = ["restic", "--no-cache", "--quiet", "-o", f"s3.connections={threads}"]

    def call(*arguments: str) -> None:
        subprocess.run([*common, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)

    call("init")
    start = time.perf_counter()
    call("backup", "--compression", "off", path)
    call("check", "--read-data")
    return {"seconds": time.perf_counter() - start}


def _client(threads: int) -> tuple[Any, Counter[str]]:
    """A client as boto3 makes it, but for the checksums, which are left out as a store leaves them out."""
    import boto3
    from botocore.config import Config

    requests: Counter[str] = Counter()
    config = Config(
        max_pool_connections=threads,
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    client: Any = boto3.client("s3", config=config)
    client.meta.events.register(
        "before-send.s3", lambda event_name, **_: requests.update([event_name.rpartition(".")[2]])
    )
    return client, requests


WORK: dict[str, Callable[..., Figures]] = {
    "push": push,
    "plain": plain,
    "if absent": if_absent,
    "one file": one_file,
    "restic": restic,
}


def measured(name: str, *arguments: object) -> Figures:
    """The figures of one piece of work in a new process, and its peak memory in bytes."""
    command = [sys.executable, __file__, "--work", json.dumps([name, *arguments])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: Figures = json.loads(done.stdout)
    return figures


def work(name: str, *arguments: Any) -> None:
    """Do it here, and print the figures."""
    before = cpu_seconds()
    figures = WORK[name](*arguments)
    print(json.dumps({**figures, "cpu": cpu_seconds() - before, "peak": peak(of_children=name == "restic")}))


def cpu_seconds() -> float:
    """Processor time of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak(*, of_children: bool) -> int:
    """The most memory that this process, or one that it started, had resident, in bytes."""
    status = Path("/proc/self/status")
    if status.exists() and not of_children:  # getrusage counts what the parent had when it started this process
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    found = resource.getrusage(resource.RUSAGE_CHILDREN if of_children else resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


# -- the states -------------------------------------------------------------------------------------------------------


class Case:
    """A state in a directory store, the same bytes as one file, and the state with 5 % of its tensors changed."""

    def __init__(self, folder: Path, title: str, count: int, size: int) -> None:
        import torch
        from torch import nn

        import ckptstore

        self.title = title
        self.folder = folder / "store"
        self.file = folder / "file"
        model = nn.ParameterDict({f"{index:05}": nn.Parameter(torch.randn(size // 4)) for index in range(count)})
        with self.file.open("wb") as file:
            for parameter in model.values():
                file.write(parameter.detach().numpy().tobytes())
        self.later = folder / "later"  # apart: what is measured first finds its own objects and no others
        store = ckptstore.open(self.folder, create=True)
        self.root = saved(store, model)
        self.closure = store.closure(ckptstore.Digest.parse(self.root)).sizes()
        store = ckptstore.open(self.later, create=True)
        self.changed: dict[str, str] = {}
        some = max(1, round(count * CHANGED))
        kept = [parameter.detach().clone() for parameter in model.values()]
        for name, chosen in (("in a row", range(some)), ("every 20th", range(0, count, count // some))):
            for index, parameter in enumerate(model.values()):
                parameter.data.copy_(kept[index] + (1 if index in chosen else 0))
            self.changed[name] = saved(store, model)

    @property
    def size(self) -> int:
        return sum(size for _, size in self.closure)

    def __str__(self) -> str:
        return f"{self.title}: {self.size / 2**20:,.0f} MiB in {len(self.closure):,} objects and documents"


def saved(store: ckptstore.Store, model: Any) -> str:
    """The root of a checkpoint with these weights."""
    import ckptstore

    attempt = store.begin("main")
    receipt = store.save_shard(ckptstore.TrainingState(model=model), attempt, step=1)
    return str(store.commit(attempt, [receipt]))


def rounds(case: Case, number: int, endpoint: str, threads: int) -> list[dict[str, Figures]]:
    """Each way once a round, one after the other; the next round begins with the next one."""
    ways: list[Callable[[str], tuple[str, Figures]]] = [
        lambda prefix: ("push", measured("push", str(case.folder), url(prefix, threads), case.root)),
        lambda prefix: ("plain", measured("plain", str(case.folder), prefix, threads)),
        lambda prefix: ("if absent", measured("if absent", str(case.folder), prefix, threads)),
        lambda prefix: ("one file", measured("one file", str(case.file), prefix, threads)),
    ]
    if shutil.which("restic"):
        ways.append(
            lambda prefix: (
                "restic",
                measured("restic", str(case.file), f"s3:{endpoint}/{BUCKET}/{prefix}", threads),
            )
        )
    found = []
    for turn in range(number):
        order = ways[turn % len(ways) :] + ways[: turn % len(ways)]
        found.append(dict(way(f"{time.time_ns()}") for way in order))
    return found


def url(prefix: str, threads: int) -> str:
    return f"s3://{BUCKET}/{prefix}?{urlencode({'addressing': 'path', 'threads': threads})}"


# -- printing ---------------------------------------------------------------------------------------------------------


def show(case: Case, found: Sequence[dict[str, Figures]]) -> None:
    """A line for each way."""
    print(f"\n{case}")
    print(f"{'':10} {'seconds':>8} {'MiB/s':>7} {'ratio':>6} {'of rounds':11} {'CPU s':>6} {'peak MiB':>9}  requests")
    for name in sorted(found[0], key=list(WORK).index):
        seconds = statistics.median(turn[name]["seconds"] for turn in found)
        ratios = sorted(turn[name]["seconds"] / turn["push"]["seconds"] for turn in found)
        memory = statistics.median(turn[name]["peak"] for turn in found) / 2**20
        cpu = statistics.median(turn[name]["cpu"] for turn in found)
        speed = case.size / 2**20 / seconds
        spread = f"{ratios[0]:.2f}-{ratios[-1]:.2f}"
        requests = shown(found[-1][name].get("requests", {}))
        figures = f"{seconds:8.2f} {speed:7.1f} {statistics.median(ratios):6.2f} {spread:11} {cpu:6.2f} {memory:9.0f}"
        print(f"{name:10} {figures}  {requests}", flush=True)


def show_second(case: Case, threads: int) -> None:
    """What a push sends where the state before is there already."""
    for name, root in case.changed.items():
        prefix = f"{time.time_ns()}"
        measured("push", str(case.folder), url(prefix, threads), case.root)
        figures = measured("push", str(case.later), url(prefix, threads), root)
        print(
            f"5 % changed, {name}: {figures['seconds']:.2f} s, {figures['keys']} keys sent "
            f"({figures['sent'] / case.size:.1%} of the bytes), {figures['present']} there "
            f"({figures['received'] / case.size:.1%} read back)  {shown(figures['requests'])}"
        )


def shown(requests: dict[str, int]) -> str:
    each = ", ".join(f"{count:,} {name}" for name, count in sorted(requests.items()))
    return f"{sum(requests.values()):,} ({each})" if requests else ""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="of the big state, in MiB; 0 leaves it out")
    parser.add_argument("--tensors", type=int, default=20_000, help="of 4 KiB, of the other state; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*json.loads(options.work))
        return
    from trainer.lifecycle.s3server import S3Server

    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        with S3Server(folder / "server") as server:
            server.create_bucket(BUCKET)
            os.environ.update(server.environment())
            for title, count, size in (
                ("one big state", 20 * bool(options.size), options.size * 2**20 // 20 // 4 * 4),
                (f"{options.tensors:,} tensors of 4 KiB", options.tensors, SMALL),
            ):
                if not count:
                    continue
                made = folder / str(count)
                made.mkdir()
                case = Case(made, title, count, size)
                show(case, rounds(case, options.rounds, server.endpoint, options.threads))
                show_second(case, options.threads)
                shutil.rmtree(made)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
