"""The whole experiment on each kind of hosts: the same roots, and nothing left of any host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.attack import Attack
from trainer.hosts.backend import NAMESPACE, PROCESS, SSH
from trainer.lifecycle.page import render
from trainer.preparation.plan import KILL, SILENT

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

MACHINES = """
command = ["sh", "-c", "{{command}}"]
python = {python!r}
folder = {folder!r}
shared = true
"""


def finish(folder: Path, *arguments: str, hosts: str) -> dict[str, Any]:
    """The report of a small run; whatever its hosts are, they are gone."""
    attack = Attack(folder, *arguments, hosts=hosts)
    code, out, errors = attack.end()
    assert (code, errors) == (0, ""), f"{out}\n{errors}"
    assert attack.processes() == []
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert report["hosts"]["kind"] == hosts
    cleanup = report["cleanup"]
    names = [one["host"] for one in cleanup["hosts"]]
    assert sorted(names[:3]) == ["host-0", "host-1", "host-2"]
    for one in cleanup["hosts"]:
        assert one["processes_gone"] is one["namespaces_gone"] is one["link_gone"] is True
    assert all(one["gone"] for one in (*cleanup["processes"], *cleanup["folders"]))
    assert (folder / "report.html").read_text() == render(report)
    return report


def answers(report: dict[str, Any]) -> dict[str, Any]:
    """What a run has to end in, whatever its hosts are."""
    updates = {name: [one["exact"] for one in found] for name, found in report["updates"].items()}
    return {"updates": updates, "roots": report["roots"], "identity": report["prepared_identity"]}


@pytest.fixture(scope="module")
def on_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return finish(tmp_path_factory.mktemp("processes") / "run", hosts=PROCESS)


def test_copies_of_an_agent_and_new_interpreters_end_in_the_same_roots(
    tmp_path: Path, on_processes: dict[str, Any]
) -> None:
    fresh = finish(tmp_path / "run", "--fresh", hosts=PROCESS)
    assert answers(fresh) == answers(on_processes)
    assert {one for group in on_processes["groups"] for one in group["forked"]} == {True}
    assert {one for group in fresh["groups"] for one in group["forked"]} == {False}


@pytest.mark.parametrize("mode", [KILL, SILENT])
def test_in_namespaces_a_host_that_dies_is_seen_at_once_and_a_silent_one_by_its_heartbeats(
    tmp_path: Path, on_processes: dict[str, Any], mode: str
) -> None:
    report = finish(tmp_path / "run", "--mode", mode, hosts=NAMESPACE)
    ours, theirs = answers(report), answers(on_processes)
    assert ours["updates"] == theirs["updates"]
    lost = report["loss_of_host"]
    if mode == KILL:
        assert ours == theirs
        assert lost["detected_by"] in ("process gone", "connection lost")
        assert lost["detection_ms"] < 1000 * 3
    else:
        assert lost["detected_by"] == "3 heartbeats missed"
        assert lost["detection_ms"] >= 1000 * 2
    views = report["hosts"]["views"]
    assert len({one["address"] for one in views.values()}) == 3
    assert all(one["listing"] == [] for one in views.values())
    assert views["host-2"]["visible"] == ["hosts", "hosts/host-2", "operator"]
    assert [one["host"] for one in report["cleanup"]["hosts"]][3:] == ["network"]


def test_hosts_in_namespaces_pull_from_a_server_of_the_run(tmp_path: Path, on_processes: dict[str, Any]) -> None:
    report = finish(tmp_path / "run", "--operator", "s3", hosts=NAMESPACE)
    assert answers(report) == answers(on_processes)
    assert report["operator"]["refused_write"].startswith("ReadOnlyError: ")


def test_hosts_that_a_command_reaches_end_in_the_same_roots_and_leave_nothing_there(
    tmp_path: Path, on_processes: dict[str, Any]
) -> None:
    """The command runs a shell of this machine in another folder; real machines are not tested."""
    there = tmp_path / "there"
    there.mkdir()
    text = MACHINES.format(python=sys.executable, folder=str(there))
    machine = '[[machine]]\nname = "{}"\naddress = "127.0.0.1"\ninterface = "lo"\n'
    (tmp_path / "machines.toml").write_text(text + "".join(machine.format(name) for name in "abc"))
    report = finish(tmp_path / "run", "--machines", str(tmp_path / "machines.toml"), hosts=SSH)
    assert answers(report) == answers(on_processes)
    assert list(there.iterdir()) == []
