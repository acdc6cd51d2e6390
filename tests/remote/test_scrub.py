"""A scrub of a bucket, against a real server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckptstore
from ckptstore.backends.s3.address import S3Address
from ckptstore.findings import Kind
from ckptstore.readbacks.durability import ledger
from ckptstore.readbacks.scrub import scrub
from ckptstore.remotes import add_remote
from ckptstore.store import Store
from tests.support.buckets import layers, through, traffic
from tests.support.faultactions import ResetResponse
from tests.support.faultproxy import FaultProxy
from tests.support.s3 import SharedServer
from tests.support.training import commit_state

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

DAY = 86400.0


@pytest.fixture
def bucket(s3: SharedServer) -> Store:
    """A store in a bucket with two checkpoints, and an object that nothing leads to."""
    store = ckptstore.open(s3.url(**s3.url_options), create=True)
    for step in (1, 2):
        commit_state(store, "main", [ckptstore.TrainingState(model=layers(step))], step)
    store.objects.put_object(b"nobody leads here" * 100)
    return ckptstore.open(store.url)


def test_a_bucket_is_scrubbed_whole_and_then_only_what_is_due(bucket: Store) -> None:
    done = scrub(bucket)
    assert (done.damaged, done.ended_by, done.unreferenced_keys) == ((), "", 1)
    assert done.method.value == "server-read"
    again = ckptstore.open(bucket.url)
    before = traffic(again)
    done = scrub(again, max_age=DAY)
    assert done.read_keys == 0
    asked = traffic(again).since(before)
    documents = sum(stat.size for stat in bucket.backend.list("documents/"))
    assert asked.received_bytes < documents + 400_000, "no object is fetched again"


def test_damage_in_a_bucket_is_found_and_named(bucket: Store, client: S3Client) -> None:
    root = bucket.resolve("main")
    key, gone = sorted(bucket.closure(root).objects)[:2]
    address = S3Address.parse(bucket.url)
    client.put_object(Bucket=address.bucket, Key=f"{address.prefix}{key}", Body=b"other bytes")
    bucket.backend.delete(gone)
    done = scrub(ckptstore.open(bucket.url))
    assert {damage.finding.key: damage.finding.kind for damage in done.damaged} == {
        key: Kind.CORRUPT,
        gone: Kind.MISSING,
    }
    assert all(damage.hurts is not None and root in damage.hurts for damage in done.damaged)


def test_a_budget_ends_it_and_the_next_one_goes_on(bucket: Store) -> None:
    first = scrub(bucket, max_bytes=500_000)
    assert first.ended_by == "bytes"
    done = scrub(ckptstore.open(bucket.url), max_age=DAY)
    assert done.ended_by == ""
    assert done.recent_keys >= first.read_keys


def test_a_lost_connection_now_and_then_is_no_damage(bucket: Store, s3: SharedServer, bare_proxy: FaultProxy) -> None:
    prefix = S3Address.parse(bucket.url).prefix
    store = through(bare_proxy, s3, prefix.rstrip("/"))
    bare_proxy.add(ResetResponse(100), method="GET", path="objects/", times=3)
    assert scrub(store).damaged == ()


def test_a_remote_that_was_scrubbed_counts_in_the_ledger(bucket: Store, tmp_path: Path) -> None:
    here = ckptstore.open(tmp_path / "here", create=True)
    root = bucket.resolve("main")
    ckptstore.pull(bucket, here, root, ref="main")
    add_remote(here, "bucket", bucket.url)
    scrub(bucket, keeper=here)
    found = ledger(here, [root], ask={"bucket": bucket})
    assert any(holder.names == ("bucket",) for holder in found.holders)
    assert all(
        any(copy.evidence is not None and not copy.holder.here for copy in item.copies) for item in found.roots[0].keys
    )
