"""What the endpoint holds until a date: pins with a date, and collections that meet what is held."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

import ckptstore
from ckptstore import Digest
from ckptstore.backends.s3.backend import S3Backend
from ckptstore.collection.collect import collect
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.errors import RefusedError
from ckptstore.format.keys import document_key, object_key
from ckptstore.pinning import list_pins, pin, unpin
from ckptstore.store import Store
from ckptstore_cli.main import run
from tests.support.faultanswers import RefuseWrites
from tests.support.faultproxy import FaultProxy
from tests.support.lines import kept, line, planned, reasons, saved, whole
from tests.support.s3 import SharedServer

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

DAY = timedelta(days=1)
LAST = Policy((KeepLast(1),))


def soon(days: int = 1) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + days * DAY


@pytest.fixture
def bucket(s3: SharedServer, client: S3Client) -> str:
    """A new bucket with object lock."""
    name = f"lock-{secrets.token_hex(6)}"
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    return name


@pytest.fixture
def locked(bucket: str) -> Store:
    """A store in it."""
    return ckptstore.open(f"s3://{bucket}/x", create=True)


def retention(client: S3Client, bucket: str, key: str) -> dict[str, Any]:
    found: Any = client.get_object_retention(Bucket=bucket, Key=f"x/{key}")["Retention"]
    return {"Mode": found["Mode"], "RetainUntilDate": found["RetainUntilDate"].astimezone(UTC)}


def closure(store: Store, root: Digest) -> list[str]:
    return [key for key, _ in store.closure(root).sizes()]


def backend(store: Store) -> S3Backend:
    assert isinstance(store.backend, S3Backend)
    return store.backend


def test_a_pin_with_a_date_holds_every_key_and_itself(locked: Store, bucket: str, client: S3Client) -> None:
    root, until = saved(locked, 1), soon()
    made = pin(locked, root, reason="paper", until=until)
    for key in (*closure(locked, root), made.key):
        assert retention(client, bucket, key) == {"Mode": "GOVERNANCE", "RetainUntilDate": until}
        (version,) = client.list_object_versions(Bucket=bucket, Prefix=f"x/{key}")["Versions"]
        with pytest.raises(ClientError, match="AccessDenied"):
            client.delete_object(Bucket=bucket, Key=f"x/{key}", VersionId=version["VersionId"])
    assert [(item.key, item.until) for item in list_pins(ckptstore.open(locked.url))] == [(made.key, until)]


def test_a_longer_date_takes_the_place_of_a_shorter_one_and_never_the_other_way(
    locked: Store, bucket: str, client: S3Client
) -> None:
    root = saved(locked, 1)
    dates = [soon(2), soon(3), soon(1)]
    for until in dates:
        pin(locked, root, until=until)
    for key in closure(locked, root):
        assert retention(client, bucket, key)["RetainUntilDate"] == dates[1]
    assert sorted(item.until for item in list_pins(locked) if item.until is not None) == sorted(dates)


def test_a_pin_that_is_held_is_not_removed(locked: Store, bucket: str, client: S3Client) -> None:
    root = saved(locked, 1)
    plain, held = pin(locked, root, reason="plain"), pin(locked, root, until=soon())
    with pytest.raises(RefusedError, match=f"{held.key} is held until"):
        unpin(locked, root)
    assert {item.key for item in list_pins(locked)} == {plain.key, held.key}
    assert run(["pin", "--remove", root.hex, "--store", locked.url]) == 5


def test_where_there_is_no_object_lock_nothing_is_pinned(url: str) -> None:
    """Also in a bucket that only keeps versions."""
    store = ckptstore.open(url, create=True)
    root = saved(store, 1)
    with pytest.raises(RefusedError, match="no object lock"):
        pin(store, root, until=soon())
    assert list_pins(store) == []
    assert pin(store, root).until is None


def test_what_is_held_is_kept_though_its_pin_is_hidden(locked: Store, bucket: str, client: S3Client) -> None:
    """A DELETE without a version succeeds in such a bucket; so a collection asks, and does not just try."""
    roots, until = line(locked, [1, 2, 3]), soon()
    made = pin(locked, roots[0], until=until)
    client.delete_object(Bucket=bucket, Key=f"x/{made.key}")
    assert list_pins(locked) == []
    done = collect(ckptstore.open(locked.url), LAST, delete=True).plan
    assert kept(done) == {roots[0], roots[2]}
    assert reasons(done, roots[0]) == f"held by the endpoint until {until:%Y-%m-%dT%H:%M:%SZ}"
    assert [item.root for item in done.retired] == [roots[1]]
    assert [whole(locked, root) for root in roots] == [True, False, True]


def test_held_keys_among_what_goes_are_told_and_stay_and_the_rest_goes(
    locked: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what a held document needs."""
    roots, until = line(locked, [1, 2, 3]), soon()
    (shard,) = locked.checkpoint(roots[0]).shards
    (chunk,) = (key for key in closure(locked, roots[1]) if key.startswith("objects/"))
    for key in (document_key(shard), chunk):
        backend(locked).hold(key, until)
    below = {key for key in closure(locked, roots[0]) if key != document_key(roots[0])}
    assert run(["gc", "--keep-last", "1", "--store", locked.url]) == 0
    told = capsys.readouterr().err
    assert all(f"{key} stays: the endpoint holds it until" in told for key in (document_key(shard), chunk))
    done = collect(locked, LAST, delete=True)
    assert done.swept is not None
    assert done.swept.whole
    assert {item.key for item in done.plan.held} == {document_key(shard), chunk}
    assert all(locked.backend.stat(key) is not None for key in (*below, chunk))
    gone = [key for key in closure(locked, roots[2]) if locked.backend.stat(key) is None]
    assert gone == []
    assert {stat.key for stat in done.plan.deletions}.isdisjoint({*below, chunk})
    assert done.plan.deletions
    assert collect(locked, LAST, delete=True).plan.deletions == ()


