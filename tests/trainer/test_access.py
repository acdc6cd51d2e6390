"""Which store is the operator's: mistakes are told at once, keys are kept where only their owner sees them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import BackendError, ConflictError, MalformedError, NotFoundError, RefusedError, UsageError
from tests.support import s3 as shared
from trainer import commands
from trainer.lifecycle import access, s3folder
from trainer.lifecycle.access import BUCKET, DIRECTORY, SERVER
from trainer.lifecycle.s3client import plain_client
from trainer.lifecycle.s3server import S3Server
from trainer.workers.hosts import Host
from trainer.workers.launch import host_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server of a run, kept and stopped, with one object in the operator's bucket."""
    with S3Server(tmp_path_factory.mktemp("run") / "s3") as server:
        server.create_bucket(s3folder.BUCKET)
        s3folder.keep(server)
        with closing(server.client()) as client:
            client.put_object(Bucket=s3folder.BUCKET, Key="x", Body=b"kept")
    yield server
    server.kill()


def mistakes(tmp_path: Path) -> dict[str, tuple[str, int, str]]:
    (tmp_path / "file").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").touch()
    nobody = "endpoint_url=http://127.0.0.1:9&attempt_seconds=1&operation_seconds=1"
    return {
        "other scheme": ("https://example.org/store", UsageError.exit_code, "no backend for this kind of URL"),
        "memory": ("memory:x", UsageError.exit_code, "hosts are processes"),
        "empty": ("", UsageError.exit_code, "not the name of a store"),
        "file": (str(tmp_path / "file"), RefusedError.exit_code, "not a directory"),
        "other folder": (str(tmp_path / "photos"), RefusedError.exit_code, "ckptstore.json"),
        "no bucket": ("s3://no-such-bucket/x", NotFoundError.exit_code, "NoSuchBucket"),
        "option": ("s3://bucket/x?colour=red", UsageError.exit_code, "colour"),
        "nobody there": (f"s3://bucket/x?{nobody}", BackendError.exit_code, "127.0.0.1:9"),
    }


@pytest.mark.parametrize(
    "kind", ["other scheme", "memory", "empty", "file", "other folder", "no bucket", "option", "nobody there"]
)
def test_a_mistaken_operator_is_told_before_anything_is_made(
    tmp_path: Path, s3: shared.SharedServer, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    operator, code, says = mistakes(tmp_path)[kind]
    before = sorted(tmp_path.rglob("*"))
    assert commands.main(["lifecycle", "--out", str(tmp_path / "run"), "--operator", operator]) == code
    said = capsys.readouterr()
    assert says in said.err
    assert (len(said.err.splitlines()), said.out) == (1, "")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mistaken_store_of_a_preparation_is_told_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prepare", "--out", str(tmp_path / "prepared"), "--store", "https://example.org/store"]
    assert commands.main(arguments) == UsageError.exit_code
    assert "no backend for this kind of URL" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_that_the_server_is_not_installed_is_told_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    code = commands.main(["lifecycle", "--out", str(tmp_path / "run"), "--operator", "s3"])
    assert code == NotFoundError.exit_code
    assert "requirements-s3server.txt" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_reached_by_hosts_without_any_credentials(tmp_path: Path, s3: shared.SharedServer) -> None:
    with access.reach(None, tmp_path / "a run", "trainer") as found:
        assert (found.kind, found.url) == (DIRECTORY, str(tmp_path / "a run" / "operator"))
        assert found.host_allow == (tmp_path / "a run" / "operator",)
        assert ckptstore.open(found.host_url).url == ckptstore.open(found.url).url
        assert found.host_environment is None
        environment = host_environment(Host(tmp_path, "host-0"), found.host_environment)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        assert name not in environment
    assert environment["AWS_CONFIG_FILE"] == environment["AWS_SHARED_CREDENTIALS_FILE"] == os.devnull


def test_a_bucket_of_somebody_else_is_reached_by_what_boto3_goes_by(tmp_path: Path, s3: shared.SharedServer) -> None:
    with access.reach(s3.url(), tmp_path, "trainer") as found:
        assert (found.kind, found.read_only, found.again) == (BUCKET, False, ())
        environment = host_environment(Host(tmp_path, "host-0"), found.host_environment)
    assert environment["AWS_ACCESS_KEY_ID"] == os.environ["AWS_ACCESS_KEY_ID"]
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in repr(found)


def test_a_server_of_the_run_lasts_as_long_as_the_block_and_gives_hosts_keys_that_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of something else")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of something else")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    with access.reach("s3", tmp_path, "trainer") as found:
        assert (found.kind, found.read_only) == (SERVER, True)
        store = ckptstore.open(found.url, create=True)
        assert store.head("main") is None
        environment = host_environment(Host(tmp_path, "host-0"), found.host_environment)
        keys = s3folder.kept_server(tmp_path / "s3").kept
        assert environment["AWS_ACCESS_KEY_ID"] == keys.reader.access_key
        assert environment["NO_PROXY"] == "127.0.0.1"
        text = f"{found!r} {found.again} {store.url}"
        assert not [key for key in (keys.admin.secret_key, keys.reader.secret_key) if key in text]
    assert "AWS_SHARED_CREDENTIALS_FILE" not in os.environ
    assert not s3folder.kept_server(tmp_path / "s3").running
    with pytest.raises(BackendError):
        ckptstore.open(f"{found.host_url}&attempt_seconds=1&operation_seconds=1")


