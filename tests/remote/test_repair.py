"""Repair with a real server: a bucket from a directory, and a directory from a bucket (B066)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckptstore
from ckptstore.backends.s3.address import S3Address
from ckptstore.format.keys import ref_key
from ckptstore.repairs.header import repair_header
from ckptstore.repairs.repair import repair
from tests.support import s3 as server
from tests.support.backends import quarantined_objects
from tests.support.damages import DAMAGES, ON_ANY_BACKEND, World, build, clear, opened
from tests.support.faultactions import GoDown
from tests.support.faultproxy import FaultProxy

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(built: World, tmp_path: Path) -> World:
    return opened(built, tmp_path)


@pytest.fixture
def bucket(world: World, url: str) -> str:
    """URL of a store in a bucket to which the checkpoint was pushed."""
    ckptstore.push(world.open("far"), ckptstore.open(url, create=True), world.second, ref="main")
    return url


def spoil(client: S3Client, url: str, key: str, damage: str, scratch: Path) -> bytes:
    """Do to an object of a bucket what can happen to it; returns the bytes that it has then."""
    address = S3Address.parse(url)
    name = {"Bucket": address.bucket, "Key": address.prefix + key}
    (scratch / "spoilt").mkdir(exist_ok=True)
    there, other = scratch / "spoilt" / "it", scratch / "spoilt" / "another"
    there.write_bytes(client.get_object(**name)["Body"].read())  # type: ignore[arg-type]
    other.write_bytes(b"another")
    DAMAGES[damage](there, other)
    if not there.exists():
        client.delete_object(**name)  # type: ignore[arg-type]
        return b""
    client.put_object(**name, Body=there.read_bytes())  # type: ignore[arg-type]
    return there.read_bytes()


def test_a_bucket_is_repaired_from_a_directory(world: World, bucket: str, client: S3Client, tmp_path: Path) -> None:
    """Every key with the next kind of damage; what was there is kept aside."""
    far = ckptstore.open(bucket)
    keys = sorted(dict(far.closure(world.second).sizes()))
    bad = {}
    for number, key in enumerate(keys):
        damage = ON_ANY_BACKEND[number % len(ON_ANY_BACKEND)]
        bad[key] = spoil(client, bucket, key, damage, tmp_path), damage
    assert {finding.key for finding in ckptstore.open(bucket).verify(world.second).findings} <= set(keys)
    done = repair(ckptstore.open(bucket), world.second, [world.open("far")])
    assert done.ok
    assert {item.key for item in done.healed} == set(keys)
    assert all(str(item.place) for item in done.healed)
    backend = far.backend
    for key, (data, damage) in bad.items():
        assert quarantined_objects(backend, key) == ([] if damage == "missing" else [data])  # type: ignore[arg-type]
    assert ckptstore.open(bucket).verify("main").ok
    assert done.receipt is not None
    assert done.receipt.method == "server-read"


def test_a_directory_is_repaired_from_a_bucket_that_it_knows(world: World, bucket: str) -> None:
    ckptstore.add_remote(world.open(), "bucket", bucket)
    keys = sorted(dict(world.open().closure(world.second).sizes()))
    for key in keys:
        clear(world.file(key))
    done = repair(world.open(), world.second)
    assert done.ok
    assert {item.source for item in done.healed} == {"remote bucket"}
    assert world.open().verify("main").ok


def test_only_what_is_damaged_passes_the_network(world: World, bucket: str, client: S3Client, tmp_path: Path) -> None:
    key = next(iter(world.open().closure(world.second).objects))
    size = dict(world.open().closure(world.second).sizes())[key]
    clear(world.file(key))
    source = ckptstore.open(bucket)
    assert source.traffic is not None
    before = source.traffic
    assert repair(world.open(), world.second, [source]).ok
    assert source.traffic.since(before).received_bytes < size + 8192
    spoil(client, bucket, key, "cut to half", tmp_path)
    target = ckptstore.open(bucket)
    assert target.traffic is not None
    before = target.traffic
    assert repair(target, world.second, [world.open()]).ok
    assert target.traffic.since(before).sent_bytes < size + 8192


def test_an_endpoint_that_is_away_stops_no_other_source(
    world: World, bucket: str, proxy: FaultProxy, s3: server.SharedServer
) -> None:
    options = {"endpoint_url": proxy.endpoint, "addressing": "path", "operation_seconds": "2", "attempt_seconds": "1"}
    address = S3Address.parse(bucket)
    source = ckptstore.open(s3.url(address.prefix.rstrip("/"), **options))
    proxy.add(GoDown(60.0))
    for key in dict(world.open().closure(world.second).sizes()):
        clear(world.file(key))
    done = repair(world.open(), world.second, [source, world.open("far")])
    assert done.ok
    assert len(done.notes) == 1


def test_records_of_a_bucket_are_repaired(world: World, bucket: str, client: S3Client, tmp_path: Path) -> None:
    """Its ref by the record's own check, its receipt put aside, its header by what its endpoint was found to honour."""
    far = ckptstore.open(bucket)
    receipt = next(stat.key for stat in far.backend.list(f"receipts/{world.second.hex}/"))
    spoil(client, bucket, receipt, "text", tmp_path)
    spoil(client, bucket, ref_key("main", 1), "bit flipped in the middle", tmp_path)
    done = repair(ckptstore.open(bucket), "main")
    assert done.ok
    assert {item.key for item in done.healed} == {receipt, ref_key("main", 1)}
    assert far.backend.stat(receipt) is None
    good = far.backend.get("ckptstore.json")
    spoil(client, bucket, "ckptstore.json", "bit flipped in the middle", tmp_path)
    spoil(client, bucket, "ckptstore.json", "last byte lost", tmp_path)
    (wrote,) = repair_header(bucket).healed
    assert "endpoint" in wrote[1] or "receipts" in wrote[1]
    assert far.backend.get("ckptstore.json") == good
    assert ckptstore.open(bucket).verify("main").ok