def test_where_the_bucket_holds_everything_writers_work_and_nothing_is_deleted(
    locked: Store, bucket: str, client: S3Client
) -> None:
    client.put_object_lock_configuration(
        Bucket=bucket,
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}},
        },
    )
    roots = line(locked, [1, 2])
    assert backend(locked).held_until(document_key(roots[0])) is not None
    done = collect(locked, LAST, delete=True).plan
    assert kept(done) == set(roots)
    assert done.deletions == ()
    assert list(locked.backend.list("leases/")) == []


def test_a_legal_hold_has_no_end(locked: Store, bucket: str, client: S3Client) -> None:
    roots = line(locked, [1, 2])
    client.put_object_legal_hold(Bucket=bucket, Key=f"x/{document_key(roots[0])}", LegalHold={"Status": "ON"})
    assert kept(planned(locked, KeepLast(1))) == set(roots)


def test_what_is_not_there_is_not_held(locked: Store, url: str) -> None:
    assert backend(locked).held_until(object_key(Digest.of(b"none"))) is None
    plain = ckptstore.open(url, create=True)
    assert backend(plain).held_until(document_key(saved(plain, 1))) is None


def test_a_collection_asks_about_holds_only_where_there_may_be_any(url: str) -> None:
    store = ckptstore.open(url, create=True)
    line(store, [1, 2, 3])
    assert store.traffic is not None
    before = store.traffic
    assert planned(store, KeepLast(1)).deletions
    assert "HeadObject" not in store.traffic.since(before).requests
    assert "PutObject" not in store.traffic.since(before).requests


def test_ckpt_gc_and_ckpt_pin_work_in_a_bucket(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = ckptstore.open(url, create=True)
    roots = line(store, [1, 2, 3])
    assert run(["pin", roots[0].hex, "--store", url]) == 0
    assert run(["gc", "--keep-last", "1", "--delete", "--yes", "--store", url]) == 0
    assert "retire  " in capsys.readouterr().out
    assert [whole(store, root) for root in roots] == [True, False, True]
    assert run(["gc", "--store", url]) == 0
    assert "would delete 0 keys" in capsys.readouterr().out


def test_keys_that_cannot_be_deleted_are_told_and_the_exit_code_says_so(
    bare_proxy: FaultProxy, s3: SharedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = s3.url(endpoint_url=bare_proxy.endpoint, addressing="path")
    store = ckptstore.open(url, create=True)
    roots = line(store, [1, 2])
    bare_proxy.add(RefuseWrites(), method="POST")  # many at a time are deleted so
    assert run(["gc", "--keep-last", "1", "--delete", "--yes", "--store", url]) == 7
    out, err = capsys.readouterr()
    assert "it could not be deleted: " in err
    assert "AccessDenied" in err
    assert "left: run it again" in out.splitlines()[-1]
    bare_proxy.heal()
    assert run(["gc", "--keep-last", "1", "--delete", "--yes", "--store", url]) == 0
    assert [whole(store, root) for root in roots] == [False, True]
