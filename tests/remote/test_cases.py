"""Faults of remote storage that others have reported, on a real bucket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import BackendError, CorruptError, NotFoundError
from ckptstore.format.digest import Digest
from ckptstore.store import Store
from tests.remote.faultworld import broken, proofs, seed
from tests.support.faultactions import Action, Call, Overlong, ResetResponse, Truncate
from tests.support.faultanswers import OwnEtags, Status
from tests.support.faultbytes import FlipRequest, StoreFraming
from tests.support.faultproxy import FaultProxy
from tests.support.http1 import Request
from tests.support.s3 import BUCKET
from tests.support.training import make_training

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MIB = 1 << 20


@pytest.fixture
def pushed(url: str) -> Store:
    """A bucket with the checkpoints of the seed, pushed there."""
    target = ckptstore.open(url, create=True)
    ckptstore.push(seed().store(), target, seed().root, ref="main")
    return target


def name_of(store: Store, key: str) -> str:
    """Where a key of a store lies in the bucket."""
    prefix = store.url.removeprefix(f"s3://{BUCKET}/").partition("?")[0]
    return f"{prefix}/{key}"


def body_of(client: S3Client, name: str) -> bytes:
    return client.get_object(Bucket=BUCKET, Key=name)["Body"].read()


def largest(store: Store) -> str:
    needs = store.closure(seed().root).objects
    return max(needs, key=lambda key: needs[key].length)


def flipped(data: bytes) -> bytes:
    return data[:7] + bytes([data[7] ^ 4]) + data[8:]


def quarantined(client: S3Client, store: Store) -> list[bytes]:
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=name_of(store, "quarantine/"))
    return [body_of(client, item["Key"]) for item in listed.get("Contents", [])]


def test_bad_bytes_under_the_right_name_are_found_put_aside_and_sent_again(pushed: Store, client: S3Client) -> None:
    """B066: treeverse/dvc#7268, #5502, #10498. A key that is there proves nothing: push reads it back."""
    root, source = seed().root, seed().store()
    one, two, three = sorted(pushed.closure(root).objects)[:3]
    document = next(key for key in pushed.closure(root).documents if not key.endswith(root.hex))
    bad = {
        one: flipped(source.backend.get(one)),
        two: source.backend.get(two)[:-9],
        three: b"",
        document: flipped(source.backend.get(document)),
    }
    for key, data in bad.items():
        client.put_object(Bucket=BUCKET, Key=name_of(pushed, key), Body=data)
    report = ckptstore.open(pushed.url).verify(root)
    assert report.exit_code == 3
    assert document in {finding.key for finding in report.findings}
    assert all(finding.place.checkpoint == root for finding in report.findings)
    assert proofs(pushed, root) == 1

    done = ckptstore.push(source, ckptstore.open(pushed.url), root, ref="main")
    assert (done.repaired_keys, done.sent_keys) == (4, 4)
    assert sorted(quarantined(client, pushed)) == sorted(bad.values())
    assert ckptstore.open(pushed.url).verify("main").ok
    assert broken(ckptstore.open(pushed.url)) == []


def test_another_checkpoint_that_shares_bad_objects_is_pushed_whole(url: str, client: S3Client) -> None:
    """B066. What an earlier push left behind, and went bad since, is not taken for good by the next one."""
    source = seed().store()
    state = make_training().state()
    roots = []
    for label in ("one", "two"):
        attempt = source.begin(label)
        receipt = source.save_shard(state, attempt, step=0, binding={"label": label})
        roots.append(source.commit(attempt, [receipt]))
    target = ckptstore.open(url, create=True)
    ckptstore.push(source, target, roots[0])
    (shared, *_) = sorted(target.closure(roots[0]).objects)
    client.put_object(Bucket=BUCKET, Key=name_of(target, shared), Body=flipped(source.backend.get(shared)))
    done = ckptstore.push(source, ckptstore.open(url), roots[1])
    assert done.repaired_keys == 1
    assert done.sent_keys == 2  # the object, and the one document that they do not share
    for root in roots:
        assert ckptstore.open(url).verify(root).ok


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "absent"])
def test_pull_hands_out_nothing_that_is_bad(pushed: Store, client: S3Client, tmp_path: Path, damage: str) -> None:
    """B066."""
    key = sorted(pushed.closure(seed().root).objects)[-1]
    good = seed().keys[key]
    bad = {"flipped": flipped(good), "truncated": good[:-1], "empty": b""}
    if damage in bad:
        client.put_object(Bucket=BUCKET, Key=name_of(pushed, key), Body=bad[damage])
    else:
        client.delete_object(Bucket=BUCKET, Key=name_of(pushed, key))
    target = ckptstore.open(tmp_path / "clean", create=True)
    with pytest.raises((CorruptError, NotFoundError), match=key):
        ckptstore.pull(ckptstore.open(pushed.url), target, seed().root, ref="main")
    assert target.backend.stat(key) is None
    assert target.refs.names() == []
    assert broken(target) == []