def test_keys_of_a_kept_server_are_in_one_file_that_only_its_owner_can_read(kept: S3Server) -> None:
    found = kept.kept
    secret = [key.encode() for key in (found.admin.secret_key, found.reader.secret_key)]
    holding = [p for p in kept.folder.rglob("*") if p.is_file() and any(key in p.read_bytes() for key in secret)]
    assert holding == [kept.folder / "credentials"]
    assert holding[0].stat().st_mode & 0o777 == 0o600


def test_a_kept_server_is_started_again_with_its_data_in_the_foreground_until_ctrl_c(kept: S3Server) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "trainer", "s3server", str(kept.folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "AWS_ACCESS_KEY_ID": "of something else"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    said = []
    for line in command.stdout:
        said.append(line)
        if line.startswith("export CKPT_STORE="):
            break
    shell = ["sh", "-c", f"{''.join(said)}exec {sys.executable} -c 'import boto3, os; {READ}'"]
    read = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert (read.stdout, read.stderr) == ("kept\n", "")
    assert s3folder.store_url(kept) in read.args[2]
    with pytest.raises(ConflictError, match="perhaps it runs already"):
        s3folder.kept_server(kept.folder).start()
    command.send_signal(signal.SIGINT)
    rest, errors = command.communicate(timeout=60)
    assert (command.returncode, rest, errors) == (0, "# stopped; its data stay\n", "")
    assert not [key for key in (kept.kept.admin.secret_key, kept.kept.reader.secret_key) if key in "".join(said)]
    assert not s3folder.kept_server(kept.folder).running


READ = 'print(boto3.client("s3").get_object(Bucket="operator", Key="x")["Body"].read().decode())'


def test_a_folder_without_a_server_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["s3server", str(tmp_path)]) == NotFoundError.exit_code
    assert "there is no credentials" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["credentials", "server.json"])
@pytest.mark.parametrize(
    "damage", [b"", b"\xff\xfe", b"[lifecycle-operator\nx", b'{"ports": [1, 2]}', b"[]", b"\0" * 99]
)
def test_damaged_keys_and_addresses_are_refused_without_being_quoted(
    kept: S3Server, tmp_path: Path, name: str, damage: bytes
) -> None:
    for one in ("credentials", "server.json"):
        (tmp_path / one).write_bytes((kept.folder / one).read_bytes())
    rest = (tmp_path / name).read_bytes()[:150] if name == "credentials" else b""  # the first key, and no second
    (tmp_path / name).write_bytes(damage + rest)
    with pytest.raises(MalformedError) as raised:
        s3folder.kept_server(tmp_path)
    found = kept.kept
    assert not [key for key in (found.admin.secret_key, found.admin.access_key) if key in str(raised.value)]


@pytest.mark.deep
def test_the_reader_of_a_server_may_not_write(kept: S3Server) -> None:
    server = s3folder.kept_server(kept.folder)
    with server, closing(plain_client(server.endpoint, server.kept.reader)) as client:
        assert client.get_object(Bucket=s3folder.BUCKET, Key="x")["Body"].read() == b"kept"
        with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
            client.put_object(Bucket=s3folder.BUCKET, Key=secrets.token_hex(4), Body=b"")
