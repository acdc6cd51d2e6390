"""The operators' page holds: its commands run from top to bottom, its policies are enough and not too much, and other
tools find in a bucket what a store says is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

import ckptstore
from ckptstore import CkptStoreError
from ckptstore.backends.s3.address import S3Address
from ckptstore.store import Store
from ckptstore_cli.main import run
from tests.support import s3 as server
from tests.support.faultproxy import FaultProxy
from tests.support.faultrules import Exchange
from tests.support.s3 import SharedServer
from tests.support.training import make_training, save_steps

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "remote.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.M | re.S)
EXAMPLE = "example-bucket"
PREFIX = "team/ckpts/"


def documents_of_the_page() -> dict[str, Any]:
    """The JSON blocks by the file name that stands before each."""
    found = re.findall(r"`([a-z]+\.json)`[^`]*\n\n```json\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(found) == PAGE.count("```json")
    return {name: json.loads(text) for name, text in found}


# -- the commands of the page -----------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with what the page begins with: a store ``./ckpts`` with a ref ``main``, and the page's files."""
    folder = tmp_path / "here"
    store = ckptstore.open(folder / "ckpts", create=True)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))
    save_steps(store, "main", make_training(model=_reads_eight(model)), 2)
    for name, value in documents_of_the_page().items():
        (folder / name).write_text(json.dumps(value))
    return folder


def _reads_eight(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 300), model)


def programs(folder: Path, *names: str) -> str:
    """A PATH on which ``ckpt`` is ours, and ``names`` are stand-ins."""
    folder.mkdir()
    commands = {"ckpt": '-c "from ckptstore_cli.main import main; main()"', "python3": ""}
    commands |= {name: f"-m tests.support.foreign {name}" for name in names}
    for name, command in commands.items():
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)]) if command else ""
        lines = ["#!/bin/sh", f'PYTHONPATH="{path}" exec "{sys.executable}" {command} "$@"']
        (folder / name).write_text("\n".join(lines) + "\n")
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


def run_the_page(here: Path, path: str, bucket: str) -> list[str]:
    """Run all blocks in one shell, in ``here``; the lines that each printed."""
    reader = server.shared().server.reader
    (here.parent / "credentials").write_text(
        f"[auditor]\naws_access_key_id = {reader.access_key}\naws_secret_access_key = {reader.secret_key}\n"
    )
    lines = ["set -e"]
    for number, (language, block) in enumerate(BLOCKS):
        lines.append(f"echo '## {number}'")
        if language == "python":
            block = f"python3 - <<'END'\n{block}END\n"
        if "jq " not in block or shutil.which("jq"):
            lines.append(block.replace(EXAMPLE, bucket))
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=here,
        env={
            **{name: value for name, value in os.environ.items() if name != "CKPT_STORE"},
            "PATH": path,
            "HOME": str(here),
            "AWS_SHARED_CREDENTIALS_FILE": str(here.parent / "credentials"),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return re.split(r"^## \d+\n", done.stdout, flags=re.M)[1:]


def check_what_the_page_made(here: Path, bucket: str, printed: list[str]) -> None:
    """The same root in the directory, the bucket, and what other tools copied down and up; all of it verified."""
    root = ckptstore.open(here / "ckpts").head("main")
    assert root is not None
    for place in (f"s3://{bucket}/team/ckpts", here / "copy", here / "pulled", f"s3://{bucket}/team/moved"):
        store = ckptstore.open(place)
        assert store.head("main") == root, place
        assert store.verify("main").ok, place
    assert ckptstore.open(f"s3://{bucket}/team/alone").single_writer
    by_block = dict(zip([block for _, block in BLOCKS], printed, strict=True))
    (checked,) = (text for block, text in by_block.items() if "b3sum" in block)
    assert checked == ""
    (document,) = (text for block, text in by_block.items() if "json.tool" in block)
    assert '"kind": "checkpoint"' in document
    (receipts,) = (text for (language, block), text in zip(BLOCKS, printed, strict=True) if language == "python")
    assert " push server-read " in receipts
    assert " verify server-read " in receipts


@pytest.mark.timeout(600)
def test_the_commands_of_the_page_run_from_top_to_bottom(here: Path, s3: SharedServer, tmp_path: Path) -> None:
    """With stand-ins for the AWS command line, and for b3sum where that is not installed."""
    bucket = f"{server.fresh_prefix()}-page"
    names = ["aws"] if shutil.which("b3sum") else ["aws", "b3sum"]
    printed = run_the_page(here, programs(tmp_path / "bin", *names), bucket)
    check_what_the_page_made(here, bucket, printed)


@pytest.mark.deep
def test_the_commands_of_the_page_run_with_the_real_command_line(here: Path, s3: SharedServer, tmp_path: Path) -> None:
    """With awscli, which pins botocore and so gets an environment of its own, unless one is installed."""
    path = programs(tmp_path / "bin", *([] if shutil.which("b3sum") else ["b3sum"]))
    if not shutil.which("aws"):
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
        subprocess.run([tmp_path / "venv" / "bin" / "pip", "install", "--quiet", "awscli"], check=True)
        path = os.pathsep.join([path, str(tmp_path / "venv" / "bin")])
    bucket = f"{server.fresh_prefix()}-page"
    printed = run_the_page(here, path, bucket)
    check_what_the_page_made(here, bucket, printed)


def test_the_options_of_a_url_are_those_of_the_page() -> None:
    table = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", PAGE.split("## The URL")[1].split("\n## ")[0], re.M)
    options = {field.name: field.default for field in fields(S3Address) if field.name not in ("bucket", "prefix")}
    assert [name for name, _, _ in table] == list(options)
    for name, default, _ in table:
        if options[name] is not None:
            assert default.strip("`") == (f"{options[name]:g}" if type(options[name]) is float else str(options[name]))


# -- what b3sum finds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["objects", "documents", "receipts"])
def test_b3sum_alone_finds_a_byte_that_changed(here: Path, tmp_path: Path, folder: str) -> None:
    store = here / "ckpts"
    assert ckptstore.open(store).verify("main").ok  # leaves a receipt
    (line,) = (line for _, block in BLOCKS for line in block.splitlines() if "b3sum" in line)
    names = [] if shutil.which("b3sum") else ["b3sum"]
    environment = {**os.environ, "PATH": programs(tmp_path / "bin", *names)}

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line], cwd=store, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    assert (check().returncode, check().stdout) == (0, "")
    path = next(path for path in sorted((store / folder).rglob("*")) if path.is_file())
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    done = check()
    assert done.returncode == 1
    assert f"{path.relative_to(store)}: FAILED" in done.stdout


