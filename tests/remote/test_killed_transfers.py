"""A push or pull that is killed, interrupted, or loses its server at any instant is finished by the same command."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.format.digest import Digest
from ckptstore.store import Store
from tests.remote.killvictim import PULLING, PUSHING, Command, Moment, again, carried, content, moments
from tests.support import s3 as server
from tests.support.faultactions import Blackhole, Call
from tests.support.faultproxy import FaultProxy
from tests.support.invariants import broken, inodes, temporaries
from trainer.lifecycle.s3server import S3Server

KILLS, MANY_KILLS = 5, 100


@dataclass(frozen=True)
class Source:
    """A directory store with a checkpoint ``main`` of two shards with files, an ancestor, and the same in a bucket."""

    path: Path
    root: Digest
    sizes: dict[str, int]
    bucket: list[str] = field(default_factory=list)
    """URL of the bucket store, once somebody needed it."""

    @property
    def size(self) -> int:
        return sum(self.sizes.values())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("killed")
    torch.manual_seed(0)
    store = ckptstore.open(folder / "store", create=True)
    (folder / "plan").mkdir()
    for name in "abc":
        (folder / "plan" / name).write_bytes(name.encode() * 300_000)
    tree = store.put_tree(folder / "plan")
    run = store.put_preparation(tree, tree, tree)
    for step in (1, 2):
        shards = [nn.ParameterDict({f"{shard}{n}": torch.randn(70_000) for n in range(6)}) for shard in "lr"]
        for shard in shards:
            shard["bias" + next(iter(shard))] = nn.Parameter(torch.randn(1000))
        attempt = store.begin("main")
        receipts = [
            store.save_shard(ckptstore.TrainingState(model=one), attempt, step=step, index=i, count=2, run=run)
            for i, one in enumerate(shards)
        ]
        root = store.commit(attempt, receipts)
    return Source(folder / "store", root, dict(store.closure(root).sizes()))


@dataclass
class Tally:
    """What several killed commands and their reruns sent."""

    kills: int = 0
    too_late: int = 0
    sent: int = 0
    needed: int = 0
    worst: int = 0
    phases: set[str] = field(default_factory=set)

    def count(self, moment: Moment, code: int, sent: int, needed: int) -> None:
        self.kills += code == -signal.SIGKILL
        self.too_late += code == 0
        self.sent += sent
        self.needed += needed
        self.worst = max(self.worst, sent - needed)
        self.phases.add(moment.name)

    def __str__(self) -> str:
        return (
            f"{self.kills} killed, {self.too_late} done before, every rerun complete; {self.sent:,} bytes in all, "
            f"{self.sent - self.needed:,} of them twice ({(self.sent - self.needed) / self.needed:.1%}), "
            f"{self.worst:,} at worst in one"
        )


# -- SIGKILL ----------------------------------------------------------------------------------------------------------


def kill_push(source: Source, proxy: FaultProxy, moment: Moment) -> tuple[int, int]:
    """Kill one push, look at what is there, and run it again. The exit code of the first, and the bytes that both
    sent."""
    url = server.shared().url()
    target = ckptstore.open(_directly(url), create=True)
    push = ("push", "main", url, "--json", "--store", source.path)
    before = carried(proxy, "PUT")
    code = Command(proxy, push).die_at(moment)
    assert code in (0, -signal.SIGKILL), moment
    there = content(target)
    head = target.head("main")
    assert head in (None, source.root), moment
    if head is not None or target.receipts(source.root):  # named, or called verified: then it is all there
        assert there.keys() >= source.sizes.keys(), moment
        assert target.verify(source.root).ok
    assert _leases(target) <= 1
    done = again(*push)
    missing = source.sizes.keys() - there.keys()
    # Not more than was missing; less, if the server was still storing what the dead process had sent.
    assert done["sent_bytes"] <= sum(source.sizes[key] for key in missing), f"{moment}: sent although it was there"
    assert done["present_keys"] >= len(source.sizes) - len(missing)
    assert done["repaired_keys"] == 0
    assert done["receipt"]["bytes_read"] == source.size  # every object of the closure, also what the first had sent
    assert target.head("main") == source.root
    assert ckptstore.open(_directly(url)).verify("main").ok
    assert _leases(target) <= 1  # of the one that was killed
    return code, carried(proxy, "PUT") - before


def kill_pull(source: Source, remote: str, folder: Path, proxy: FaultProxy, moment: Moment) -> tuple[int, int]:
    """As :func:`kill_push`, and the bytes that both received."""
    ckptstore.open(folder, create=True)
    pull = ("pull", "main", remote, "--json", "--store", folder)
    before = carried(proxy, "GET")
    code = Command(proxy, pull).die_at(moment)
    assert code in (0, -signal.SIGKILL), moment
    assert broken(folder) == []
    target = ckptstore.open(folder)
    there = content(target)
    assert target.head("main") in (None, source.root), moment
    if target.head("main") is not None or target.receipts(source.root):
        assert target.verify(source.root).ok
    leftover = temporaries(folder)
    kept = inodes(folder)
    done = again(*pull)
    missing = source.sizes.keys() - there.keys()
    assert done["sent_bytes"] == sum(source.sizes[key] for key in missing), f"{moment}: fetched although it was there"
    assert done["repaired_keys"] == 0
    assert kept.items() <= inodes(folder).items()
    assert broken(folder) == []
    assert ckptstore.open(folder).head("main") == source.root
    assert set(temporaries(folder)) <= set(leftover)
    assert _leases(target) <= 1
    return code, carried(proxy, "GET") - before


def _leases(store: Store) -> int:
    return len(list(store.backend.list("leases/")))


def _directly(url: str) -> str:
    """The same store, not by way of the proxy, which the environment leads to."""
    return f"{url}?endpoint_url={server.shared().server.endpoint}&addressing=path"


def _undisturbed(
    proxy: FaultProxy, phases: tuple[Moment, ...], *arguments: object
) -> tuple[dict[tuple[str, str], int], float]:
    """How many requests of each phase a command makes that nobody kills, and the seconds that it takes."""
    first = len(proxy.log)
    start = time.monotonic()
    process = Command(proxy, arguments).start()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    log = proxy.log[first:]
    found = {(phase.method, phase.path): 0 for phase in phases}
    for method, path in found:
        found[method, path] = sum(entry.method == method and path in entry.target for entry in log)
    return found, time.monotonic() - start


@pytest.fixture
def remote(source: Source, s3: server.SharedServer) -> str:
    """The URL of a bucket store that has it all."""
    if not source.bucket:
        source.bucket.append(s3.url())
        target = ckptstore.open(source.bucket[0], create=True)
        ckptstore.push(ckptstore.open(source.path), target, source.root, ref="main")
    return source.bucket[0]


@pytest.mark.parametrize(
    "number", range(KILLS), ids=["inside an object", "after an object", "before the ref", "before the receipt", "any"]
)
def test_a_push_that_is_killed_is_finished_by_the_next_one(source: Source, proxy: FaultProxy, number: int) -> None:
    chosen = [PUSHING[1], PUSHING[2], PUSHING[7], PUSHING[9], Moment("at any time", seconds=0.6)][number]
    skip = 5 if "/objects/" in chosen.path else 0
    moment = Moment(chosen.name, chosen.method, chosen.path, skip, chosen.when, chosen.seconds)
    code, sent = kill_push(source, proxy, moment)
    assert code == -signal.SIGKILL or moment.seconds is not None, "the moment never came"
    assert source.size <= sent <= 2 * source.size


@pytest.mark.parametrize(
    "number", range(KILLS), ids=["before a document", "before an object", "inside an object", "after an object", "any"]
)
def test_a_pull_that_is_killed_is_finished_by_the_next_one(
    source: Source, remote: str, proxy: FaultProxy, tmp_path: Path, number: int
) -> None:
    chosen = [*PULLING[1:2], *PULLING[3:6], Moment("at any time", seconds=0.6)][number]
    skip = 5 if "/objects/" in chosen.path else 0
    moment = Moment(chosen.name, chosen.method, chosen.path, skip, chosen.when, chosen.seconds)
    code, _ = kill_pull(source, remote, tmp_path / "store", proxy, moment)
    assert code == -signal.SIGKILL or moment.seconds is not None, "the moment never came"


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_a_hundred_pushes_that_are_killed_are_finished(
    source: Source, proxy: FaultProxy, s3: server.SharedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, tally = random.Random(100), Tally()
    push = ("push", "main", s3.url(), "--create", "--store", source.path)
    requests, seconds = _undisturbed(proxy, PUSHING, *push)
    while tally.kills < MANY_KILLS:
        moment = moments(PUSHING, requests, seconds, draw)
        code, sent = kill_push(source, proxy, moment)
        tally.count(moment, code, sent, source.size)
    with capsys.disabled():
        print(f"\npush: {tally}")
    assert tally.phases >= {phase.name for phase in PUSHING}


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_a_hundred_pulls_that_are_killed_are_finished(
    source: Source, remote: str, proxy: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, tally = random.Random(200), Tally()
    ckptstore.open(tmp_path / "whole", create=True)
    requests, seconds = _undisturbed(proxy, PULLING, "pull", "main", remote, "--store", tmp_path / "whole")
    while tally.kills < MANY_KILLS:
        moment = moments(PULLING, requests, seconds, draw)
        code, received = kill_pull(source, remote, tmp_path / str(tally.kills + tally.too_late), proxy, moment)
        tally.count(moment, code, received, source.size)
    with capsys.disabled():
        print(f"\npull: {tally}")
    assert tally.phases >= {phase.name for phase in PULLING}


# -- SIGINT, SIGTERM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_an_interrupt_ends_it_at_once_although_requests_are_under_way(
    source: Source, remote: str, proxy: FaultProxy, tmp_path: Path, verb: str
) -> None:
    """An attempt may take 60 seconds, and all attempts 300; Ctrl-C waits for none of them."""
    url, folder = (server.shared().url(), source.path) if verb == "push" else (remote, tmp_path / "store")
    ckptstore.open(_directly(url) if verb == "push" else folder, create=True)
    hanging = threading.Event()
    method = "PUT" if verb == "push" else "GET"
    proxy.add(Call(before=lambda request: hanging.set()), method=method, path="/objects/", skip=4)
    proxy.add(Blackhole(), method=method, path="/objects/", skip=4)
    process = Command(proxy, (verb, "main", url, "--store", folder)).start()
    assert hanging.wait(60)
    time.sleep(0.2)  # more of them hang
    process.send_signal(signal.SIGINT)
    try:
        out, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert errors == "ckpt: interrupted; what was written is whole; run the same command again\n"
    proxy.heal()
    target = ckptstore.open(_directly(url) if verb == "push" else folder)
    assert target.head("main") is None
    assert target.receipts(source.root) == []
    there = content(target)
    assert there
    done = again(verb, "main", url, "--json", "--store", folder)
    assert done["sent_bytes"] == sum(size for key, size in source.sizes.items() if key not in there)
    assert _leases(target) == 0
    assert target.verify("main").ok


def test_a_push_that_is_terminated_leaves_what_a_kill_leaves(source: Source, proxy: FaultProxy) -> None:
    url = server.shared().url()
    target = ckptstore.open(_directly(url), create=True)
    push = ("push", "main", url, "--json", "--store", source.path)
    moment = Moment("before an object", "PUT", "/objects/", skip=6)
    assert Command(proxy, push).die_at(moment, signal.SIGTERM) in (-signal.SIGTERM, 143)
    there = content(target)
    assert target.head("main") is None
    assert target.receipts(source.root) == []
    assert again(*push)["sent_bytes"] == sum(size for key, size in source.sizes.items() if key not in there)
    assert target.verify("main").ok


# -- the server dies --------------------------------------------------------------------------------------------------


@pytest.fixture
def mortal(s3: server.SharedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of its own, which may be killed; the environment leads there."""
    with S3Server() as found:
        found.create_bucket(server.BUCKET)
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
        yield found


