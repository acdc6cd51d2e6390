"""The S3 server of the tests and of the lifecycle keeps what it takes and gives nothing to strangers."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.exceptions import ClientError, SSLError

from ckptstore.errors import BackendError, ConflictError
from tests.support import s3 as support
from tests.support.s3 import BUCKET, SharedServer
from tests.support.s3servers import OTHERS, why_missing
from trainer.lifecycle.ports import TWIN
from trainer.lifecycle.s3client import Credentials, plain_client
from trainer.lifecycle.s3server import S3Server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that a test may kill, on data in a folder whose path is longer than a Unix socket's name may be."""
    folder = tmp_path_factory.mktemp("server") / ("long-" * 30) / "s3"
    with closing(support.client()):  # beside the shared one: two servers do not get into each other's way
        found = S3Server(folder)
        with found:
            found.create_bucket("bucket")
            yield found
            found.kill()  # nobody needs a clean end


def home_of(server: S3Server) -> Path:
    """The short folder that holds its identities while it runs."""
    for path in Path("/tmp").glob("weed-*/identities.json"):
        with suppress(FileNotFoundError):  # other servers come and go
            if server.admin.access_key in path.read_text():
                return path.parent
    raise AssertionError("no folder with its identities")


def refused(client: S3Client) -> str:
    """The code with which a write into the shared bucket is refused."""
    with closing(client), pytest.raises(ClientError) as found:
        client.put_object(Bucket=BUCKET, Key=support.fresh_prefix(), Body=b"1")
    return found.value.response["Error"]["Code"]


def test_what_was_acknowledged_outlives_a_kill(server: S3Server) -> None:
    endpoint, body = server.endpoint, secrets.token_bytes(100_000)
    with closing(server.client()) as client:
        client.put_object(Bucket="bucket", Key="kept", Body=body)
        server.kill()
        assert not server.running
        server.start()
        assert server.endpoint == endpoint
        assert client.get_object(Bucket="bucket", Key="kept")["Body"].read() == body


def test_another_process_can_go_on_with_the_same_server(server: S3Server) -> None:
    with closing(server.client()) as client:
        client.put_object(Bucket="bucket", Key="handed-on", Body=b"1")
        with pytest.raises(ConflictError, match="perhaps it runs already"):
            S3Server(server.folder, kept=server.kept).start()
        server.kill()
        heir = S3Server(server.folder, kept=server.kept).start()
        assert client.get_object(Bucket="bucket", Key="handed-on")["Body"].read() == b"1"
        heir.kill()
        server.start()


def test_a_start_while_it_runs_changes_nothing(server: S3Server) -> None:
    assert server.start() is server


def test_it_leaves_nothing_outside_its_folder(server: S3Server) -> None:
    twins = [port + TWIN for port in server.kept.ports]
    sockets = [path for twin in twins for path in Path("/tmp").glob(f"seaweedfs-*-{twin}.sock")]
    home = home_of(server)
    assert sockets
    server.kill()
    assert not any(path.exists() for path in (*sockets, home))
    server.start()


def test_no_secret_is_written_where_others_look(server: S3Server) -> None:
    keys = [server.admin.secret_key.encode(), server.reader.secret_key.encode()]
    for path in server.folder.rglob("*"):
        if path.is_file():
            assert not any(key in path.read_bytes() for key in keys), path
    for text in (repr(server), repr(server.admin), repr(server.kept), str(server.admin)):
        assert not any(key.decode() in text for key in keys)
    home = home_of(server)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "identities.json").stat().st_mode) == 0o600


def test_an_address_is_known_only_after_a_start(tmp_path: Path) -> None:
    server = S3Server(tmp_path / "server")
    with pytest.raises(BackendError, match="not started yet"):
        _ = server.endpoint
    server.kill()
    server.stop()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = S3Server(tmp_path / "server")
    (tmp_path / "server" / "data").rmdir()
    (tmp_path / "server" / "data").write_text("in the way")
    with pytest.raises(BackendError, match=r"ended by itself(.|\n)*data"):
        server.start()
    assert not server.running
    server.kill()


def test_keys_of_nobody_and_wrong_secrets_are_refused(s3: SharedServer) -> None:
    wrong = Credentials(s3.server.admin.access_key, "wrong")
    assert refused(plain_client(s3.server.endpoint, wrong)) == "SignatureDoesNotMatch"
    assert refused(plain_client(s3.server.endpoint, Credentials.random())) == "InvalidAccessKeyId"


def test_the_read_only_identity_reads_and_lists(s3: SharedServer, client: S3Client) -> None:
    prefix = support.fresh_prefix()
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/k", Body=b"1")
    reader = plain_client(s3.server.endpoint, s3.server.reader)
    assert reader.get_object(Bucket=BUCKET, Key=f"{prefix}/k")["Body"].read() == b"1"
    assert reader.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["KeyCount"] == 1
    with pytest.raises(ClientError, match="AccessDenied"):
        reader.delete_object(Bucket=BUCKET, Key=f"{prefix}/k")
    assert refused(reader) == "AccessDenied"


@pytest.mark.usefixtures("s3")
def test_the_environment_alone_leads_to_the_server() -> None:
    with closing(boto3.session.Session().client("s3")) as client:
        client.put_object(Bucket=BUCKET, Key=support.fresh_prefix(), Body=b"1")


def test_tls_is_served_and_verified(s3: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.server.environment(https=True).items():
        monkeypatch.setenv(name, value)
    key = support.fresh_prefix()
    with closing(boto3.session.Session().client("s3")) as client:
        assert client.meta.endpoint_url == s3.server.https_endpoint
        client.put_object(Bucket=BUCKET, Key=key, Body=b"over tls")
        assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"over tls"
    monkeypatch.delenv("AWS_CA_BUNDLE")
    with closing(boto3.session.Session().client("s3")) as client, pytest.raises(SSLError):
        client.get_object(Bucket=BUCKET, Key=key)


def test_one_create_of_a_name_wins(client: S3Client) -> None:
    key = support.fresh_prefix()
    client.put_object(Bucket=BUCKET, Key=key, Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"second", IfNoneMatch="*")
    assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"first"


def test_buckets_neither_come_nor_go_by_accident(client: S3Client) -> None:
    with pytest.raises(ClientError, match="NoSuchBucket"):
        client.put_object(Bucket=support.fresh_prefix(), Key="k", Body=b"1")
    bucket = support.new_bucket()
    client.put_object(Bucket=bucket, Key="k", Body=b"1")
    with pytest.raises(ClientError, match="BucketNotEmpty"):
        client.delete_bucket(Bucket=bucket)
    client.delete_object(Bucket=bucket, Key="k")
    client.delete_bucket(Bucket=bucket)


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_servers_of_other_makes_keep_what_they_acknowledged_and_ignore_conditions(name: str) -> None:
    if reason := why_missing(name):
        pytest.skip(reason)
    with OTHERS[name]() as server:
        server.create_bucket("bucket")
        with closing(server.client()) as client:
            client.put_object(Bucket="bucket", Key="k", Body=b"first")
            server.kill()
            server.start()
            assert client.get_object(Bucket="bucket", Key="k")["Body"].read() == b"first"
            client.put_object(Bucket="bucket", Key="k", Body=b"second", IfNoneMatch="*")
            assert client.get_object(Bucket="bucket", Key="k")["Body"].read() == b"second"
        wrong = plain_client(server.endpoint, Credentials(server.admin.access_key, "wrong"))
        with closing(wrong), pytest.raises(ClientError):
            wrong.put_object(Bucket="bucket", Key="k", Body=b"third")
