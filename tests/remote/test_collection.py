"""Collections in buckets: leases alone keep writers away there, and what the dead asked for may be under way (B078).

Public sources: eng-floe/floecat#390; earth-mover/icechunk#368.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import urlencode

import pytest
import torch

import ckptstore
from ckptstore import leases
from ckptstore.backends import open_backend
from ckptstore.backends.s3.backend import S3Backend
from ckptstore.collection import exclusion
from ckptstore.collection.exclusion import exclusive
from ckptstore.errors import BackendError, ConflictError
from ckptstore.store import Store
from ckptstore.threads import in_threads
from tests.faults.test_collection_races import race
from tests.support import s3 as server
from tests.support.buckets import traffic
from tests.support.claims import ELSEWHERE, dead, listed, plant_lease, plant_marker
from tests.support.collecting import bury, collected, commit, kept, littered, problems
from tests.support.faultactions import Action
from tests.support.faultanswers import Status
from tests.support.faultproxy import FaultProxy
from tests.support.http1 import Request, Response

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child has none of the threads that torch computes with, and would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that gives an answer has nothing under way behind it."""
    monkeypatch.setattr(exclusion, "_SETTLE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def litter(one_thread: None) -> Store:
    """A store in memory with something to collect."""
    return littered(f"memory:{secrets.token_hex(8)}")


def copied(litter: Store, url: str) -> Store:
    """The same store in a bucket."""
    backend = open_backend(url)
    for _ in in_threads(lambda key: backend.create(key, litter.backend.get(key)), listed(litter, ""), 8):
        pass
    store = ckptstore.open(url)
    store.capabilities()  # what the endpoint honours is found out here, once
    return store


@pytest.fixture
def store(litter: Store, url: str) -> Store:
    """A store with something to collect."""
    return copied(litter, url)


def behind_proxy(store: Store, proxy: FaultProxy, **options: str) -> Store:
    """The same store, by way of the proxy."""
    query = urlencode({"endpoint_url": proxy.endpoint, "addressing": "path", **options})
    return ckptstore.open(f"{store.url}?{query}")


def test_a_collection_in_a_bucket_takes_one_request_for_a_thousand_keys(store: Store) -> None:
    """And everything that is kept is whole. Each kind of thing takes one, after a look at the marker."""
    before = traffic(store)
    done = collected(store)
    took = traffic(store).since(before).requests
    assert done.swept is not None
    assert done.swept.whole
    stages = [stage for stage in done.plan.stages if stage]
    assert took["DeleteObjects"] == len(stages)
    assert took["DeleteObject"] == 1, "the marker"
    assert problems(store) == []
    assert sum(key.startswith("objects/") for key in kept(store)) == 3
    assert listed(store, "gc/") == []


def test_keys_of_every_number_are_deleted_and_absent_ones_count(url: str) -> None:
    backend = ckptstore.open(url, create=True).backend
    assert isinstance(backend, S3Backend)
    keys = [f"objects/{number % 256:02x}/{number:064x}" for number in range(1100)]
    for key in keys[::100]:
        backend.create(key, b"x")
    before = backend.traffic
    assert backend.delete_many(keys) == {}
    assert backend.traffic.since(before).requests == {"DeleteObjects": 2}
    assert list(backend.list("objects/")) == []


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "MissingContentMD5"), (405, "")])
def test_an_endpoint_that_deletes_only_one_by_one_is_asked_so(
    store: Store, proxy: FaultProxy, status: int, code: str
) -> None:
    proxy.add(Status(status, code), method="POST", path="delete")
    behind = behind_proxy(store, proxy)
    before = traffic(behind)
    done = collected(behind)
    assert done.swept is not None
    assert done.swept.whole
    took = traffic(behind).since(before).requests
    assert took["DeleteObjects"] == 1
    assert took["DeleteObject"] == done.swept.deleted_keys + 1
    assert problems(store) == []


@dataclass
class SomeStay(Action):
    """Nothing is deleted, and that is said of the first key that is asked for."""

    code: str
    key: str = ""

    def answer(self, request: Request) -> Response | None:
        body = request.body.decode()
        self.key = body.split("<Key>")[1].split("</Key>")[0]
        text = f"<DeleteResult><Error><Key>{self.key}</Key><Code>{self.code}</Code></Error></DeleteResult>"
        return Response((("Content-Type", "application/xml"),), b"", 200, "OK").with_body(text.encode())


def test_a_key_that_the_endpoint_keeps_is_told_and_ends_the_sweep(store: Store, proxy: FaultProxy) -> None:
    stays = SomeStay("AccessDenied")
    proxy.add(stays, method="POST", path="delete", times=1)
    before = kept(store)
    behind = behind_proxy(store, proxy)
    done = collected(behind).swept
    assert done is not None
    assert not done.whole
    ((key, why),) = done.failed
    assert stays.key.endswith(key)
    assert "AccessDenied" in why
    assert before.items() <= kept(store).items()
    done = collected(store).swept
    assert done is not None
    assert done.whole


