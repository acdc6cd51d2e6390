"""A run that saves straight to a bucket: the same roots, nothing on the disk, and no ref before a full readback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    CommitAbortedError,
    ConflictError,
    CorruptError,
    NotFoundError,
    RefusedError,
    UsageError,
)
from ckptstore.format.keys import document_key
from ckptstore.store import Store
from tests.support import s3 as server
from tests.support.buckets import interrupted_when, layers, missing, through, traffic
from tests.support.faultactions import Blackhole, Call, LostAnswer
from tests.support.faultbytes import FlipRequest, FlipResponse
from tests.support.faultproxy import FaultProxy
from tests.support.http1 import Request
from tests.support.training import commit_state, make_training, save_steps

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.fixture
def store(url: str) -> Store:
    """An empty store in a bucket."""
    return ckptstore.open(url, create=True)


# -- the same run -----------------------------------------------------------------------------------------------------


def test_a_run_in_a_bucket_ends_in_the_roots_of_the_run_in_a_directory(store: Store, tmp_path: Path) -> None:
    straight = save_steps(ckptstore.open(tmp_path / "store", create=True), "main", make_training(), 6, every=2)
    first = save_steps(store, "main", make_training(), 4, every=2)
    torch.manual_seed(99)
    random.seed(99)
    second = save_steps(ckptstore.open(store.url), "main", make_training(seed=5), 6, every=2)
    assert [*first, *second] == straight
    assert ckptstore.open(store.url).verify("main").ok


def start(url: str, steps: int, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.victim", "convolutional", url, "main", str(steps)]
    environment = {**os.environ, "HOME": "/nowhere", "TMPDIR": "/nowhere", **variables}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> None:
    with process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


@pytest.mark.timeout(600)  # interpreters with torch are started
def test_a_killed_run_in_a_bucket_ends_in_the_root_of_the_uninterrupted_one(
    s3: server.SharedServer, bare_proxy: FaultProxy, tmp_path: Path
) -> None:
    """B001, B050: killed with SIGKILL inside the upload of an object, and after the ref moved, before it knew. Each
    time a fresh process resumes; none of them has a place to put files."""
    steps = 8
    straight = ckptstore.open(tmp_path, create=True)
    uninterrupted = start(str(tmp_path), steps)
    url = s3.url()
    behind = ckptstore.open(url, create=True)
    killed = []
    for path, skip in (("/objects/", 3), ("/refs/", 1)):
        gone = threading.Event()

        def kill(_request: Request, gone: threading.Event = gone) -> None:
            process.send_signal(signal.SIGKILL)
            gone.set()

        action = Call(before=kill) if path == "/objects/" else Call(after=kill)
        bare_proxy.add(action, method="PUT", path=path, skip=skip, times=1)
        with start(url, steps, AWS_ENDPOINT_URL_S3=bare_proxy.endpoint) as process:
            process.communicate(timeout=300)
        assert gone.is_set()
        assert process.returncode == -signal.SIGKILL
        head = behind.head("main")
        assert head is not None
        assert missing(behind) == []
        killed.append(behind.checkpoint(head).step)
    assert 0 < killed[0] < killed[1] < steps
    finish(start(url, steps))
    finish(uninterrupted)
    assert behind.head("main") == straight.head("main")
    assert ckptstore.open(url).verify("main").ok


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_whenever_it_is_killed_a_run_in_a_bucket_ends_the_same(
    s3: server.SharedServer, bare_proxy: FaultProxy, tmp_path: Path
) -> None:
    """B001, B050: at twelve random requests."""
    steps = 8
    finish(start(str(tmp_path), steps))
    expected = ckptstore.open(tmp_path).head("main")
    moments = random.Random(0)
    for _ in range(12):
        url = s3.url()
        ckptstore.open(url, create=True)

        def kill(_request: Request) -> None:
            process.send_signal(signal.SIGKILL)

        bare_proxy.add(Call(**{moments.choice(["before", "after"]): kill}), skip=moments.randrange(5, 60), times=1)
        with start(url, steps, AWS_ENDPOINT_URL_S3=bare_proxy.endpoint) as process:
            process.communicate(timeout=300)
        bare_proxy.heal()
        assert missing(ckptstore.open(url)) == []
        finish(start(url, steps))
        assert ckptstore.open(url).head("main") == expected


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_the_requests_of_a_save(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly: six weights of 360,000 bytes; then one of them changed; then none. What is unchanged is neither sent nor
    read nor asked for one by one."""
    model = layers()
    told = []
    with store.run("main", model=model) as run:
        run.resume()
        run.save(1)  # the first one also learns what the endpoint honours
        for step, changed in ((2, 6), (3, 1), (4, 0)):
            with torch.no_grad():
                for weight in model[:changed]:
                    weight.add_(1.0)
            before = traffic(store)
            run.save(step)
            told.append((changed, traffic(store).since(before)))
    with capsys.disabled():
        for changed, took in told:
            print(f"\n{changed} of 6 weights changed: {took.total} requests {dict(took.requests)}", end="")
    # The lease and its end; the head, and whether it is that; its checkpoint; page, shard and checkpoint, there and
    # back; the receipt; whether the lease is still there; the ref.
    always = {"HeadObject": 3, "PutObject": 1 + 3 + 1 + 1, "GetObject": 3 + 3, "ListObjectsV2": 1, "DeleteObject": 1}
    every = {**always, "PutObject": always["PutObject"] + 6, "GetObject": always["GetObject"] + 6}
    assert dict(told[0][1].requests) == every
    one = {**always, "PutObject": always["PutObject"] + 1, "GetObject": always["GetObject"] + 1, "ListObjectsV2": 2}
    assert dict(told[1][1].requests) == one
    none = {**always, "PutObject": always["PutObject"] - 2, "HeadObject": 3 + 2, "ListObjectsV2": 2}
    assert dict(told[2][1].requests) == none, "page and shard are asked for, and not sent"
    assert told[1][1].received_bytes < 400_000
    assert told[2][1].received_bytes < 40_000