# -- the policies of the page -----------------------------------------------------------------------------------------

# What a request asks for, by method and by what stands in its query; as in AWS's own list of actions.
_ACTIONS = {
    ("GET", "list-type"): "s3:ListBucket",
    ("GET", "versioning"): "s3:GetBucketVersioning",
    ("GET", "object-lock"): "s3:GetBucketObjectLockConfiguration",
    ("GET", ""): "s3:GetObject",
    ("HEAD", ""): "s3:GetObject",
    ("PUT", ""): "s3:PutObject",
    ("DELETE", ""): "s3:DeleteObject",
}


def asked(entry: Exchange) -> tuple[str, str, str]:
    """Action, resource, and prefix of a listing, of a request."""
    path, _, query = entry.target.partition("?")
    names = {part.partition("=")[0]: part.partition("=")[2] for part in query.split("&") if part}
    bucket, _, key = path.removeprefix("/").partition("/")
    kind = next((kind for _, kind in _ACTIONS if kind and kind in names), "")
    prefix = names.get("prefix", "").replace("%2F", "/")
    return _ACTIONS[entry.method, kind], f"arn:aws:s3:::{bucket}" + (f"/{key}" if key else ""), prefix


def allows(statement: Any, action: str, resource: str, prefix: str) -> bool:
    pattern = statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix", "*")
    return (
        action in statement["Action"] and fnmatchcase(resource, statement["Resource"]) and fnmatchcase(prefix, pattern)
    )


def policy_for(name: str, bucket: str) -> Any:
    return json.loads(json.dumps(documents_of_the_page()[name]).replace(EXAMPLE, bucket))


def ckpt(*arguments: object) -> None:
    assert run([str(argument) for argument in arguments]) == 0