def crash(mortal: S3Server, seconds: float) -> Callable[[object], None]:
    """Kills the server, and starts it again on the same data after so many seconds."""

    def strike(request: object) -> None:
        mortal.kill()
        threading.Thread(target=lambda: (time.sleep(seconds), mortal.start()), name="restart").start()

    return strike


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_a_server_that_is_killed_and_comes_back_is_ridden_out(
    source: Source, mortal: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    url = f"s3://{server.BUCKET}/store"
    bucket = ckptstore.open(f"{url}?endpoint_url={mortal.endpoint}&addressing=path", create=True)
    if verb == "pull":
        ckptstore.push(ckptstore.open(source.path), bucket, source.root, ref="main")
        ckptstore.open(tmp_path, create=True)
    folder = source.path if verb == "push" else tmp_path
    method = "PUT" if verb == "push" else "GET"
    with FaultProxy(mortal.port, mortal.admin) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        proxy.add(Call(before=crash(mortal, 1.0)), method=method, path="/objects/", skip=7, times=1)
        done = again(verb, "main", url, "--json", "--store", folder)
        assert done["repaired_keys"] == 0
        assert done["receipt"]["bytes_read"] == source.size
    target = bucket if verb == "push" else ckptstore.open(tmp_path)
    assert target.verify("main").ok
    assert target.head("main") == source.root
