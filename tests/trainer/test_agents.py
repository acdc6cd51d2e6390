"""Agents of hosts: what they start, carry and end. Real agents and processes, without torch where nothing needs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import BackendError, CkptStoreError, MalformedError, UsageError
from trainer.hosts import protocol
from trainer.hosts.agenthost import AgentHost
from trainer.hosts.connection import AgentProcess
from trainer.hosts.process import ProcessHost, ProcessHosts
from trainer.hosts.protocol import Exited, Gone, Heartbeat, Launch, Launched, Line, Ready, Refused, Send, Signal

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

# Says what comes in, until a word that ends it.
ECHO = """
import os, sys
out = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
out.write(b"ready\\n")
for line in sys.stdin.buffer:
    if line == b"end\\n":
        print("some words\\nlast words", file=sys.stderr)
        sys.exit(3)
    out.write(line)
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    """A host of process groups whose agent has not imported torch."""
    made = ProcessHosts(fresh=True).host(tmp_path, "host-0", [])
    assert isinstance(made, ProcessHost)
    made.begin(ENVIRONMENT)
    yield made
    made.shut()


class Started:
    """A process that was started on a host, and what it says."""

    def __init__(self, host: AgentHost, script: str, *, name: str = "process", folder: Path | None = None) -> None:
        self.process = host.launch(name, ["-c", script, "{pipe}"], ENVIRONMENT, folder)
        self.lines = os.fdopen(self.process.events, "rb")

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.end()
        self.lines.close()

    def says(self) -> bytes:
        """Its next line; empty once it has ended."""
        return self.lines.readline()


