"""Push and pull with a real server: what arrives is what was sent, whatever lies there already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.backends.s3.address import S3Address
from ckptstore.store import Store
from ckptstore_cli.main import run
from tests.support import s3 as server
from tests.support.pairs import states
from tests.support.training import commit_state

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return ckptstore.open(tmp_path / "near", create=True)


@pytest.fixture
def root(store: Store) -> Digest:
    commit_state(store, "main", states(3.0), 1)
    return commit_state(store, "main", states(), 2)


def sizes(store: Store, root: Digest) -> dict[str, int]:
    return dict(store.closure(root).sizes())


def test_a_checkpoint_goes_there_and_back(store: Store, root: Digest, url: str, tmp_path: Path) -> None:
    far = ckptstore.open(url, create=True)
    done = ckptstore.push(store, far, root, ref="main")
    keys = sizes(store, root)
    assert (done.sent_keys, done.sent_bytes) == (len(keys), sum(keys.values()))
    assert (done.receipt.method, done.receipt.bytes_read) == ("server-read", sum(keys.values()))
    assert done.receipt in store.receipts(root)
    other = ckptstore.open(tmp_path / "other", create=True)
    ckptstore.pull(ckptstore.open(url), other, root, ref="main")
    assert other.verify("main").ok
    assert sizes(other, root) == keys
    fresh = states(9.0)[0]
    assert other.restore(root, fresh, shard=0).checkpoint.step == 2


def test_bad_bytes_in_a_bucket_are_replaced_and_kept_aside(
    store: Store, root: Digest, url: str, client: S3Client
) -> None:
    """B066 (treeverse/dvc#7268): flipped, cut and emptied; and a second checkpoint that shares them."""
    far = ckptstore.open(url, create=True)
    ckptstore.push(store, far, root)
    address = S3Address.parse(url)
    objects = sorted(store.closure(root).objects)[:3]
    for key, damage in zip(objects, (lambda d: b"\0" + d[1:], lambda d: d[:-1], lambda _: b""), strict=True):
        client.put_object(Bucket=address.bucket, Key=address.prefix + key, Body=damage(store.backend.get(key)))
    later = commit_state(store, "main", states(), 3)
    shared = set(objects) & set(store.closure(later).objects)
    done = ckptstore.push(store, ckptstore.open(url), later)
    assert done.repaired_keys == len(shared) > 0
    assert far.verify(later).ok
    aside = client.list_objects_v2(Bucket=address.bucket, Prefix=f"{address.prefix}quarantine/")["Contents"]
    assert len(aside) == done.repaired_keys


def test_a_push_is_continued_with_what_is_there(store: Store, root: Digest, url: str) -> None:
    far = ckptstore.open(url, create=True)
    keys = sizes(store, root)
    there = sorted(store.closure(root).objects)[::2]
    for key in there:
        far.backend.create(key, store.backend.get(key))
    target = ckptstore.open(url)
    assert target.traffic is not None
    before = target.traffic
    done = ckptstore.push(store, target, root)
    assert done.present_keys == len(there)
    assert done.sent_bytes == sum(size for key, size in keys.items() if key not in there)
    assert target.traffic.since(before).sent_bytes < done.sent_bytes + 8192


def test_what_a_bucket_keeps_in_versions_is_accepted_by_its_age(
    store: Store, root: Digest, s3: server.SharedServer, client: S3Client
) -> None:
    bucket = server.new_bucket()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    url = s3.url(bucket=bucket)
    far = ckptstore.open(url, create=True)
    keys = sizes(store, root)
    ckptstore.push(store, far, root)
    done = ckptstore.push(store, ckptstore.open(url), root, max_age=3600)
    assert (done.accepted_keys, done.receipt.bytes_read) == (len(keys), 0)
    key = max(store.closure(root).objects)
    data = store.backend.get(key)
    client.put_object(Bucket=bucket, Key=S3Address.parse(url).prefix + key, Body=bytes([data[0] ^ 1]) + data[1:])
    done = ckptstore.push(store, ckptstore.open(url), root, max_age=3600)
    assert (done.accepted_keys, done.repaired_keys) == (len(keys) - 1, 1)
    done = ckptstore.push(store, ckptstore.open(url), root)
    assert done.receipt.bytes_read == sum(keys.values())
    assert far.verify(root).ok


def test_a_bucket_without_versions_is_read_whatever_the_age(store: Store, root: Digest, url: str) -> None:
    ckptstore.push(store, ckptstore.open(url, create=True), root)
    done = ckptstore.push(store, ckptstore.open(url), root, max_age=3600)
    assert done.present_keys == len(sizes(store, root))
    assert any("keeps no versions" in note for note in done.notes)


def test_the_command_prints_what_it_took_and_the_plan_said_so(
    store: Store, root: Digest, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ckptstore.open(url, create=True)
    found = []
    for words in (("plan", "push"), ("push",)):
        assert run([*words, "main", url, "--json", "--store", store.url]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plan, done = found
    assert plan["traffic"] == done["traffic"]
    assert done["traffic"]["source"] is None
    target = done["traffic"]["target"]
    assert target["total_requests"] == sum(target["requests"].values())
    assert target["sent_bytes"] > done["sent_bytes"] == sum(sizes(store, root).values())
    assert run(["push", "main", url, "--store", store.url]) == 0
    printed = capsys.readouterr().out
    assert f"at {url} (DeleteObject 1, GetObject" in printed
    assert "bytes received" in printed or "received" in printed