def test_the_policies_allow_what_is_asked_and_nothing_that_is_not(
    here: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Every request of each command is looked up in the policy; and every action and resource of it was needed."""
    bucket = server.new_bucket()
    url = f"s3://{bucket}/team/ckpts"
    store = here / "ckpts"

    def write() -> None:
        ckpt("init", url)
        ckpt("--store", store, "push", "main", url)
        damage(bucket, ckptstore.open(store))
        ckpt("--store", store, "push", "main", url)
        ckpt("--store", url, "verify", "main")
        ckpt("--store", url, "endpoint", "--probe")
        save_steps(ckptstore.open(url), "direct", make_training(), 1)

    def read() -> None:
        ckpt("--store", url, "log")
        ckpt("--store", url, "endpoint")
        ckpt("--store", tmp_path / "pulled", "pull", "main", url, "--create")

    for name, work in (("writer.json", write), ("reader.json", read)):
        proxy.log.clear()
        work()
        policy = policy_for(name, bucket)
        needed = set()
        for entry in tuple(proxy.log):
            granting = [s["Sid"] for s in policy["Statement"] if allows(s, *asked(entry))]
            assert granting, f"{name} forbids {entry.method} {entry.target}"
            needed |= {(sid, asked(entry)[0]) for sid in granting}
        assert needed == {(s["Sid"], action) for s in policy["Statement"] for action in s["Action"]}


def damage(bucket: str, store: Store) -> None:
    """Change a byte of an object in the bucket, behind the store's back."""
    root = store.resolve("main")
    key = next(key for key, _ in store.closure(root).sizes() if key.startswith("objects/"))
    client = server.client()
    data = client.get_object(Bucket=bucket, Key=PREFIX + key)["Body"].read()
    client.put_object(Bucket=bucket, Key=PREFIX + key, Body=data[:-1] + bytes([data[-1] ^ 1]))
    client.close()


@pytest.fixture
def limited(s3: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has the keys of an identity that may read and list, and do what a bucket's policy adds."""
    for name, value in s3.server.read_only_environment().items():
        monkeypatch.setenv(name, value)


def grant(client: S3Client, bucket: str, statements: list[Any]) -> None:
    """Let the limited identity do this in the bucket."""
    principal = {"AWS": "arn:aws:iam::000000000000:user/reader"}
    policy = {"Version": "2012-10-17", "Statement": [{**one, "Principal": principal} for one in statements]}
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))


def test_a_server_lets_a_writer_push_under_the_policy_of_the_page(here: Path, client: S3Client, limited: None) -> None:
    bucket = server.new_bucket()
    url = f"s3://{bucket}/team/ckpts"
    with pytest.raises(CkptStoreError, match="AccessDenied"):
        ckptstore.open(url, create=True)
    grant(client, bucket, policy_for("writer.json", bucket)["Statement"])
    source = ckptstore.open(here / "ckpts")
    root = source.resolve("main")
    target = ckptstore.open(url, create=True)
    ckptstore.push(source, target, root, ref="main")
    assert target.verify("main").ok
    assert list(target.backend.list("leases/")) == []
    (key, *_) = (key for key, _ in source.closure(root).sizes() if key.startswith("objects/"))
    with pytest.raises(ckptstore.CkptStoreError, match="AccessDenied"):
        target.backend.delete(key)
    with pytest.raises(ckptstore.CkptStoreError, match="AccessDenied"):
        ckptstore.open(f"s3://{bucket}/other", create=True)


@pytest.mark.parametrize("without", ["s3:PutObject", "s3:DeleteObject"])
def test_a_server_lets_nobody_write_with_less(here: Path, client: S3Client, limited: None, without: str) -> None:
    bucket = server.new_bucket()
    statements = [s for s in policy_for("writer.json", bucket)["Statement"] if without not in s["Action"]]
    grant(client, bucket, statements)
    with pytest.raises(CkptStoreError, match="AccessDenied"):
        ckptstore.open(f"s3://{bucket}/team/ckpts", create=True)


def test_keys_that_only_read_are_enough_for_verify_and_pull(
    here: Path, url: str, tmp_path: Path, limited: None, s3: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.server.environment().items():
        monkeypatch.setenv(name, value)
    source = ckptstore.open(here / "ckpts")
    ckptstore.push(source, ckptstore.open(url, create=True), source.resolve("main"), ref="main")
    for name, value in s3.server.read_only_environment().items():
        monkeypatch.setenv(name, value)
    remote = ckptstore.open(url)
    assert remote.verify("main").ok
    ckptstore.pull(remote, ckptstore.open(tmp_path / "pulled", create=True), remote.resolve("main"), ref="main")
    assert ckptstore.open(tmp_path / "pulled").verify("main").ok
    with pytest.raises(CkptStoreError, match="AccessDenied"):
        ckptstore.push(source, ckptstore.open(url), source.resolve("main"))