def test_a_push_whose_source_lacks_an_object_leaves_neither_manifest_nor_root(url: str, proxy: FaultProxy) -> None:
    """B067: treeverse/dvc#4343, #10185."""
    source = seed().store()
    key = sorted(source.closure(seed().root).objects)[1]
    source.backend.delete(key)
    target = ckptstore.open(url, create=True)
    with pytest.raises(NotFoundError, match=rf"shard 0 .*{key}"):
        ckptstore.push(source, target, seed().root, ref="main")
    assert list(target.backend.list("documents/")) == []
    assert target.refs.names() == []
    assert target.receipts(seed().root) == []


def test_children_are_stored_before_parents_and_the_ref_comes_last(url: str, proxy: FaultProxy) -> None:
    """B067. Nothing is deleted to make room for what replaces it, either."""
    target = ckptstore.open(url, create=True)
    begun = len(proxy.log)
    ckptstore.push(seed().store(), target, seed().root, ref="main")
    log = proxy.log[begun:]
    kinds = [
        kind
        for entry in log
        if entry.method == "PUT"
        for kind in ("objects", "documents", "refs")
        if f"/{kind}/" in entry.target
    ]
    assert kinds == sorted(kinds, key=["objects", "documents", "refs"].index)
    documents = [entry.target for entry in log if entry.method == "PUT" and "/documents/" in entry.target]
    assert documents[-1].endswith(seed().root.hex)
    assert {entry.target.split("/")[3] for entry in log if entry.method == "DELETE"} == {"leases"}


def test_a_server_that_stores_chunk_framing_is_found_out(url: str, proxy: FaultProxy) -> None:
    """B069: boto/boto3#4435. The message names the key and the setting."""
    target = ckptstore.open(url, create=True)
    proxy.add(StoreFraming(), path="/(objects|documents)/")
    with pytest.raises(CorruptError, match=r"objects/.*checksum") as caught:
        ckptstore.push(seed().store(), target, seed().root, ref="main")
    assert caught.value.exit_code == 3
    assert list(target.backend.list("documents/")) == []
    assert proofs(target, seed().root) == 0
    proxy.heal()
    ckptstore.push(seed().store(), ckptstore.open(url), seed().root, ref="main")
    assert broken(ckptstore.open(url)) == []


@pytest.mark.parametrize("checksums", ["required", "supported", "sha256"])
def test_no_upload_is_framed_over_http_whatever_the_checksums(url: str, proxy: FaultProxy, checksums: str) -> None:
    """B069. By default no request bears a checksum that a server might not know."""
    seen: list[Request] = []
    proxy.add(Call(before=seen.append), method="PUT")
    target = ckptstore.open(f"{url}?checksums={checksums}", create=True)
    seen.clear()
    ckptstore.push(seed().store(), target, seed().root)
    assert seen
    for request in seen:
        names = {name.lower() for name, _ in request.headers}
        assert "x-amz-trailer" not in names
        assert request.header("Content-Encoding") is None
        flexible = {name for name in names if name.startswith("x-amz-checksum-")}
        expected = {"required": set(), "supported": {"x-amz-checksum-crc32"}, "sha256": {"x-amz-checksum-sha256"}}
        assert flexible == expected[checksums]
    assert target.verify(seed().root).ok


def test_a_small_upload_that_was_hurt_on_its_way_is_refused_by_the_server_and_sent_again(
    url: str, proxy: FaultProxy
) -> None:
    """B069, B072. A ref record has no digest for a name: were it stored with a flipped bit, the ref would be lost."""
    target = ckptstore.open(url, create=True)
    rule = proxy.add(FlipRequest(20), method="PUT", path="/(refs|receipts|documents)/", times=4)
    ckptstore.push(seed().store(), target, seed().root, ref="main")
    assert rule.hits == 4
    assert target.head("main") == seed().root
    assert broken(target) == []


