"""The whole experiment with the operator's store in an S3 server: the same roots as with a directory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import evidence
from ckptstore.errors import BackendError
from tests.trainer.attack import ROOT, Attack, worker_file
from trainer.lifecycle import s3folder
from trainer.lifecycle.expect import NotAsPlannedError
from trainer.lifecycle.page import render
from trainer.lifecycle.s3server import S3Server

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Small:
    """A finished small run."""

    out: Path
    stdout: str

    @property
    def report(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return body

    @property
    def keys(self) -> list[str]:
        """Both keys of both identities of its server."""
        kept = s3folder.kept_server(self.out / "s3").kept
        return [key for one in (kept.admin, kept.reader) for key in (one.access_key, one.secret_key)]


def finish(attack: Attack) -> Small:
    code, out, errors = attack.end()
    assert (code, errors) == (0, ""), f"{out}\n{errors}"
    return Small(attack.out, out)


@pytest.fixture(scope="module")
def on_s3(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return finish(Attack(tmp_path_factory.mktemp("on s3") / "run", "--operator", "s3"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    """A server that somebody else runs, with a bucket."""
    with S3Server(tmp_path / "theirs") as found:
        found.create_bucket("theirs")
        yield found
        found.kill()


def answers(report: dict[str, Any]) -> dict[str, Any]:
    """What a run has to end in, wherever its store is."""
    updates = {name: [one["exact"] for one in found] for name, found in report["updates"].items()}
    names = ("prepared_identity", "trees", "roots", "binding")
    return {**{name: report[name] for name in names}, "scores": report["evaluation"]["scores"], "updates": updates}


def test_it_ends_in_the_same_roots_and_prepared_identity_as_with_a_directory(tmp_path: Path, on_s3: Small) -> None:
    directory = finish(Attack(tmp_path / "run")).report
    assert answers(on_s3.report) == answers(directory)
    assert (directory["operator"]["store"], directory["operator"]["requests"]) == ("directory", [])
    assert directory["operator"]["refused_write"] == ""
    assert "requests" not in render(directory)


def test_requests_and_bytes_are_counted_by_phase_and_party(on_s3: Small) -> None:
    report = on_s3.report
    asked = {(one["phase"], one["party"]): one for one in report["operator"]["requests"]}
    assert {phase for phase, party in asked if party == "hosts"} == {"drill", "replace", "evaluate"}
    assert {phase for phase, party in asked if party == "controller"} == {
        *("prepare", "stage", "reference", "drill", "replace", "recover", "evaluate", "report"),
    }
    moved = {one["step"]: one["sent_bytes"] for one in report["checkpoints"] if one["store"] == "operator"}
    assert asked["reference", "controller"]["sent_bytes"] >= moved[2]
    assert asked["recover", "controller"]["sent_bytes"] >= moved[4] + moved[8]
    came = sum(one["received_bytes"] for one in report["pulled"] if one["host"] == "host-2")
    assert asked["replace", "hosts"]["received_bytes"] + asked["evaluate", "hosts"]["received_bytes"] >= came
    # A host reads, but for the one write that has to be refused.
    for phase in ("drill", "replace", "evaluate"):
        writes = asked[phase, "hosts"]["operations"].keys() - {"GetObject", "HeadObject", "ListObjectsV2"}
        assert writes == ({"PutObject"} if phase == "replace" else set())
    total = sum(sum(one["operations"].values()) for one in asked.values())
    assert f"operator's server  {total:,} requests" in on_s3.stdout
    page = (on_s3.out / "report.html").read_text()
    assert page == render(report)
    assert f"<td class=n>{total:,}</td>" in page
    assert not re.search(r"https?:|//[a-z]|<script|<link|<img|@import|url\(", page)


def test_the_third_host_got_its_shard_from_the_bucket_and_may_not_write_there(on_s3: Small) -> None:
    report = on_s3.report
    first = next(one for one in report["pulled"] if one["host"] == "host-2")
    assert first["shard"] == 1
    assert first["received_bytes"] > 4_000_000
    assert report["operator"]["refused_write"].startswith("ReadOnlyError: ")
    assert "host-2 may not write to the operator's store" in on_s3.stdout


def test_no_key_is_anywhere_but_in_the_file_of_keys(on_s3: Small) -> None:
    holding = set()
    for path in on_s3.out.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            holding |= {path.relative_to(on_s3.out).as_posix() for key in on_s3.keys if key.encode() in data}
    assert holding == {"s3/credentials"}
    assert not [key for key in on_s3.keys if key in on_s3.stdout]
    assert evidence.verify(on_s3.out / "archive" / "evidence.tar").members


def test_the_printed_commands_work_once_the_server_is_started_again(on_s3: Small) -> None:
    block = on_s3.stdout.split("next, for instance:\n")[1]
    serve, *lines = [line.strip() for line in block.splitlines()]
    assert serve.endswith("&")
    server = subprocess.Popen(
        ["sh", "-c", f"exec {serve.removesuffix('&')}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        script = "set -e\n" + "\n".join(line for line in lines if not line.startswith("verify"))
        done = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        assert (done.returncode, done.stderr) in ((0, ""), (1, "")), done
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert server.returncode == 0


def test_workers_have_nothing_in_their_environment_that_leads_to_credentials(tmp_path: Path) -> None:
    attack = Attack(tmp_path / "run", "--operator", "s3")
    for host, generation, shard in ((0, 1, 0), (1, 1, 1), (2, 3, 1)):
        pid = attack.when(worker_file(host, generation, shard), "alive")["pid"]
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        found = {name for name, _, value in (one.partition("=") for one in variables) if value != os.devnull}
        assert {name for name in found if name.startswith("AWS_")} == {"AWS_EC2_METADATA_DISABLED"}
    attack.controller.send_signal(signal.SIGINT)
    code, _, errors = attack.end()
    assert (code, errors) == (130, "trainer: interrupted; no worker is left, and what was made is kept\n")
    assert attack.processes() == []
    assert (attack.out / "s3" / "data").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_does_not_outlive_a_run_that_is_ended_while_it_starts(
    tmp_path: Path, number: signal.Signals
) -> None:
    attack = Attack(tmp_path / "run", "--operator", "s3")
    deadline = time.monotonic() + 60
    while not any("mini" in text for text in attack.processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    attack.controller.send_signal(number)
    code, _, errors = attack.end()
    assert code == (-number if number == signal.SIGKILL else 130)
    assert "Traceback" not in errors
    while attack.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert attack.processes() == []


def test_a_flipped_bit_is_found_there_too(tmp_path: Path) -> None:
    attack = Attack(tmp_path / "run", "--operator", "s3", "--sabotage")
    code, out, errors = attack.end()
    assert code == NotAsPlannedError.exit_code
    assert "most of all" in errors
    assert len(errors.splitlines()) == 1
    assert "NOT AS PLANNED" in out
    assert "the operator's S3 server is started again by: " in out
    assert attack.processes() == []
    with s3folder.kept_server(attack.out / "s3") as server:
        environment = {**os.environ, **s3folder.environment(server.folder)}
        command = "import ckptstore, sys; print(ckptstore.open(sys.argv[1]).head('lifecycle'))"
        done = subprocess.run(
            [sys.executable, "-c", command, s3folder.store_url(server)],
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
    assert done.stdout.startswith("b3:")


def test_a_run_rides_through_the_loss_of_the_server_if_it_comes_back(tmp_path: Path, server: S3Server) -> None:
    url = f"s3://theirs/run?endpoint_url={server.endpoint}"
    attack = Attack(tmp_path / "run", "--operator", url, environment=server.environment())
    attack.when("events/controller.jsonl", "sealed")
    server.kill()
    time.sleep(3)
    server.start()
    code, out, errors = attack.end()
    assert code == 0, errors
    assert "equal: root, and losses and norms" in out
    report = json.loads((attack.out / "report.json").read_text())
    assert report["operator"]["store"] == "bucket"
    assert report["roots"]["4"]["equal"] is True


def test_a_run_whose_server_stays_away_says_so_and_keeps_what_there_is(tmp_path: Path, server: S3Server) -> None:
    url = f"s3://theirs/run?endpoint_url={server.endpoint}&attempt_seconds=3&operation_seconds=6"
    attack = Attack(tmp_path / "run", "--operator", url, environment=server.environment())
    attack.when("events/controller.jsonl", "sealed")
    server.kill()
    code, out, errors = attack.end()
    assert code == BackendError.exit_code
    *warnings, last = errors.splitlines()
    assert re.match(r"trainer: .*s3://theirs/run", last)
    assert server.endpoint in last
    assert all("trying again" in line for line in warnings)
    assert "Traceback" not in errors
    assert "FAILED" in out
    assert json.loads((attack.out / "failure.json").read_text())["type"] == "BackendError"
    assert attack.processes() == []
    assert ckptstore.open(attack.out / "hosts" / "host-0" / "store").url