def status(process: AgentProcess) -> int | None:
    """The exit status of a process that ends by itself."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return process.poll()


@pytest.mark.parametrize(
    "message",
    [
        Launch("a", ("-m", "x"), (("A", "ä\n"),), "/", "/log", True),
        Send("a", protocol.as_text(b"\xff\x00{}\n")),
        Signal("a", 9),
        Ready(1, 1, 0.5),
        Heartbeat(7),
        Launched("a", 5, False, "asked for"),
        Refused("a", "why"),
        Line("a", "{}\n"),
        Exited("a", -9, "words"),
        Gone("a"),
    ],
)
def test_a_message_is_the_same_after_the_way(message: protocol.Message) -> None:
    line = protocol.encode(message)
    assert line.count(b"\n") == 1
    read = protocol.request if isinstance(message, Launch | Send | Signal) else protocol.report
    assert read(line) == message


@given(st.binary(max_size=60) | st.sampled_from([b"{}", b'{"say":"gone","with":{}}', b'{"say":"gone","with":[]}']))
def test_what_is_no_message_is_refused_with_an_error_of_ours(data: bytes) -> None:
    for read in (protocol.request, protocol.report):
        with pytest.raises(CkptStoreError):
            read(data)


def test_a_message_for_the_other_direction_is_refused() -> None:
    with pytest.raises(MalformedError, match="other direction"):
        protocol.request(protocol.encode(Gone("a")))
    with pytest.raises(MalformedError, match="other direction"):
        protocol.report(protocol.encode(Send("a", "b")))


@given(st.binary(max_size=200))
def test_a_line_of_any_bytes_survives_the_way(data: bytes) -> None:
    message = protocol.report(protocol.encode(Line("a", protocol.as_text(data))))
    assert isinstance(message, Line)
    assert protocol.as_bytes(message.line) == data


def test_a_process_is_told_heard_and_ended_with_its_status_and_last_words(host: ProcessHost) -> None:
    with Started(host, ECHO) as echo:
        assert echo.says() == b"ready\n"
        for line in (b'{"a":1}\n', b"\xff\xfe not UTF-8\n", b"x" * 200_000 + b"\n"):
            echo.process.send(line)
            assert echo.says() == line
        echo.process.send(b"end\n")
        assert echo.says() == b""
        assert status(echo.process) == echo.process.end() == 3
        assert echo.process.last_words() == "last words"
        assert not echo.process.present()


def test_two_processes_of_one_agent_are_kept_apart(host: ProcessHost) -> None:
    with Started(host, ECHO, name="a") as first, Started(host, ECHO, name="b") as second:
        assert first.says() == second.says() == b"ready\n"
        second.process.send(b"for b\n")
        first.process.send(b"for a\n")
        assert (first.says(), second.says()) == (b"for a\n", b"for b\n")
        first.process.signal(signal.SIGKILL)
        assert first.says() == b""
        assert first.process.end() == -signal.SIGKILL
        second.process.send(b"still there\n")
        assert second.says() == b"still there\n"


def test_ending_a_process_ends_what_it_has_started(host: ProcessHost) -> None:
    script = (
        "import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "os.write(int(sys.argv[1]), b'%d\\n' % child.pid); child.wait()"
    )
    with Started(host, script) as parent:
        child = int(parent.says())
        assert running(child)
        assert parent.process.end() == -signal.SIGKILL
    assert not running(child)


def test_a_process_that_cannot_be_started_is_an_error_and_the_agent_goes_on(host: ProcessHost, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"process nowhere on host-0.*No such file"):
        Started(host, "", name="nowhere", folder=tmp_path / "absent")
    with Started(host, "", name="after") as done:
        assert (done.says(), status(done.process)) == (b"", 0)


@pytest.mark.deep
def test_with_its_agent_a_host_is_lost_and_nothing_of_it_is_left(host: ProcessHost) -> None:
    # As workers do: the kernel ends it with the agent.
    script = f"from trainer.workers.worker import end_with_launcher; end_with_launcher()\n{ECHO}"
    with Started(host, script) as echo:
        echo.says()
        assert echo.process.poll() is None
        host.lose()
        assert echo.says() == b""
        assert echo.process.end() == -signal.SIGKILL
        assert not running(echo.process.pid)
    with pytest.raises(BackendError, match="the agent of host-0 has ended"):
        Started(host, "", name="late")
    assert host.shut().gone


def test_an_agent_ends_with_its_controller_and_its_processes_with_it(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from trainer.hosts.process import ProcessHost\n"
        "host = ProcessHost(Path(sys.argv[1]), 'host-0', fresh=True); host.begin(dict(os.environ))\n"
        "process = host.launch('sleeper', ['-c', 'import time; time.sleep(600)'], dict(os.environ))\n"
        "print(process.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + 30
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(pid)


def test_a_host_whose_agent_was_not_started_says_so(tmp_path: Path) -> None:
    host = ProcessHost(tmp_path, "host-0")
    with pytest.raises(UsageError, match="its agent was not started"):
        host.launch("a", ["-c", ""], ENVIRONMENT)
    assert host.shut().gone


def test_a_host_that_shares_its_network_cannot_be_cut_off(host: ProcessHost) -> None:
    with pytest.raises(CkptStoreError, match="no link that could be cut"):
        host.cut()


def test_a_worker_is_a_copy_of_the_agent_unless_a_library_read_other_variables(tmp_path: Path) -> None:
    """The copy has what the agent imported, and its own variables, arguments, pipe and folder."""
    (tmp_path / "sources" / "trainer").mkdir(parents=True)
    for path in (ROOT / "trainer").iterdir():
        (tmp_path / "sources" / "trainer" / path.name).symlink_to(path)
    # In the place of the trainer's commands, one that tells what it finds.
    commands = tmp_path / "sources" / "trainer" / "commands.py"
    text = commands.read_text()
    commands.unlink()
    told = (
        "import json, threading\n"
        "def _worker(options):\n"
        "    body = {'torch': 'torch' in sys.modules, 'rank': os.environ.get('RANK'), 'cwd': os.getcwd(),\n"
        "            'threads': threading.active_count(), 'open': sorted(map(int, os.listdir('/proc/self/fd')))[:4]}\n"
        "    os.write(options.pipe, json.dumps(body).encode() + b'\\n')\n"
        "    return 0\n"
    )
    commands.write_text(text + told)
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path / 'sources'}:{ROOT}", "MKL_NUM_THREADS": "1"}
    host = ProcessHost(tmp_path, "host-0")
    host.begin(environment)
    try:
        found = []
        for number, changed in enumerate(({}, {"OMP_NUM_THREADS": "2"})):
            argv = ["-P", "-m", "trainer", "worker", "--host", "x", "--identity", "y", "--pipe", "{pipe}"]
            process = host.launch(f"w{number}", argv, {**environment, "RANK": "5", **changed}, fork=True)
            with os.fdopen(process.events, "rb") as lines:
                found.append((process.forked, json.loads(lines.readline())))
                assert status(process) == process.end() == 0
        (first, copy), (second, new) = found
        assert (first, second) == (True, False)
        assert process.launched is not None
        assert process.launched.why == "the agent was started with other OMP_NUM_THREADS"
        assert (copy["torch"], copy["rank"], copy["threads"]) == (True, "5", 1)
        assert copy["cwd"] == str(host.home)
        assert copy["open"] == [0, 1, 2, 3]
        assert (new["torch"], new["rank"]) == (False, "5")
    finally:
        host.shut()


def running(pid: int) -> bool:
    """Whether a process runs; one that is dead and not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