@pytest.fixture(scope="module")
def large() -> tuple[Store, Digest]:
    """A checkpoint with a tensor of 17 MiB, so one chunk of 16 MiB, in memory."""
    store = seed().store()
    model = nn.Linear(1, 17 * MIB // 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(17 * MIB // 4, dtype=torch.float32)[:, None])
    attempt = store.begin("large")
    receipt = store.save_shard(ckptstore.TrainingState(model=model), attempt, step=0)
    return store, store.commit(attempt, [receipt])


def test_etags_prove_nothing_and_disprove_nothing(
    url: str, proxy: FaultProxy, client: S3Client, large: tuple[Store, Digest]
) -> None:
    """B071: jschneier/django-storages#276, seung-lab/cloud-files#49, HumanCellAtlas/data-store#958.

    Objects that another tool uploaded in parts of two sizes, and a server whose ETags are random.
    """
    source, root = large
    proxy.add(OwnEtags())
    target = ckptstore.open(url, create=True)
    ckptstore.push(source, target, root, ref="main")
    (chunk,) = [key for key, need in target.closure(root).objects.items() if need.length == 16 * MIB]
    data = source.backend.get(chunk)
    etags = set()
    for size in (5 * MIB, 7 * MIB):
        name = name_of(target, chunk)
        upload = client.create_multipart_upload(Bucket=BUCKET, Key=name)["UploadId"]
        parts = []
        for number, start in enumerate(range(0, len(data), size), 1):
            part = client.upload_part(
                Bucket=BUCKET, Key=name, UploadId=upload, PartNumber=number, Body=data[start : start + size]
            )
            parts.append({"ETag": part["ETag"], "PartNumber": number})
        client.complete_multipart_upload(
            Bucket=BUCKET,
            Key=name,
            UploadId=upload,
            MultipartUpload={"Parts": parts},  # type: ignore[typeddict-item]
        )
        etags.add(client.head_object(Bucket=BUCKET, Key=name)["ETag"])
        report = ckptstore.open(url).verify("main")
        assert report.findings == ()
        assert ckptstore.push(source, ckptstore.open(url), root).repaired_keys == 0
    assert len(etags) == 2
    assert all("-" in etag for etag in etags)
    # The right ETag and the wrong bytes: an object of the same length with its metadata copied along.
    client.put_object(Bucket=BUCKET, Key=name_of(target, chunk), Body=flipped(data))
    assert ckptstore.open(url).verify("main").exit_code == 3


@pytest.mark.parametrize(
    "action",
    [
        Truncate(1000),
        Truncate(1000, declared=False),
        ResetResponse(1000),
        Overlong(b"x" * 5),
        Overlong(b"x" * 5, declared="none"),
        Overlong(b"x" * 5, declared="only"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("lasts", [False, True])
def test_a_download_that_ends_early_or_late_never_gets_into_place(
    pushed: Store, proxy: FaultProxy, tmp_path: Path, action: Action, lasts: bool
) -> None:
    """B072: aws/aws-sdk-js#257, aws/aws-cli PR#10622. Length and digest are checked here, whatever the layers below
    say."""
    key = largest(pushed)
    rule = proxy.add(action, method="GET", path=key, times=None if lasts else 2)
    target = ckptstore.open(tmp_path / "here", create=True)
    source = ckptstore.open(f"{pushed.url}?operation_seconds=1&attempt_seconds=1")
    if lasts:
        with pytest.raises((CorruptError, BackendError), match=key):
            ckptstore.pull(source, target, seed().root, ref="main")
        assert target.backend.stat(key) is None
        assert not list((tmp_path / "here" / "tmp").glob("*"))
        proxy.heal()
        source = ckptstore.open(pushed.url)
    ckptstore.pull(source, target, seed().root, ref="main")
    assert rule.hits >= 2
    assert broken(target) == []


def test_an_object_that_changes_between_two_attempts_is_not_pieced_together(
    pushed: Store, proxy: FaultProxy, client: S3Client
) -> None:
    """B072. A download that broke begins anew: no range is ever asked for, so no two versions can be joined."""
    key = largest(pushed)
    good = seed().keys[key]
    name = name_of(pushed, key)
    seen: list[Request] = []

    def change(request: Request) -> None:
        seen.append(request)
        if len(seen) == 2:
            client.put_object(Bucket=BUCKET, Key=name, Body=good[:2000] + bytes(len(good) - 2000))

    proxy.add(Call(before=change), method="GET", path=key)
    proxy.add(ResetResponse(2000), method="GET", path=key, times=1)
    report = ckptstore.open(pushed.url).verify("main")
    assert {finding.key for finding in report.findings} == {key}
    assert report.exit_code == 3
    assert all(request.header("Range") is None for request in seen)


@pytest.mark.parametrize(
    ("action", "times"),
    [
        (Status(503, "SlowDown"), 8),
        (Status(503), 8),
        (Status(429, "TooManyRequests", retry_after=1), 4),
        (Status(200, "SlowDown"), 4),
    ],
    ids=repr,
)
def test_bursts_of_slow_down_are_ridden_out(url: str, proxy: FaultProxy, action: Action, times: int) -> None:
    """B074: goharbor/harbor#23005, StarRocks/starrocks#39917, ssl-hep/ServiceX PR#958. Told by status and by code."""
    target = ckptstore.open(url, create=True)
    rule = proxy.add(action, method="PUT", path="/(objects|documents)/", times=times)
    ckptstore.push(seed().store(), target, seed().root, ref="main")
    assert rule.hits == times
    proxy.heal()
    assert broken(target) == []


def test_a_push_that_gave_up_goes_on_where_it_was(url: str, proxy: FaultProxy) -> None:
    """B074. What arrived is read back and not sent again."""
    target = ckptstore.open(url, create=True)
    slow = target.url + "?operation_seconds=1&attempt_seconds=1"
    proxy.add(Status(503, "SlowDown"), method="PUT", path="/(objects|documents)/", skip=2)
    with pytest.raises(BackendError, match="again"):
        ckptstore.push(seed().store(), ckptstore.open(slow), seed().root, ref="main")
    assert proofs(target, seed().root) == 0
    arrived = {stat.key for stat in target.backend.list("objects/")}
    assert arrived
    proxy.heal()
    begun = len(proxy.log)
    done = ckptstore.push(seed().store(), ckptstore.open(url), seed().root, ref="main")
    assert done.present_keys == len(arrived)
    again = [entry.target for entry in proxy.log[begun:] if entry.method == "PUT"]
    assert not [target for target in again for key in arrived if key in target]
    assert broken(ckptstore.open(url)) == []


def uploads(client: S3Client) -> list[object]:
    return list(client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))


def test_there_is_no_multipart_upload_that_could_be_left_behind(
    url: str, proxy: FaultProxy, client: S3Client, large: tuple[Store, Digest], tmp_path: Path
) -> None:
    """B076: TileDB-Inc/TileDB#1068, s3tools/s3cmd#346, hesprs/sync-engine#283.

    Nothing is larger than 16 MiB, far below the limit of one PUT: so there are no parts to abort, to list or to count.
    """
    source, root = large
    store = ckptstore.open(url, create=True)
    ckptstore.push(source, store, root, ref="main")  # push
    attempt = store.begin("direct")
    model = nn.Linear(1, 17 * MIB // 4, bias=False)
    receipt = store.save_shard(ckptstore.TrainingState(model=model), attempt, step=0)  # direct save
    store.commit(attempt, [receipt])
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "log").write_bytes(os.urandom(17 * MIB))
    tree = store.put_tree(tmp_path / "evidence")  # a tree of files
    assert store.get_tree(tree, tmp_path / "back") == 17 * MIB
    key = max(store.closure(root).objects.items(), key=lambda item: item[1].length)[0]
    client.put_object(Bucket=BUCKET, Key=name_of(store, key), Body=b"bad")
    assert ckptstore.push(source, ckptstore.open(url), root).repaired_keys == 1  # repair
    sent = [entry for entry in proxy.log if entry.method in ("PUT", "POST")]
    assert max(entry.request_bytes for entry in sent) == 16 * MIB
    assert not [entry for entry in sent if "upload" in entry.target or entry.method == "POST"]
    assert uploads(client) == []


def test_a_push_that_is_killed_leaves_no_upload_behind(
    url: str, proxy: FaultProxy, client: S3Client, large: tuple[Store, Digest], tmp_path: Path
) -> None:
    """B076. SIGKILL while the second object is on its way."""
    source, root = large
    local = ckptstore.open(tmp_path / "local", create=True)
    ckptstore.push(source, local, root, ref="main")
    ckptstore.open(url, create=True)
    reached = threading.Event()
    release = threading.Event()

    def hold(_: Request) -> None:
        reached.set()
        release.wait(60)

    proxy.add(Call(before=hold), method="PUT", path="/objects/", skip=1, times=1)
    command = [sys.executable, "-c", "from ckptstore_cli.main import main; main()"]
    child = subprocess.Popen(
        [*command, "push", "main", url, "--store", str(tmp_path / "local")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert reached.wait(120)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        release.set()
    assert uploads(client) == []
    assert broken(ckptstore.open(url)) == []
    assert proofs(ckptstore.open(url), root) == 0
    ckptstore.push(local, ckptstore.open(url), root, ref="main")
    assert broken(ckptstore.open(url)) == []


@pytest.fixture(autouse=True)
def _no_upload_is_left(client: S3Client) -> Iterator[None]:
    yield
    assert uploads(client) == []
