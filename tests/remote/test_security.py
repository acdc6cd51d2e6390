"""Credentials stay where they are, TLS is verified, a right to read is enough, and hostile buckets do no harm."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.sax.saxutils import escape

import pytest

import ckptstore
from ckptstore.backends.s3.backend import S3Backend
from ckptstore.errors import BackendError, CkptStoreError, CorruptError, NotFoundError, ReadOnlyError
from ckptstore.format.records import RECORD_LIMIT
from ckptstore.store import Store
from ckptstore_cli.main import run
from tests.remote.faultworld import broken, proofs, seed
from tests.support import s3 as server
from tests.support.faultactions import Action, Call
from tests.support.faultanswers import Status, error_answer
from tests.support.faultproxy import FaultProxy
from tests.support.http1 import Request, Response
from tests.support.s3 import BUCKET, SharedServer
from tests.support.training import make_training

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

SECRET = "wJalrXUtnFEMIbPxRfiCYSECRETKEYxyz1234567"
TOKEN = "FwoGZXIvYXdzSESSIONTOKENabcdefghijklmnop"


@pytest.fixture
def pushed(url: str) -> Store:
    """A bucket with the checkpoints of the seed, pushed there."""
    target = ckptstore.open(url, create=True)
    ckptstore.push(seed().store(), target, seed().root, ref="main")
    return target


# -- credentials ------------------------------------------------------------------------------------------------------


BAD = {
    "wrong secret": {"AWS_SECRET_ACCESS_KEY": SECRET},
    "unknown key": {"AWS_ACCESS_KEY_ID": "AKIANOBODYKNOWSTHIS0", "AWS_SECRET_ACCESS_KEY": SECRET},
    "wrong secret and a token": {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN},
}


@pytest.mark.parametrize("bad", BAD)
def test_rejected_credentials_are_an_error_that_does_not_repeat_them(
    pushed: Store,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    bad: str,
) -> None:
    local = str(tmp_path / "local")
    ckptstore.push(seed().store(), ckptstore.open(local, create=True), seed().root, ref="main")
    for name, value in BAD[bad].items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.DEBUG, "ckptstore")
    for arguments in (
        ["verify", "main", "--store", pushed.url],
        ["push", "main", pushed.url, "--store", local],
        ["pull", "main", pushed.url, "--store", local],
        ["log", "main", "--store", pushed.url],
        ["init", pushed.url],
    ):
        assert run(arguments) == 7
        said = "".join(capfd.readouterr()) + caplog.text
        assert "renew the credentials" in said
        assert "Traceback" not in said
        assert SECRET not in said
        assert TOKEN not in said


def test_no_credential_is_in_a_store_a_receipt_a_repr_or_an_error(
    pushed: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, client: S3Client
) -> None:
    secrets = [os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_ACCESS_KEY_ID"]]
    store = ckptstore.open(pushed.url)
    store.add_receipt(store.verify("main").receipt(store.url))
    backend = store.backend
    assert isinstance(backend, S3Backend)
    text = [repr(store), repr(backend), repr(backend.address), store.url, str(vars(backend)), repr(backend.traffic)]
    for item in backend.list(""):
        text.append(backend.get(item.key).decode("latin-1"))
    for code in ("AccessDenied", "ExpiredToken", "SignatureDoesNotMatch", "InvalidAccessKeyId"):
        proxy.add(Status(403, code), times=2)
        with pytest.raises(CkptStoreError) as caught:
            ckptstore.open(pushed.url).head("main")
        proxy.heal()
        text += [
            str(caught.value),
            repr(caught.value),
            *map(repr, caught.value.__notes__ if hasattr(caught.value, "__notes__") else []),
        ]
    for secret in secrets:
        assert not [line for line in text if secret in line]


def test_nothing_found_is_said_as_such(pushed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(BackendError, match="finds no credentials"):
        ckptstore.open(pushed.url)
    with pytest.raises(BackendError, match="finds no credentials"):
        ckptstore.open(f"{pushed.url}?profile=nobody")


@dataclass
class EndingKeys(Action):
    """A server where keys are good for ``uses`` requests about objects; ``renew`` is called when they are refused."""

    old: str
    real: str
    uses: int
    renew: Callable[[], object]
    refused: int = 0

    def answer(self, request: Request) -> Response | None:
        if self.old not in (request.header("Authorization") or ""):
            return None
        self.uses -= "/objects/" in request.target
        if self.uses >= 0:
            return None
        self.refused += 1
        self.renew()
        return error_answer(400, "ExpiredToken", head=request.method == "HEAD")

    def request(self, request: Request) -> Request:
        authorization = request.header("Authorization") or ""
        if self.old not in authorization:
            return request
        return replace(request.with_header("Authorization", authorization.replace(self.old, self.real)), resign=True)


@pytest.mark.parametrize("pause", [None, 0.2], ids=["at-once", "slowly"])
def test_a_credentials_file_that_is_written_anew_in_the_middle_is_read_again(
    proxy: FaultProxy, s3: SharedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pause: float | None
) -> None:
    """The keys expire while a push is under way; whoever renews them in the file renews them here.

    Written in place, the file is empty for a moment, and then without its end.
    """
    file, admin, old = tmp_path / "credentials", s3.server.admin, "AKIAENDSSOON00000000"

    def content(access: str, secret: str) -> str:
        return f"[default]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n"

    def renew() -> None:
        whole = content(admin.access_key, admin.secret_key)
        if pause is None:
            atomically = tmp_path / "new"
            atomically.write_text(whole)
            atomically.replace(file)
            return
        for end in (0, 12, 30, len(whole) - 5, len(whole)):
            file.write_text(whole[:end])
            time.sleep(pause)

    class Renewal(Thread):
        """Starts once, however often it is asked to."""

        def once(self) -> None:
            with suppress(RuntimeError):
                self.start()

    file.write_text(content(old, SECRET))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    renewal = Renewal(target=renew)
    ending = EndingKeys(old, admin.access_key, 5, renewal.once)
    proxy.add(ending)
    target = ckptstore.open(s3.url(), create=True)
    ckptstore.push(seed().store(), target, seed().root, ref="main")
    renewal.join()
    assert ending.refused >= 1
    assert broken(target) == []


def test_a_credential_process_gives_new_keys_when_the_old_ones_end(
    pushed: Store, s3: SharedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keys with an end are renewed by boto3's own chain before each request that needs it."""
    admin, calls = s3.server.admin, tmp_path / "calls"
    script = tmp_path / "keys"
    script.write_text(
        f"#!{sys.executable}\n"
        "import datetime, json\n"
        f"open({str(calls)!r}, 'a').write('x')\n"
        "end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)\n"
        f"print(json.dumps({{'Version': 1, 'AccessKeyId': {admin.access_key!r}, 'SecretAccessKey': "
        f"{admin.secret_key!r}, 'Expiration': end.isoformat()}}))\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert ckptstore.open(pushed.url).verify("main").ok
    assert len(calls.read_text()) > 1


def test_without_a_renewal_the_push_ends_in_words_and_goes_on_later(url: str, proxy: FaultProxy) -> None:
    target = ckptstore.open(url, create=True)
    proxy.add(Status(400, "ExpiredToken"), path="/(objects|documents)/", skip=4)
    with pytest.raises(BackendError, match="ExpiredToken"):
        ckptstore.push(seed().store(), target, seed().root, ref="main")
    assert proofs(target, seed().root) == 0
    proxy.heal()
    arrived = len(list(target.backend.list("objects/")))
    done = ckptstore.push(seed().store(), ckptstore.open(url), seed().root, ref="main")
    assert done.present_keys >= arrived
    assert broken(target) == []


# -- TLS --------------------------------------------------------------------------------------------------------------


def test_a_certificate_that_nobody_vouches_for_is_refused(s3: SharedServer, capfd: pytest.CaptureFixture[str]) -> None:
    url = s3.url(endpoint_url=s3.server.https_endpoint, addressing="path")
    with pytest.raises(BackendError, match=r"TLS with .* failed.*ca_bundle= or AWS_CA_BUNDLE"):
        ckptstore.open(url, create=True)
    assert run(["init", url]) == 7
    assert "verification is never turned off" in capfd.readouterr().err


def test_the_authority_can_be_named_in_the_url_or_the_environment(
    s3: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptstore.open(s3.url(**s3.https_url_options), create=True)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(s3.authority))
    ckptstore.open(s3.url(endpoint_url=s3.server.https_endpoint, addressing="path"), create=True)


@pytest.mark.parametrize("option", ["verify=false", "verify=0", "use_ssl=false", "insecure=1", "ca_bundle="])
def test_no_option_turns_verification_off(s3: SharedServer, option: str) -> None:
    with pytest.raises(CkptStoreError):
        ckptstore.open(f"{s3.url(endpoint_url=s3.server.https_endpoint)}&{option}")


def test_a_bundle_that_is_not_there_or_of_somebody_else_is_an_error(s3: SharedServer, tmp_path: Path) -> None:
    other = server.certificates(tmp_path).authority
    for bundle, code in ((tmp_path / "none", 2), (other, 7)):
        with pytest.raises(CkptStoreError) as caught:
            ckptstore.open(s3.url(**{**s3.https_url_options, "ca_bundle": str(bundle)}), create=True)
        assert caught.value.exit_code == code


# -- rights -----------------------------------------------------------------------------------------------------------


def test_a_right_to_read_is_enough_to_verify_pull_and_look(
    pushed: Store, s3: SharedServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    local = str(tmp_path / "local")
    ckptstore.push(seed().store(), ckptstore.open(local, create=True), seed().root, ref="main")
    before = {item.key for item in pushed.backend.list("")}
    for name, value in s3.server.read_only_environment().items():
        monkeypatch.setenv(name, value)
    url = pushed.url
    assert run(["verify", "main", "--store", url]) == 0
    assert "no receipt is kept" in capfd.readouterr().err
    for arguments in (
        ["log", "main", "--store", url],
        ["show", "main", "--store", url],
        ["ls", "main", "--store", url],
        ["ref", "list", "--store", url],
        ["endpoint", "--store", url],
    ):
        assert run(arguments) == 0, arguments
    assert run(["init", str(tmp_path / "fresh")]) == 0
    assert run(["pull", "main", url, "--store", str(tmp_path / "fresh")]) == 0
    reader = ckptstore.open(url)
    assert reader.diff("main", "main", ckptstore.open(local)).same_state
    training = make_training(3)
    with reader.run("main", **training.objects()) as resumed:
        assert resumed.resume() == 2
    capfd.readouterr()
    assert run(["--json", "push", "main", url, "--store", local]) == 7
    told = json.loads(capfd.readouterr().err.splitlines()[-1])
    assert told["error"] == "read-only"
    with pytest.raises(ReadOnlyError):
        reader.move_ref("side", seed().root, None)
    training.step()
    with ckptstore.open(url).run("other", **training.objects()) as saving:
        saving.resume()
        with pytest.raises(ReadOnlyError):
            saving.save(3)
    assert {item.key for item in pushed.backend.list("")} == before


# -- what goes with requests ------------------------------------------------------------------------------------------


@pytest.fixture
def requests(proxy: FaultProxy) -> list[Request]:
    """Every request that comes through the proxy from now on."""
    found: list[Request] = []
    proxy.add(Call(before=found.append))
    return found


def test_encryption_by_the_server_is_asked_for_whenever_something_is_stored(
    url: str, requests: list[Request], client: S3Client
) -> None:
    """SSE-S3, there and back; also for what the probe, a lease and a repair store."""
    store = ckptstore.open(f"{url}?sse=AES256&storage_class=STANDARD", create=True)
    ckptstore.push(seed().store(), store, seed().root, ref="main")
    key = sorted(store.closure(seed().root).objects)[0]
    name = f"{url.removeprefix(f's3://{BUCKET}/')}/{key}"
    assert client.head_object(Bucket=BUCKET, Key=name)["ServerSideEncryption"] == "AES256"
    client.put_object(Bucket=BUCKET, Key=name, Body=b"bad")
    again = ckptstore.open(f"{url}?sse=AES256&storage_class=STANDARD")
    assert ckptstore.push(seed().store(), again, seed().root).repaired_keys == 1
    assert again.verify("main").ok
    puts = [request for request in requests if request.method == "PUT"]
    assert puts
    for request in puts:
        assert request.header("x-amz-server-side-encryption") == "AES256", request.target
        assert request.header("x-amz-storage-class") == "STANDARD", request.target


@dataclass
class AcceptKeys(Action):
    """A server that takes parameters of a key service that it does not have."""

    def request(self, request: Request) -> Request:
        for name, _ in request.headers:
            if name.lower().startswith("x-amz-server-side") or name.lower() == "x-amz-expected-bucket-owner":
                request = request.with_header(name, None)
        return replace(request, resign=True)


def test_a_key_service_and_the_bucket_s_owner_go_with_every_request_that_knows_them(
    url: str, proxy: FaultProxy, requests: list[Request]
) -> None:
    proxy.add(AcceptKeys())
    key, owner = "arn:aws:kms:us-east-1:111122223333:key/ab", "111122223333"
    store = ckptstore.open(f"{url}?sse=aws:kms&sse_kms_key_id={quote(key)}&bucket_owner={owner}", create=True)
    ckptstore.push(seed().store(), store, seed().root, ref="main")
    assert store.verify("main").ok
    assert {request.method for request in requests} == {"GET", "HEAD", "PUT", "DELETE"}
    for request in requests:
        assert request.header("x-amz-expected-bucket-owner") == owner, request.target
        if request.method == "PUT":
            assert request.header("x-amz-server-side-encryption") == "aws:kms", request.target
            assert request.header("x-amz-server-side-encryption-aws-kms-key-id") == key, request.target
        else:
            assert request.header("x-amz-server-side-encryption") is None, request.target


def test_the_user_agent_names_the_program(pushed: Store, requests: list[Request]) -> None:
    ckptstore.open(pushed.url).head("main")
    assert requests
    assert all("ckptstore" in (request.header("User-Agent") or "") for request in requests)


# -- buckets that are not what they should be -------------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_missing(s3: SharedServer, capfd: pytest.CaptureFixture[str]) -> None:
    url = s3.url(bucket="no-such-bucket-here")
    with pytest.raises(NotFoundError):
        ckptstore.open(url)
    with pytest.raises(NotFoundError, match="make the bucket"):
        ckptstore.open(url, create=True)
    assert run(["init", url]) == 4
    assert "make the bucket" in capfd.readouterr().err


@pytest.mark.parametrize("status", [301, 307, 400])
def test_a_bucket_in_another_region_is_said_to_be_elsewhere(pushed: Store, proxy: FaultProxy, status: int) -> None:
    code = {301: "PermanentRedirect", 307: "TemporaryRedirect", 400: "AuthorizationHeaderMalformed"}[status]
    proxy.add(Status(status, code))
    with pytest.raises(BackendError, match="region="):
        ckptstore.open(pushed.url)


def test_stores_in_one_bucket_and_one_within_another_do_not_see_each_other(url: str, client: S3Client) -> None:
    outer = ckptstore.open(url, create=True)
    ckptstore.push(seed().store(), outer, seed().root, ref="main")
    beside = ckptstore.open(f"{url}-beside", create=True)
    assert beside.refs.names() == []
    assert ckptstore.open(url).refs.names() == ["main"]
    # One whose prefix is a name that begins like the other's, and one inside it: that is a foreign name there.
    inner = ckptstore.open(f"{url}/inner", create=True)
    assert inner.refs.names() == []
    ckptstore.push(seed().store(), inner, seed().first, ref="main")
    assert ckptstore.open(url).verify("main").ok
    assert ckptstore.open(f"{url}/inner").head("main") == seed().first
    assert ckptstore.open(url).head("main") == seed().root


def test_marks_of_a_console_are_passed_over_and_foreign_names_are_told(pushed: Store, client: S3Client) -> None:
    prefix = pushed.url.removeprefix(f"s3://{BUCKET}/")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/folder/", Body=b"")
    store = ckptstore.open(pushed.url)
    assert store.verify("main").ok
    assert len(list(store.backend.list(""))) == len(list(pushed.backend.list("")))
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/refs/main/what is this?", Body=b"x")
    with pytest.raises(CorruptError, match=r"what is this\?.*move it out"):
        ckptstore.open(pushed.url).head("main")
    client.delete_object(Bucket=BUCKET, Key=f"{prefix}/refs/main/what is this?")
    assert ckptstore.open(pushed.url).verify("main").ok


def test_a_header_of_any_size_is_not_read_whole(pushed: Store, client: S3Client, proxy: FaultProxy) -> None:
    prefix = pushed.url.removeprefix(f"s3://{BUCKET}/")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/ckptstore.json", Body=bytes(24 << 20))
    backend = S3Backend(pushed.backend.address)  # type: ignore[attr-defined]
    data = backend.get("ckptstore.json", 0, RECORD_LIMIT + 1)
    assert len(data) == RECORD_LIMIT + 1
    assert backend.traffic.received_bytes == RECORD_LIMIT + 1
    with pytest.raises(CkptStoreError) as caught:
        ckptstore.open(pushed.url)
    assert caught.value.exit_code == 9


@dataclass
class ManyKeys(Action):
    """A listing with ``pages`` pages of 1,000 keys that nobody ever stored, in order, after those that are there."""

    pages: int
    stem: str

    def answer(self, request: Request) -> Response | None:
        if "list-type" not in request.query or not request.query["prefix"].endswith("receipts/"):
            return None
        page = int(request.query.get("continuation-token") or 0)
        size = "<Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        entries = "".join(
            f"<Contents><Key>{escape(request.query['prefix'])}{self.stem}/{page:06}{n:04}</Key>{size}</Contents>"
            for n in range(1000)
        )
        more = page + 1 < self.pages
        token = f"<NextContinuationToken>{page + 1}</NextContinuationToken>" if more else ""
        text = (
            f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{token}'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{entries}</ListBucketResult>"
        )
        return Response((("Content-Type", "application/xml"),), b"", 200, "OK").with_body(text.encode())


def test_a_listing_in_order_is_taken_page_by_page(pushed: Store, proxy: FaultProxy) -> None:
    """So a million keys that somebody put there do not fill the memory."""
    store = ckptstore.open(pushed.url)
    found = store.capabilities()
    assert found is not None
    backend = store.backend
    assert isinstance(backend, S3Backend)
    backend.capabilities = replace(found, list_in_order=True)
    rule = proxy.add(ManyKeys(1000, "a" * 64))
    listed = backend.list("receipts/")
    for number in range(2500):
        assert next(listed).key.endswith(f"{number // 1000:06}{number % 1000:04}")
        assert rule.hits == number // 1000 + 1


def test_a_listing_that_never_ends_ends_at_the_deadline(pushed: Store, proxy: FaultProxy) -> None:
    proxy.add(ManyKeys(1 << 40, "a" * 64))
    store = ckptstore.open(pushed.url)
    with pytest.raises(BackendError, match="deadline"), ckptstore.deadline(1.0):
        list(store.backend.list("receipts/"))


def test_asking_which_of_few_keys_are_there_does_not_follow_a_long_listing(pushed: Store, proxy: FaultProxy) -> None:
    rule = proxy.add(ManyKeys(1000, "a" * 64))
    store = ckptstore.open(pushed.url)
    keys = [f"receipts/{'a' * 64}/{'b' * 64}"]
    assert store.backend.present(keys) == set(keys)  # not listed to its end: it may be there
    assert sum(entry.faults == ("ManyKeys",) for entry in proxy.log if "receipts" in entry.target) <= 2
    assert rule.hits
