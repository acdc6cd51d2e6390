"""The whole experiment, by its command: two workers, a host lost in the middle of an update, one root."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import Digest, Store, evidence
from ckptstore.errors import BackendError, UsageError
from trainer.commands import fresh_folder
from trainer.lifecycle.expect import NotAsPlannedError
from trainer.lifecycle.page import render
from trainer.preparation.prepare import read_plan
from trainer.workers import events

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, exit code and output, and its report if it has one."""

    out: Path
    code: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return body

    @property
    def operator(self) -> Store:
        return ckptstore.open(self.out / "operator")

    def controller(self) -> list[events.Event]:
        return list(events.read(self.out / "events" / "controller.jsonl"))


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainer", "lifecycle", "--out", str(out), *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run(out: Path, *arguments: str) -> Run:
    done = subprocess.run(
        command(out, *arguments),
        cwd=out.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return Run(out, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One undisturbed run that loses its host by SIGKILL."""
    done = run(tmp_path_factory.mktemp("lifecycle") / "run")
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    return done


def roots(report: dict[str, Any]) -> list[str]:
    return [report["roots"]["16"]["root"], report["roots"]["32"]["recovered"], report["roots"]["64"]["root"]]


def processes_below(folder: Path) -> list[str]:
    """Command lines of running processes that name ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text:
            found.append(text)
    return found


def test_the_recovered_root_and_all_losses_and_norms_are_those_of_the_run_without_a_loss(finished: Run) -> None:
    report = finished.report
    assert report["roots"]["32"]["equal"] is True
    assert report["roots"]["32"]["reference"] == report["roots"]["32"]["recovered"]
    updates = {name: {one["update"]: one["exact"] for one in report["updates"][name]} for name in report["updates"]}
    assert sorted(updates["reference"]) == list(range(1, 33))
    assert sorted(updates["replay"]) == list(range(17, 33))
    assert sorted(updates["continued"]) == list(range(33, 65))
    assert all(updates["reference"][number] == exact for number, exact in updates["replay"].items())
    assert report["replay"]["losses_and_norms_equal"] is True


def test_the_roots_are_printed_and_are_those_of_the_operators_store(finished: Run) -> None:
    store, (early, middle, last) = finished.operator, [Digest.parse(root) for root in roots(finished.report)]
    for root in (early, middle, last):
        assert str(root) in finished.stdout
    assert store.head("lifecycle") == last
    assert [(root, checkpoint.step) for root, checkpoint in store.history(last)] == [
        (last, 64),
        (middle, 32),
        (early, 16),
    ]
    for _, checkpoint in store.history(last):
        assert str(checkpoint.run) == finished.report["prepared_identity"]
        assert len(checkpoint.shards) == 2
    verified = store.verify(last)
    assert (verified.exit_code, verified.findings) == (0, ())


def test_nothing_of_places_times_or_machines_is_in_what_the_roots_cover(finished: Run) -> None:
    store = finished.operator
    closure = store.closure(Digest.parse(roots(finished.report)[2]))
    words = (str(finished.out), platform.node(), "host-0", "127.0.0.1", time.strftime("%Y-%m-%d"))
    for key in closure.documents:
        data = store.backend.get(key)
        assert not [word for word in words if word and word.encode() in data], key


def test_the_reference_was_out_of_reach_until_both_roots_were_printed(finished: Run) -> None:
    names = [event.name for event in finished.controller()]
    launched = [i for i, name in enumerate(names) if name == "launched"]
    assert names.index("sealed") < launched[1]
    assert launched[2] < names.index("roots") < launched[3]
    reference = finished.report["roots"]["32"]["reference"]
    assert finished.stdout.index(f"reference root at 32: {reference}") > finished.stdout.index(
        "recovered on the third host"
    )
    kept = ckptstore.open(finished.out / "reference")
    assert str(kept.head("lifecycle")) == reference
    assert kept.verify("lifecycle").exit_code == 0


def test_the_host_was_lost_in_the_update_and_nothing_of_that_update_was_done(finished: Run) -> None:
    lost = finished.report["loss_of_host"]
    assert (lost["update"], lost["microbatch"], lost["shard"], lost["host"]) == (20, 0, 1, "host-1")
    assert lost["completed"] == [19, 19]
    assert "shard 1 forward 0" in lost["operations"]
    assert not [text for text in lost["operations"] if text.startswith("shard 1") and text != "shard 1 forward 0"]
    assert lost["head"] == roots(finished.report)[0]
    assert {one["sign"] for one in lost["evidence"]} == {"process gone", "connection lost"}
    assert lost["endings"][1]["status"] == -signal.SIGKILL
    said = list(events.read(finished.out / "events" / "host-1" / "generation-2-shard-1.jsonl"))
    assert max(event["update"] for event in said if event.name == "update") == 19
    assert [event["update"] for event in said if event.name == "fault_point"] == [20]


def test_both_stagings_of_the_third_host_are_kept(finished: Run) -> None:
    report = finished.report
    assert report["empty_listing"] == []
    refused, corrected = (one for one in report["stagings"] if one["host"] == "host-2")
    assert "inputs/tokenizer/chat_template.jinja (chat template) is missing" in refused["refused"]
    assert (corrected["refused"], corrected["attempt"], corrected["files"]) == ("", 2, 1)
    told = [(event["attempt"], bool(event["refused"])) for event in finished.controller() if event.name == "staged"]
    assert told[-2:] == [(1, True), (2, False)]


def test_the_third_host_received_its_own_shard_and_nothing_else(finished: Run) -> None:
    report, store = finished.report, finished.operator
    early = Digest.parse(roots(report)[0])
    came = [one for one in report["pulled"] if one["host"] == "host-2"]
    assert {one["shard"] for one in came} == {1}
    closure = store.closure(early, [1], files=False)
    assert came[0]["received_bytes"] == sum(size for _, size in closure.sizes())
    assert [one["withheld"] for one in report["stagings"] if one["host"] == "host-2"] == [
        ["inputs/weights/shard-0.safetensors"]
    ] * 2
    survivor = [one for one in report["pulled"] if one["host"] == "host-0" and one["root"] == str(early)]
    assert survivor[1]["received_bytes"] == 0
    assert survivor[1]["readback_bytes"] > 5_000_000


def test_every_worker_ran_the_staged_sources_and_owned_a_part(finished: Run) -> None:
    report = finished.report
    joined = [
        event
        for path in sorted(finished.out.glob("events/host-*/*.jsonl"))
        for event in events.read(path)
        if event.name == "joined"
    ]
    assert len(joined) == 8
    assert all(event["staged_sources"] and event["fenced"] for event in joined)
    assert [one["parameters"] for one in report["ownership"]] == [427_136, 393_728]
    assert sum(one["parameters"] for one in report["ownership"]) == report["plan"]["parameters"] == 820_864
    assert report["controller"]["torch_imported"] is False


def test_boundary_bytes_are_those_of_the_plans_batches(finished: Run) -> None:
    """Shard 0 sends the activations in front of shard 1, and the gradients of those that came back: two tensors."""
    plan = read_plan(finished.out / "prepared" / "plan")
    width = plan.config.hidden * {"bfloat16": 2, "float32": 4}[plan.numerics.compute]
    for one in (*finished.report["updates"]["reference"], *finished.report["updates"]["continued"]):
        micros = plan.update(one["update"]).microbatches
        positions = sum(len(micro.documents) * micro.length for micro in micros)
        assert one["sent_bytes"] == one["received_bytes"] == 2 * positions * width
    first = finished.report["groups"][0]
    assert first["sent_bytes"] == 2 * sum(one["sent_bytes"] for one in finished.report["updates"]["reference"])


def test_the_report_counts_who_was_trained_and_who_was_scored(finished: Run) -> None:
    data = finished.report["data"]
    sizes = {one["name"]: one["documents"] for one in data["sets"]}
    assert sizes == {"phase-one": 1024, "phase-two": 1024, "test-a": 64, "test-b": 64, "retention": 64}
    assert (data["trained"], data["trained_again"], data["scored"]) == (1536, 512, 192)
    assert data["trained_and_scored"] == 0
    page = (finished.out / "report.html").read_text()
    assert "0 of the 192 scored documents are among the 1536 that were trained" in page


def test_start_middle_and_last_weights_were_scored_alike_by_both_workers(finished: Run) -> None:
    found = finished.report["evaluation"]
    assert [one["update"] for one in found["runs"]] == [0, 32, 64]
    for one in found["runs"]:
        assert set(one["workers"].values()) == {one["digest"]}
    assert [one["root"] for one in found["runs"]] == [None, *roots(finished.report)[1:]]
    for stage in found["scores"]:
        assert [(s["name"], s["documents"], s["generated"]) for s in stage["sets"]] == [
            ("test-a", 64, 16),
            ("test-b", 64, 16),
            ("retention", 64, 0),
        ]
    assert len(found["answers"]) == 32
    assert found["verdict"]["text"].split(":")[0] in ("promote", "do not promote")


def test_no_host_and_no_process_is_left(finished: Run) -> None:
    cleanup = finished.report["cleanup"]
    assert len(cleanup["processes"]) == 8
    assert all(one["gone"] for one in (*cleanup["processes"], *cleanup["folders"]))
    assert not list(finished.out.glob("hosts*"))
    assert not list(finished.out.glob(".sealed*"))
    assert processes_below(finished.out) == []


def test_update_time_and_launched_time_are_two_figures(finished: Run) -> None:
    for group in finished.report["groups"]:
        launched = group["ended"] - group["began"]
        assert 0 <= group["update_seconds"] < launched
        assert group["began"] < group["joined"] < group["ended"]
    assert [len(group["updates"]) for group in finished.report["groups"]] == [32, 3, 48, 0]


def test_the_evidence_stands_alone_and_was_read_back_from_the_store(finished: Run) -> None:
    info = evidence.verify(finished.out / "archive" / "evidence.tar")
    archive = finished.report["archive"]
    assert (archive["sha256"], archive["bytes"], archive["readback_bytes"]) == (info.sha256, info.size, info.size)
    assert info.sha256 in finished.stdout
    paths = {member.path for member in info.members}
    assert {"report.json", "report.html", "roots.json", "events/controller.jsonl", "evaluations/64.json"} <= paths
    assert "events/host-1/generation-2-shard-1.jsonl" in paths
    assert any(path.endswith("/plan.json") for path in paths)
    assert any(path.endswith("/trainer/compute/step.py") for path in paths)
    assert any(path.endswith("/tokenizer/chat_template.jinja") for path in paths)
    for root in roots(finished.report):
        hexes = root.removeprefix("b3:")
        assert f"documents/{hexes[:2]}/{hexes}" in paths
        assert any(path.startswith(f"receipts/{hexes}/") for path in paths)
    assert all(reference.key.startswith("objects/") for reference in info.references)
    assert finished.operator.tree(Digest.parse(archive["tree"])).files[0].size == info.size


def test_the_page_is_made_from_the_report_alone_and_opens_no_connection(finished: Run) -> None:
    page = (finished.out / "report.html").read_text()
    assert page == render(finished.report)
    assert page.count("<svg") == 4
    assert not re.search(r"https?:|//[a-z]|<script|<link|<img|@import|url\(", page)


def test_a_run_never_overwrites_another(tmp_path: Path) -> None:
    assert fresh_folder(tmp_path / "run") == tmp_path / "run"
    assert fresh_folder(tmp_path / "run") == tmp_path / "run"  # still empty
    (tmp_path / "run" / "report.json").touch()
    assert fresh_folder(tmp_path / "run") == tmp_path / "run-2"
    (tmp_path / "run-2" / "x").touch()
    (tmp_path / "run-3").touch()
    assert fresh_folder(tmp_path / "run") == tmp_path / "run-4"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--profile", "none"], 2, "invalid choice"),
        (["--operator", "https://example.org/store"], UsageError.exit_code, "no backend for this kind of URL"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(tmp_path: Path, arguments: Sequence[str], code: int, says: str) -> None:
    done = run(tmp_path / "run", "--compute", "float32", *arguments)
    assert done.code == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_cannot_write_says_so_in_one_line_and_keeps_what_there_is(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        "from trainer.commands import main; sys.exit(main(sys.argv[1:]))"
    )
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", script, *command(out, "--compute", "float32")[3:]],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == BackendError.exit_code
    assert re.fullmatch(r"trainer: .*shard-0\.safetensors.*: File too large.*\n", done.stderr)
    assert "FAILED" in done.stdout
    assert "File too large" in json.loads((out / "failure.json").read_text())["message"]
    assert [event.name for event in events.read(out / "events" / "controller.jsonl")][-1] == "failed"


def test_preparing_alone_gives_the_identity_of_the_run(finished: Run, tmp_path: Path) -> None:
    compute = finished.report["binding"]["compute"]
    arguments = ["-m", "trainer", "prepare", "--out", str(tmp_path / "prepared"), "--compute", compute]
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(), capture_output=True, text=True, timeout=100, check=True
    )
    printed = dict(line.split() for line in done.stdout.splitlines())
    assert printed == {**finished.report["trees"], "prepared": finished.report["prepared_identity"]}


@pytest.mark.deep
def test_another_run_elsewhere_has_the_same_identity_and_the_same_roots(finished: Run, tmp_path: Path) -> None:
    again = run(tmp_path / "another folder", "--operator", str(tmp_path / "ä store"))
    assert again.code == 0, again.stderr
    assert again.report["prepared_identity"] == finished.report["prepared_identity"]
    assert roots(again.report) == roots(finished.report)
    assert again.report["evaluation"]["scores"] == finished.report["evaluation"]["scores"]
    store = ckptstore.open(tmp_path / "ä store")
    assert str(store.head("lifecycle")) == roots(finished.report)[2]


@pytest.mark.deep
def test_a_host_that_falls_silent_is_found_by_its_heartbeats(finished: Run, tmp_path: Path) -> None:
    done = run(tmp_path / "run", "--mode", "stop")
    assert done.code == 0, done.stderr
    lost = done.report["loss_of_host"]
    assert lost["detected_by"] == "3 heartbeats missed"
    # The plan says how the host is lost, so the roots are others; what was computed is the same.
    assert done.report["prepared_identity"] != finished.report["prepared_identity"]
    assert [one["exact"] for one in done.report["updates"]["continued"]] == [
        one["exact"] for one in finished.report["updates"]["continued"]
    ]


@pytest.mark.deep
def test_one_flipped_bit_is_found_with_its_update_and_its_tensor(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "--sabotage")
    assert done.code == NotAsPlannedError.exit_code
    (flipped,) = [event for event in done.controller() if event.name == "sabotaged"]
    assert (flipped["role"], flipped["shard"]) == ("exp_avg", 1)
    # The loss and norm of update 17 are of weights that the moment has not touched yet.
    assert "first difference in update 18: loss 0x" in done.stderr
    assert f"most of all weight '{flipped['tensor']}'" in done.stderr
    assert f"exp_avg {flipped['tensor']}" in done.stderr
    assert "NOT AS PLANNED" in done.stdout
    assert "Traceback" not in done.stderr
    for folder in (
        "hosts/host-0/store",
        "hosts/host-2/store",
        "lost/host-1/store",
        "reference",
        "operator",
        "events/host-1",
    ):
        assert (done.out / folder).is_dir()
    failure = json.loads((done.out / "failure.json").read_text())
    assert failure["type"] == "NotAsPlannedError"
    assert [phase["ok"] for phase in failure["phases"]] == [True] * 5 + [False]
    assert processes_below(done.out) == []
    # What the message says can be had again with the command that it names.
    found = ckptstore.open(done.out / "reference").diff("lifecycle", "lifecycle", done.operator)
    assert found.relation == "different"
    assert flipped["tensor"] in {change.path for change in found.tensors}


@pytest.mark.deep
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_no_worker_outlives_its_controller(tmp_path: Path, number: signal.Signals, code: int) -> None:
    out = tmp_path / "run"
    controller = subprocess.Popen(
        command(out, "--compute", "float32", "--hosts", "process"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    host = out / "events" / "controller.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (out / "hosts" / "host-1" / "events").exists() and host.exists():
            path = out / "hosts" / "host-1" / "events" / "generation-1-shard-1.jsonl"
            if path.exists() and any(event.name == "update" for event in events.read(path)):
                break
        time.sleep(0.05)
    assert len(processes_below(out)) == 5  # an agent and a worker on each of two hosts
    controller.send_signal(number)
    stdout, stderr = controller.communicate(timeout=60)
    assert controller.returncode == code, (stdout, stderr)
    while processes_below(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_below(out) == []
    if code == 130:
        assert stderr.endswith("interrupted; no worker is left, and what was made is kept\n")
        assert "Traceback" not in stderr


@pytest.mark.deep
def test_any_launcher_that_sets_the_environment_can_start_workers(tmp_path: Path) -> None:
    """Two workers as `torchrun --rdzv-backend=static` would start them: orders from a file, a port that is known."""
    import socket

    from trainer.compute.numerics import env_for
    from trainer.preparation import planning, prepare
    from trainer.workers import orders
    from trainer.workers.worker import events_path

    prepared = prepare.prepare(planning.profile("demo"), tmp_path / "host", compute="float32")
    lines = [orders.Start(), orders.Train(1, 2), orders.Close()]
    (tmp_path / "orders.jsonl").write_bytes(b"".join(orders.encode(order) for order in lines))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **environment(),
        **env_for(prepared.plan.numerics.kernels),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    arguments = ["--host", str(tmp_path / "host"), "--identity", "0" * 64, "--orders", str(tmp_path / "orders.jsonl")]
    workers = [
        subprocess.Popen([sys.executable, "-m", "trainer", "worker", *arguments], env={**common, "RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    exact = [
        [event["exact"] for event in events.read(events_path(tmp_path / "host", 0, rank)) if event.name == "update"]
        for rank in range(2)
    ]
    assert len(exact[0]) == 2
    assert exact[0] == exact[1]