def test_an_endpoint_that_is_busy_is_asked_again(store: Store, proxy: FaultProxy) -> None:
    proxy.add(SomeStay("SlowDown"), method="POST", path="delete", times=1)
    behind = behind_proxy(store, proxy)
    done = collected(behind).swept
    assert done is not None
    assert done.whole
    assert problems(store) == []


def test_an_endpoint_that_refuses_to_delete_loses_nothing(store: Store, proxy: FaultProxy) -> None:
    proxy.add(Status(403, "AccessDenied"), method="POST", path="delete")
    behind = behind_proxy(store, proxy)
    done = collected(behind).swept
    assert done is not None
    assert not done.whole
    assert "AccessDenied" in done.failed[0][1]
    assert problems(store) == []


def test_a_bucket_that_keeps_versions_keeps_what_was_deleted(litter: Store, s3: server.SharedServer) -> None:
    """That is said, since nothing is freed."""
    bucket = server.new_bucket()
    client = server.client()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    client.close()
    store = copied(litter, s3.url(bucket=bucket))
    done = collected(store)
    assert any("old versions" in note for note in done.notes)
    assert problems(store) == []


def test_a_lease_in_a_bucket_is_as_old_as_the_server_says(store: Store) -> None:
    """F-165: whatever its maker's clock said."""
    key = plant_lease(store, ELSEWHERE, ago=10**6)
    assert isinstance(store.backend, S3Backend)
    moment = store.backend.modified(key)
    assert moment is not None
    assert abs(moment - time.time()) < 3600
    assert store.backend.modified("leases/none") is None
    with pytest.raises(ConflictError, match="younger than 86400 s"):
        collected(store, break_leases_older_than=86_400)
    assert key in collected(store, break_leases_older_than=0).broken[0]


def test_a_collection_that_died_blocks_writers_of_a_bucket_until_the_next_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-141, F-167: what it asked for may be under way. The next one fences every ref."""
    monkeypatch.setattr(leases, "PATIENCE_SECONDS", 0.0)
    plant_marker(store, dead())
    generation = store.begin("main").generation
    with pytest.raises(ConflictError, match="--break-leases-older-than"):
        commit(store, "main", 0, 5)
    collected(store)
    assert store.begin("main").generation == generation + 1
    commit(store, "main", 0, 5)
    assert problems(store) == []


def test_of_two_collections_of_a_bucket_one_wins(store: Store) -> None:
    with exclusive(store), pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        collected(ckptstore.open(store.url))
    collected(ckptstore.open(store.url))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("rounds", "seed"), [(3, 11), *(pytest.param(15, seed, marks=pytest.mark.deep) for seed in (12, 13))]
)
def test_savers_and_collections_of_a_bucket_at_once_lose_nothing(
    url: str, tmp_path: Path, rounds: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """B078."""
    total = race(url, tmp_path, savers=2, collectors=2, rounds=rounds, seed=seed)
    with capsys.disabled():
        print(f"\n{total}", end="")
    assert total["saved"] > 0


def unpinned(store: Store) -> set[str]:
    """What is kept, without pins, whose names are new in each store."""
    return {key for key in kept(store) if not key.startswith("pins/")}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.deep)])
def test_a_collection_of_a_bucket_killed_at_a_random_instant_can_be_done_again(
    litter: Store, s3: server.SharedServer, times: int
) -> None:
    """Nothing that is kept is touched, and the next one ends as it would have."""
    draw = Random(times)
    whole = copied(litter, s3.url())
    began = time.monotonic()
    collected(whole)
    seconds = time.monotonic() - began
    expected = unpinned(whole)
    for _ in range(times):
        store = copied(litter, s3.url())
        child = os.fork()
        if child == 0:
            try:
                collected(ckptstore.open(store.url))
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert problems(store) == []
        collected(ckptstore.open(store.url))
        assert unpinned(store) == expected
        commit(ckptstore.open(store.url), "main", 3, 5)
        assert problems(store) == []
        assert listed(store, "gc/") == listed(store, "leases/") == []


def test_what_a_probe_left_below_leases_is_taken_away_by_age(store: Store) -> None:
    """It is no lease, and in the way like one that cannot be read."""
    key = f"leases/{secrets.token_hex(16)}"
    store.backend.create(key, b"probe 1")
    with pytest.raises(ConflictError, match="cannot be read"):
        collected(store)
    assert key in collected(store, break_leases_older_than=0).broken[0]


def test_an_endpoint_that_goes_away_in_the_middle_leaves_everything_whole(store: Store, proxy: FaultProxy) -> None:
    proxy.add(Status(503, "SlowDown"), method="POST", path="delete")
    behind = behind_proxy(store, proxy, attempt_seconds="3", operation_seconds="3")
    try:
        done = collected(behind).swept
    except BackendError:
        done = None
    assert done is None or not done.whole
    assert problems(store) == []
    bury(store)
    collected(store)
    assert problems(store) == []
