"""Hosts that pull: real processes from staged sources, with what it takes to read the operator's store and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import Digest, Store, TrainingState
from ckptstore.errors import CorruptError, NotFoundError
from ckptstore.format.keys import object_key
from tests.support import s3 as shared
from trainer.lifecycle.access import BUCKET, DIRECTORY, SERVER, Access
from trainer.lifecycle.expect import NotAsPlannedError
from trainer.lifecycle.pulling import pull_on_hosts
from trainer.workers import events
from trainer.workers.hosts import Host
from trainer.workers.launch import NO_CREDENTIALS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def area(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def new_host(area: Path, number: int) -> Host:
    """A host with an empty store, whose staged sources are those of this project."""
    host = Host(area, f"host-{number}")
    (host.directory / "sources").symlink_to(ROOT)
    ckptstore.open(host.store, create=True)
    return host


def commit_two_shards(store: Store) -> Digest:
    """A checkpoint of two shards with a tensor each."""
    attempt = store.begin("main")
    receipts = []
    for index in range(2):
        model = torch.nn.Linear(64, 64, bias=False)
        torch.nn.init.constant_(model.weight, index + 1.0)
        holder = torch.nn.ModuleDict({f"part{index}": model})
        receipts.append(store.save_shard(TrainingState(model=holder), attempt, step=1, index=index, count=2))
    return store.commit(attempt, receipts)


@contextmanager
def nothing_left(area: Path) -> Iterator[None]:
    """No process that names a host's folder outlives the block."""
    yield
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(area).encode() not in entry.read_bytes()
        except OSError:
            continue


def test_hosts_pull_their_own_shards_from_a_directory_of_the_run(area: Path) -> None:
    operator = ckptstore.open(area / "operator", create=True)
    root = commit_two_shards(operator)
    hosts = [(new_host(area, number), number) for number in range(2)]
    access = Access(DIRECTORY, str(area / "operator"), operator.url, host_allow=(area / "operator",))
    with nothing_left(area):
        done = pull_on_hosts(access, hosts, [root], "pull-1")
        again = pull_on_hosts(access, hosts, [root], "pull-2")
    for (host, shard), first, second in zip(hosts, done, again, strict=True):
        (one,), (other,) = first.pulled, second.pulled
        closure = operator.closure(root, [shard], files=False)
        assert (one.host, one.shard, one.root) == (host.name, shard, root)
        assert one.received_bytes == one.readback_bytes == sum(size for _, size in closure.sizes())
        assert (other.received_bytes, other.readback_bytes) == (0, one.readback_bytes)
        assert (first.operations, first.refused_write) == ({}, "")
        assert ckptstore.open(host.store).verify(root, [shard], files=False).findings == ()
        stored = {stat.key for stat in ckptstore.open(host.store).backend.list("objects/")}
        assert stored == {object_key(need.digest) for need in closure.objects.values()}


def test_a_directory_that_a_host_was_not_given_is_out_of_its_reach(area: Path) -> None:
    operator = ckptstore.open(area / "operator", create=True)
    root = commit_two_shards(operator)
    access = Access(DIRECTORY, str(area / "operator"), operator.url)
    with (
        nothing_left(area),
        pytest.raises(ckptstore.CkptStoreError, match="belongs to the run, but to another host"),
    ):
        pull_on_hosts(access, [(new_host(area, 0), 0)], [root], "pull-1")


def test_a_host_needs_no_right_to_write_and_has_none(area: Path, s3: shared.SharedServer) -> None:
    operator = ckptstore.open(s3.url(**s3.url_options), create=True)
    root = commit_two_shards(operator)
    reading = {**NO_CREDENTIALS, **s3.server.read_only_environment()}
    access = Access(SERVER, operator.url, operator.url, host_environment=reading, read_only=True)
    hosts = [(new_host(area, number), number) for number in range(2)]
    before = {stat.key for stat in operator.backend.list("")}
    with nothing_left(area):
        untried, tried = pull_on_hosts(access, hosts, [root], "pull-1", try_to_write=[hosts[1][0]])
    assert {stat.key for stat in operator.backend.list("")} == before
    assert (untried.refused_write, tried.refused_write) == ("", "ReadOnlyError: writing key leases")
    assert "PutObject" not in untried.operations
    assert tried.operations["PutObject"] == 1
    assert untried.operations["GetObject"] <= 8
    assert untried.received_bytes >= untried.pulled[0].received_bytes > 64 * 64 * 4
    for path in (*area.rglob("*.jsonl"), *area.rglob("*.stderr")):
        assert s3.server.read_only_environment()["AWS_SECRET_ACCESS_KEY"] not in path.read_text()


def test_that_a_write_was_not_refused_fails_the_run(area: Path, s3: shared.SharedServer) -> None:
    operator = ckptstore.open(s3.url(), create=True)
    root = commit_two_shards(operator)
    writing = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    access = Access(BUCKET, operator.url, operator.url, host_environment=writing)
    host = new_host(area, 0)
    with nothing_left(area), pytest.raises(NotAsPlannedError, match="host-0 to the operator's store: expected refused"):
        pull_on_hosts(access, [(host, 0)], [root], "pull-1", try_to_write=[host])


def test_without_credentials_a_host_gets_nothing(area: Path, s3: shared.SharedServer) -> None:
    operator = ckptstore.open(s3.url(**s3.url_options), create=True)
    root = commit_two_shards(operator)
    with nothing_left(area), pytest.raises(ckptstore.CkptStoreError, match="boto3 finds no credentials"):
        pull_on_hosts(Access(BUCKET, operator.url, operator.url), [(new_host(area, 0), 0)], [root], "pull-1")


def test_what_fails_on_a_host_fails_in_the_controller_as_it_was_raised(area: Path) -> None:
    operator = ckptstore.open(area / "operator", create=True)
    root = commit_two_shards(operator)
    access = Access(DIRECTORY, str(area / "operator"), operator.url, host_allow=(area / "operator",))
    hosts = [(new_host(area, number), number) for number in range(2)]
    with nothing_left(area), pytest.raises(NotFoundError, match="checkpoint"):
        pull_on_hosts(access, hosts, [Digest.of(b"nowhere")], "pull-1")
    need = max(operator.closure(root, [1]).objects.values(), key=lambda one: one.length)
    path = area / "operator" / object_key(need.digest)
    path.chmod(0o644)
    path.write_bytes(bytes(need.length))
    with nothing_left(area), pytest.raises(CorruptError, match=need.digest.short):
        pull_on_hosts(access, hosts, [root], "pull-2")
    assert [event.name for event in events.read(hosts[1][0].directory / "events" / "pull-2.jsonl")] == ["failed"]


def test_a_host_whose_process_cannot_even_start_is_named_with_its_last_words(area: Path) -> None:
    operator = ckptstore.open(area / "operator", create=True)
    root = commit_two_shards(operator)
    host = new_host(area, 0)
    (host.directory / "sources").unlink()
    (host.directory / "sources" / "trainer").mkdir(parents=True)
    (host.directory / "sources" / "trainer" / "__init__.py").write_text("raise RuntimeError('no such luck')\n")
    access = Access(DIRECTORY, str(area / "operator"), operator.url, host_allow=(area / "operator",))
    with pytest.raises(ckptstore.CkptStoreError, match=r"pull on host-0: ended with 1.*no such luck"):
        pull_on_hosts(access, [(host, 0)], [root], "pull-1")