def test_the_receipt_says_what_was_read_and_how_old_the_rest_may_be(store: Store) -> None:
    """F-106."""
    from ckptstore.format import values
    from ckptstore.format.records import closure_digest

    model = layers()
    with store.run("main", model=model) as run:
        run.resume()
        first = run.save(1)
        with torch.no_grad():
            model[0].add_(1.0)
        second = run.save(2)
    for root, objects, ages in ((first, 6, False), (second, 1, True)):
        (receipt,) = (receipt for receipt in store.receipts(root) if receipt.operation == "verify")
        closure = store.closure(root)
        assert receipt.closure == closure_digest(closure.sizes())
        assert receipt.documents == len(closure.documents) == 3
        assert receipt.objects == objects
        assert receipt.bytes_read == sum(closure.documents.values()) + objects * 360_000
        assert receipt.method == "server-read"
        details = values.from_json(receipt.details, "details")
        assert isinstance(details, dict)
        assert bool(details["max_age_seconds"]) == ages
    assert len(store.readbacks(second)) == 1


def test_a_resumed_run_counts_what_it_has_just_read(store: Store) -> None:
    """Each object is read once by the restore, and not again for the next save that still has it."""
    save_layers = layers()
    with store.run("main", model=save_layers) as run:
        run.resume()
        run.save(1)
    fresh = ckptstore.open(store.url)
    with fresh.run("main", model=layers(5.0)) as run:
        before = traffic(fresh)
        run.resume()
        took = traffic(fresh).since(before).requests["GetObject"]
        assert took == 2 + 4 + 6, "the ref and whether it is the last; checkpoint, twice, shard and page; the weights"
        before = traffic(fresh)
        run.save(2)
        assert traffic(fresh).since(before).received_bytes < 60_000


