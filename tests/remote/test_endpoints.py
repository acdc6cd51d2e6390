"""What an endpoint honours is found out, recorded, and kept to."""

from __future__ import annotations

import json

import pytest

import ckptstore
from ckptstore.backends.s3.backend import S3Backend
from ckptstore.errors import ConflictError, ReadOnlyError, RefusedError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import receipt_key, receipt_prefix
from ckptstore.format.records import Feature
from ckptstore.store import Store
from ckptstore_cli.main import run
from tests.support import s3 as server
from tests.support.faultactions import Action
from tests.support.faultanswers import IgnoreConditional, RefuseConditional, RefuseWrites
from tests.support.faultbytes import ForgetChecksums
from tests.support.faultproxy import FaultProxy
from tests.support.s3 import SharedServer
from tests.support.training import make_training, save_steps


def url_by(bare_proxy: FaultProxy, prefix: str | None = None) -> str:
    return server.shared().url(prefix, endpoint_url=bare_proxy.endpoint, addressing="path")


def records(store: Store) -> int:
    header = Digest.of(store.backend.get("ckptstore.json"))
    return len(list(store.backend.list(receipt_prefix(header))))


def test_a_new_store_records_what_its_endpoint_honours(url: str) -> None:
    found = ckptstore.open(url, create=True).capabilities()
    assert found is not None
    assert (found.conditional_create, found.checksums, found.ranged_get) == (True, "checked", True)
    assert (found.versioning, found.object_lock, found.list_in_order) == (False, False, False)
    again = ckptstore.open(url, create=True)
    assert again.traffic is not None
    before = again.traffic
    assert again.capabilities() == found
    assert "PutObject" not in again.traffic.since(before).requests
    assert records(again) == 1
    assert sorted(stat.key.split("/")[0] for stat in again.backend.list("")) == ["ckptstore.json", "receipts"]


def test_versioning_and_object_lock_are_seen(s3: SharedServer) -> None:
    bucket = server.new_bucket()
    with_lock = f"{bucket}-lock"
    client = server.client()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    client.create_bucket(Bucket=with_lock, ObjectLockEnabledForBucket=True)
    client.close()
    versioned, locked = (ckptstore.open(f"s3://{b}/x", create=True).capabilities() for b in (bucket, with_lock))
    assert versioned is not None
    assert locked is not None
    assert (versioned.versioning, versioned.object_lock) == (True, False)
    assert (locked.versioning, locked.object_lock) == (True, True)


@pytest.mark.parametrize("action", [IgnoreConditional, RefuseConditional])
def test_where_creating_overwrites_no_ref_is_moved(bare_proxy: FaultProxy, action: type[Action]) -> None:
    """F-156. The message says what could be lost."""
    bare_proxy.add(action())
    url = url_by(bare_proxy)
    store = ckptstore.open(url, create=True)
    found = store.capabilities()
    assert found is not None
    assert not found.conditional_create
    with pytest.raises(RefusedError, match=r"drop out of its history.*single-writer"):
        save_steps(store, "main", make_training(), 1)
    assert store.refs.names() == []
    assert list(store.backend.list("leases/")) == []


@pytest.mark.parametrize("action", [IgnoreConditional, RefuseConditional])
def test_a_store_that_was_made_for_a_single_writer_moves_them(bare_proxy: FaultProxy, action: type[Action]) -> None:
    """F-155, F-156."""
    bare_proxy.add(action())
    url = url_by(bare_proxy)
    store = ckptstore.open(url, create=True, single_writer=True)
    Feature.parse(store.backend.get("features/single-writer"))
    assert ckptstore.open(url).single_writer
    root = save_steps(store, "main", make_training(), 2)[-1]
    assert ckptstore.open(url).head("main") == root
    with pytest.raises(ConflictError):
        store.move_ref("main", root, None)
    assert store.verify("main").ok


def test_checksums_that_are_forgotten_are_seen(bare_proxy: FaultProxy) -> None:
    bare_proxy.add(ForgetChecksums())
    found = ckptstore.open(url_by(bare_proxy), create=True).capabilities()
    assert found is not None
    assert found.checksums == "ignored"


def test_what_nobody_recorded_is_found_out_by_the_first_who_moves_a_ref(url: str) -> None:
    store = ckptstore.open(url, create=True)
    header = Digest.of(store.backend.get("ckptstore.json"))
    for stat in list(store.backend.list(receipt_prefix(header))):
        store.backend.delete(stat.key)
    fresh = ckptstore.open(url)
    save_steps(fresh, "main", make_training(), 1)
    assert records(fresh) == 1


def test_a_record_that_is_damaged_or_of_another_release_does_not_count(url: str) -> None:
    store = ckptstore.open(url, create=True)
    header = Digest.of(store.backend.get("ckptstore.json"))
    (stat,) = store.backend.list(receipt_prefix(header))
    good = store.backend.get(stat.key)
    store.backend.delete(stat.key)
    other = good.replace(b"conditional_create", b"conditional_wonder")
    store.backend.create(receipt_key(header, Digest.of(other)), other)
    store.backend.create(receipt_key(header, Digest.of(b"")), good.replace(b"checked", b"ignored"))
    fresh = ckptstore.open(url)
    assert fresh.capabilities() == store.capabilities()
    assert records(fresh) == 3


def test_who_may_only_read_gets_what_is_recorded_and_finds_out_nothing(bare_proxy: FaultProxy) -> None:
    url = url_by(bare_proxy)
    store = ckptstore.open(url, create=True)
    bare_proxy.add(RefuseWrites())
    reader = ckptstore.open(url)
    assert reader.capabilities() == store.capabilities()
    with pytest.raises(ReadOnlyError, match="may not write"):
        reader.capabilities(probe=True)


def test_ckpt_init_and_ckpt_endpoint_tell(bare_proxy: FaultProxy, capsys: pytest.CaptureFixture[str]) -> None:
    bare_proxy.add(IgnoreConditional())
    url = url_by(bare_proxy)
    assert run(["init", url]) == 0
    assert "no conditional writes" in capsys.readouterr().err
    assert run(["endpoint", "--store", url]) == 0
    lines = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    assert lines["conditional_create"] == "no"
    assert lines["checksums"] == "checked"
    bare_proxy.heal()
    assert run(["endpoint", "--probe", "--store", url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["conditional_create"] is True
    assert told["single_writer"] is False
    assert run(["init", url]) == 0
    assert "already a store" in capsys.readouterr().out
    assert run(["endpoint", "--store", "memory:x"]) in (2, 4)


def test_probing_leaves_nothing_behind(url: str) -> None:
    store = ckptstore.open(url, create=True)
    keys = {stat.key for stat in store.backend.list("")}
    assert isinstance(store.backend, S3Backend)
    store.backend.probe()
    assert {stat.key for stat in store.backend.list("")} == keys
