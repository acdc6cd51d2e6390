"""Hosts that a command reaches: what their file has to say, and how files get there and back. No ssh: a shell."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.errors import BackendError, MalformedError, NotFoundError, UsageError
from tests.trainer.test_agents import ENVIRONMENT, Started, status
from trainer.hosts.ssh import SshHost, SshHosts, read_machines

GOOD = """
command = ["sh", "-c", "{command}"]
python = "PYTHON"
folder = "FOLDER"

[[machine]]
name = "one"
address = "127.0.0.1"
interface = "lo"
"""


def machines(tmp_path: Path, text: str = GOOD) -> Path:
    path = tmp_path / "machines.toml"
    path.write_text(text.replace("PYTHON", sys.executable).replace("FOLDER", str(tmp_path / "there")))
    (tmp_path / "there").mkdir(exist_ok=True)
    return path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SshHost]:
    (tmp_path / "run").mkdir()
    made = SshHosts(read_machines(machines(tmp_path)), fresh=True).host(tmp_path / "run", "host-0", [])
    assert isinstance(made, SshHost)
    yield made
    assert made.shut().gone


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("command =", "order ="), "command is None"),
        (("{command}", "true"), "no {command}"),
        (('folder = "FOLDER"', 'folder = "here"'), "folder has to be absolute"),
        (("[[machine]]", "[machine]"), "machine is no table"),
        (('name = "one"', "name = 1"), "machine.name is 1"),
        (('interface = "lo"', 'port = "22"'), "has more than name"),
        (("command =", "command ="), ""),
        (("[[machine]]", "what = 1\n[[machine]]"), "what is not known"),
        (('"sh", ', '"sh", ,'), "Invalid value"),
    ],
)
def test_a_file_of_machines_that_is_wrong_is_told_what(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    path = machines(tmp_path, GOOD.replace(*change))
    if not says:
        assert [one.name for one in read_machines(path).machines] == ["one"]
        return
    with pytest.raises(MalformedError, match=says.replace("{", r"\{")):
        read_machines(path)


def test_a_file_that_is_not_there_and_one_machine_too_many_are_refused(tmp_path: Path, host: SshHost) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_machines(tmp_path / "absent.toml")
    backend = SshHosts(read_machines(machines(tmp_path)))
    with pytest.raises(UsageError, match="a machine does not see"):
        backend.host(tmp_path / "run", "host-1", [tmp_path])
    backend.host(tmp_path / "run", "host-2", []).clear()
    with pytest.raises(UsageError, match="all 1 machines are taken"):
        backend.host(tmp_path / "run", "host-3", [])


def test_files_get_there_and_what_was_written_there_comes_back(host: SshHost) -> None:
    assert host.listing() == []
    (host.directory / "plan").mkdir()
    (host.directory / "plan" / "a plan.json").write_text("{}")
    host.publish()
    assert host.listing() == ["plan", "plan/a plan.json"]
    (host.home / "events").mkdir()
    (host.home / "events" / "said.jsonl").write_text("one\n")
    host.collect()
    assert (host.directory / "events" / "said.jsonl").read_text() == "one\n"
    (host.home / "events" / "said.jsonl").write_text("one\ntwo\n")
    host.collect()
    assert (host.directory / "events" / "said.jsonl").read_text() == "one\ntwo\n"
    host.remove("events")
    assert host.listing() == ["plan", "plan/a plan.json"]
    receipt = host.clear()
    assert (receipt.gone, host.home.exists(), host.run_folder.exists()) == (True, False, False)


@pytest.mark.deep
def test_its_agent_is_reached_by_the_command_and_ends_with_it(host: SshHost) -> None:
    host.begin(ENVIRONMENT)
    with Started(host, "import os, sys; os.write(int(sys.argv[1]), os.getcwd().encode() + b'\\n')") as process:
        assert process.says() == f"{host.home}\n".encode()
        assert status(process.process) == 0
    with Started(host, "import time; time.sleep(600)", name="sleeper") as sleeper:
        host.lose()
        assert sleeper.says() == b""
        assert sleeper.process.end() == -9
        assert not Path(f"/proc/{sleeper.process.pid}").exists()


def test_a_machine_that_is_not_reached_is_named_with_what_to_try(tmp_path: Path) -> None:
    text = GOOD.replace(
        '["sh", "-c", "{command}"]', '["sh", "-c", "echo no way to {machine} >&2; exit 255 #{command}"]'
    )
    (tmp_path / "run").mkdir()
    with pytest.raises(BackendError, match=r"host-0 on one: 255 from mkdir.*no way to one") as raised:
        SshHosts(read_machines(machines(tmp_path, text))).host(tmp_path / "run", "host-0", [])
    assert raised.value.hint.startswith("try sh -c")