def test_many_small_tensors_are_one_pack_read_once(store: Store) -> None:
    """Threads that want the same pack read it once."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(64)) for _ in range(300)])
    root = commit_state(store, "main", [ckptstore.TrainingState(model=model)], 1)
    fresh = ckptstore.open(store.url)
    closure = fresh.closure(root)
    before = traffic(fresh)
    fresh.restore(root, ckptstore.TrainingState(model=model))
    assert traffic(fresh).since(before).requests["GetObject"] == len(closure.documents) + len(closure.objects)


def test_files_of_a_run_are_read_back_once(store: Store, tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 100)
    tree = store.put_tree(tmp_path)
    with ckptstore.open(store.url).run("main", model=nn.Linear(2, 2), files=tree) as run:
        run.resume()
        run.save(1)
        before = traffic(run.store)
        run.save(2)
        took = traffic(run.store).since(before).requests
        assert took["GetObject"] == 6, "page, shard and checkpoint, and the head with its checkpoint"
        assert took["ListObjectsV2"] == 3, "for the lease, and to see that document and objects of the tree are there"
        gone = next(iter(run.store.tree(tree).files[0].chunks))
        store.backend.delete(f"objects/{gone.hex[:2]}/{gone.hex}")
        with pytest.raises(NotFoundError, match=r"0\.txt"):
            run.save(3)
    assert store.head("main") == run.root


# -- what it promises -------------------------------------------------------------------------------------------------


def test_a_readback_behind_is_refused_where_bytes_pass_a_network(store: Store) -> None:
    """F-157: a ref names only what was read back in full; so nothing can be read back behind it."""
    with pytest.raises(UsageError, match="read back"):
        store.run("main", model=nn.Linear(2, 2), readback="behind")
    attempt = store.begin("main")
    receipt = store.save_shard(ckptstore.TrainingState(model=nn.Linear(2, 2)), attempt, step=1)
    with pytest.raises(UsageError, match="read back"):
        store.commit(attempt, [receipt], readback=False)
    assert store.head("main") is None
    assert store.head("main") is None
    assert store.readbacks(store.commit(attempt, [receipt]))


def test_bytes_that_were_changed_on_their_way_are_stored_anew(s3: server.SharedServer, bare_proxy: FaultProxy) -> None:
    """B066, B069: an object arrived with a bit turned over, and nobody but the readback noticed."""
    prefix = server.fresh_prefix()
    store = through(bare_proxy, s3, prefix)
    flipped = bare_proxy.add(FlipRequest(at=1000, unnoticed=True), method="PUT", path="/objects/", times=1)
    with store.run("main", model=layers()) as run:
        run.resume()
        root = run.save(1)
    assert flipped.hits == 1
    assert ckptstore.open(s3.url(prefix)).verify("main").ok
    assert ckptstore.open(s3.url(prefix)).head("main") == root


def test_a_ref_never_names_what_cannot_be_read_back(s3: server.SharedServer, bare_proxy: FaultProxy) -> None:
    prefix = server.fresh_prefix()
    store = through(bare_proxy, s3, prefix)
    model = layers()
    with store.run("main", model=model) as run:
        run.resume()
        first = run.save(1)
        bare_proxy.add(FlipResponse(at=9), method="GET", path="/objects/")
        with torch.no_grad():
            model[0].add_(1.0)
        with pytest.raises(CorruptError, match="weight '0'"):
            run.save(2)
        assert ckptstore.open(s3.url(prefix)).head("main") == first
        bare_proxy.heal()
        second = run.save(2)
    assert ckptstore.open(s3.url(prefix)).head("main") == second
    assert ckptstore.open(s3.url(prefix)).verify("main").ok


def test_an_object_that_vanished_is_stored_again(store: Store, client: S3Client) -> None:
    """F-121: of what this process knows, it is seen again that it is there before it is left out."""
    model = layers()
    with store.run("main", model=model) as run:
        run.resume()
        root = run.save(1)
        for key in store.closure(root).objects:
            store.backend.delete(key)
        assert store.verify(run.save(2)).ok


def test_a_save_that_cannot_be_done_in_time_leaves_everything_as_it_was(
    s3: server.SharedServer, bare_proxy: FaultProxy
) -> None:
    prefix = server.fresh_prefix()
    store = through(bare_proxy, s3, prefix)
    behind = ckptstore.open(s3.url(prefix))
    model = layers()
    with store.run("main", model=model) as run:
        run.resume()
        first = run.save(1)
        with torch.no_grad():
            for weight in model:
                weight.add_(1.0)
        values = [weight.clone() for weight in model]
        chance = random.getstate()
        for method, path in (("PUT", "/objects/"), ("GET", "/objects/"), ("PUT", "/documents/"), ("PUT", "/refs/")):
            bare_proxy.add(Blackhole(), method=method, path=path)
            with pytest.raises(BackendError, match="deadline of 3 s"), ckptstore.deadline(3):
                run.save(2)
            assert behind.head("main") == first
            assert missing(behind) == []
            bare_proxy.heal()
        assert all(torch.equal(before, now) for before, now in zip(values, model, strict=True))
        assert random.getstate() == chance
        assert list(behind.backend.list("leases/")) == []
        assert behind.head("main") == first
        second = run.save(2)
    assert behind.head("main") == second
    assert behind.verify("main").ok


def test_a_save_whose_last_answer_was_lost_is_found_to_be_done(s3: server.SharedServer, bare_proxy: FaultProxy) -> None:
    """F-125, B054: the ref moved, and who moved it could not know. It asks before it says that somebody else did."""
    prefix = server.fresh_prefix()
    store = through(bare_proxy, s3, prefix)
    behind = ckptstore.open(s3.url(prefix))
    model = layers()
    with store.run("main", model=model) as run:
        run.resume()
        run.save(1)
        bare_proxy.add(LostAnswer(), method="PUT", path="/refs/", times=1)
        bare_proxy.add(Blackhole(), method="GET", path="/refs/", skip=2)  # when it asks whether it won
        with pytest.raises(BackendError), ckptstore.deadline(3):
            run.save(2)
        committed = behind.head("main")
        bare_proxy.heal()
        assert run.save(2) == committed, "the same state: it is saved"
        assert run.save(3) == behind.head("main")
        assert behind.checkpoint(behind.resolve("main")).parent == committed
    assert len(list(behind.refs.log("main"))) == 3

    with store.run("main", model=model) as run:
        run.resume()
        bare_proxy.add(LostAnswer(), method="PUT", path="/refs/", times=1)
        bare_proxy.add(Blackhole(), method="GET", path="/refs/", skip=2)  # when it asks whether it won
        with pytest.raises(BackendError), ckptstore.deadline(3):
            run.save(4)
        bare_proxy.heal()
        with torch.no_grad():
            model[0].add_(1.0)
        with pytest.raises(RefusedError, match="does not come after"):
            run.save(4)
        run.save(5)


def test_somebody_else_s_checkpoint_is_still_a_conflict(store: Store) -> None:
    with store.run("main", model=layers()) as run:
        run.resume()
        root = run.save(1)
        other = ckptstore.open(store.url)
        moved = commit_state(other, "main", [ckptstore.TrainingState(model=layers(1.0))], 2)
        with pytest.raises(ConflictError):
            run.save(2)
    assert store.head("main") == moved != root


# -- sharded ----------------------------------------------------------------------------------------------------------


def halves(value: float = 0.0) -> list[ckptstore.TrainingState]:
    torch.manual_seed(0)
    return [
        ckptstore.TrainingState(model=nn.ParameterDict({name: nn.Parameter(torch.randn(300, 300) + value)}))
        for name in ("first", "second")
    ]


def test_who_commits_shards_reads_all_of_them_back(store: Store) -> None:
    workers = [ckptstore.open(store.url) for _ in range(2)]
    attempt = store.begin("main")
    receipts = [
        worker.save_shard(state, attempt, step=1, index=index, count=2)
        for index, (worker, state) in enumerate(zip(workers, halves(), strict=True))
    ]
    before = traffic(store)
    root = store.commit(attempt, receipts)
    closure = store.closure(root)
    assert traffic(store).since(before).requests["GetObject"] >= len(closure.documents) + len(closure.objects)
    (receipt,) = store.readbacks(root)
    assert (receipt.documents, receipt.objects) == (len(closure.documents), len(closure.objects))
    assert receipt.bytes_read == sum(size for _, size in closure.sizes())
    assert all(workers[i].verdict(attempt, receipts[i], 5.0) == root for i in range(2))


def test_a_shard_that_cannot_be_read_back_aborts_and_is_stored_anew(store: Store) -> None:
    """What a worker took for stored it does not take for stored again after the attempt failed."""
    workers = [ckptstore.open(store.url) for _ in range(2)]

    def attempt(step: int, damage: bool) -> Digest:
        attempt = store.begin("main")
        states = halves()
        receipts = [
            worker.save_shard(state, attempt, step=step, index=index, count=2)
            for index, (worker, state) in enumerate(zip(workers, states, strict=True))
        ]
        if damage:
            key = next(iter(stat.key for stat in store.backend.list("objects/")))
            data = bytearray(store.backend.get(key))
            data[7] ^= 1
            store.backend.replace(key, data)
        try:
            return store.commit(attempt, receipts)
        except CkptStoreError:
            for worker, receipt in zip(workers, receipts, strict=True):
                with pytest.raises(CommitAbortedError):
                    worker.verdict(attempt, receipt, 10.0)
            raise

    with pytest.raises(CorruptError, match=r"shard [01]"):
        attempt(1, damage=True)
    assert store.head("main") is None
    root = attempt(1, damage=False)
    assert ckptstore.open(store.url).verify(root).ok


def test_nothing_of_a_checkpoint_is_visible_before_all_that_it_needs(store: Store) -> None:
    """Invariant: a document is not stored while an object below it is known to be missing."""
    attempt = store.begin("main")
    worker = ckptstore.open(store.url)
    receipt = worker.save_shard(ckptstore.TrainingState(model=layers()), attempt, step=1)
    key = next(iter(stat.key for stat in store.backend.list("objects/")))
    store.backend.delete(key)
    before = {stat.key for stat in store.backend.list("documents/")}
    with pytest.raises(NotFoundError, match=key):
        store.commit(attempt, [receipt])
    assert {stat.key for stat in store.backend.list("documents/")} == before


@pytest.mark.timeout(120)
def test_an_interrupted_save_leaves_the_ref_where_it_was(s3: server.SharedServer, bare_proxy: FaultProxy) -> None:
    prefix = server.fresh_prefix()
    store = through(bare_proxy, s3, prefix)
    model = layers()
    with store.run("main", model=model) as run:
        run.resume()
        first = run.save(1)
        with torch.no_grad():
            model[0].add_(1.0)
        with interrupted_when(bare_proxy, "PUT", "/objects/"), suppress(KeyboardInterrupt):
            run.save(2)
            pytest.fail("it was not interrupted")
        assert ckptstore.open(s3.url(prefix)).head("main") == first
        bare_proxy.heal()
        second = run.save(2)
    assert ckptstore.open(s3.url(prefix)).head("main") == second
    assert ckptstore.open(s3.url(prefix)).backend.stat(document_key(second)) is not None
