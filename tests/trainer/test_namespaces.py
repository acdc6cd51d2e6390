"""Hosts in namespaces: what separates them, how they are lost, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import BackendError, UsageError
from tests.trainer.test_agents import ECHO, ENVIRONMENT, Started, status
from trainer.hosts.backend import PROCESS
from trainer.hosts.choice import open_hosts
from trainer.hosts.namespace import NamespaceHost, NamespaceHosts
from trainer.hosts.network import in_use
from trainer.preparation.plan import SILENT


def refused() -> str:
    """Why this machine has no namespaces for us; empty if it has."""
    try:
        NamespaceHosts().close()
    except BackendError as error:
        return error.why
    return ""


WHY_NOT = refused()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no namespaces: {WHY_NOT}")

MakeHost = Callable[..., NamespaceHost]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeHost]:
    """Makes hosts whose agents have not imported torch; the last of them is gone when the test is over."""
    backend = NamespaceHosts(fresh=True)
    made: list[NamespaceHost] = []

    def make_host(name: str, *readable: Path) -> NamespaceHost:
        host = backend.host(tmp_path / "run", name, readable)
        assert isinstance(host, NamespaceHost)
        host.begin(ENVIRONMENT)
        made.append(host)
        return host

    (tmp_path / "run").mkdir()
    make_host.backend = backend  # type: ignore[attr-defined]
    yield make_host
    assert all(host.shut().gone for host in made)
    (network,) = backend.close()
    assert network.gone


def answer(host: NamespaceHost, expression: str) -> Any:
    """The value of an expression in a process of the host, or the name of the error that it raised."""
    script = (
        "import json, os, pathlib, socket, sys\n"
        f"try:\n    value = {expression}\n"
        "except Exception as error:\n    value = type(error).__name__\n"
        "os.write(int(sys.argv[1]), json.dumps(value).encode() + b'\\n')\n"
    )
    with Started(host, script, name=f"asks-{time.monotonic_ns()}") as process:
        return json.loads(process.says())


def test_a_host_sees_its_own_folder_and_address_and_no_other_host(make: MakeHost, tmp_path: Path) -> None:
    operator = tmp_path / "run" / "operator"
    operator.mkdir()
    (operator / "object").write_text("bytes")
    (tmp_path / "run" / "reference").mkdir()
    first, second = make("host-0", operator), make("host-1", operator)
    (first.directory / "secret").write_text("of host 0")
    assert second.view is not None
    assert (second.view.listing, second.view.visible) == ((), ("hosts", "hosts/host-1", "operator"))
    assert answer(second, f"sorted(os.listdir({str(tmp_path / 'run')!r}))") == ["hosts", "operator"]
    assert answer(second, f"os.listdir({str(first.directory.parent)!r})") == ["host-1"]
    assert answer(second, f"open({str(first.directory / 'secret')!r}).read()") == "FileNotFoundError"
    assert answer(first, f"open({str(first.directory / 'secret')!r}).read()") == "of host 0"
    assert answer(second, f"open({str(operator / 'object')!r}).read()") == "bytes"
    assert answer(second, f"open({str(operator / 'object')!r}, 'w').write('x')") == "OSError"
    assert answer(second, f"os.mkdir({str(tmp_path / 'run' / 'elsewhere')!r})") == "OSError"
    assert answer(second, "socket.gethostname()") == "host-1"
    assert answer(second, "sorted(name for _, name in socket.if_nameindex() if name in ('lo', 'eth0'))") == [
        "eth0",
        "lo",
    ]
    pids = answer(second, "sorted(int(name) for name in os.listdir('/proc') if name.isdecimal())")
    assert pids[0] == 1
    assert len(pids) == 2  # the agent and the one that was asked


def test_what_is_covered_cannot_be_uncovered(make: MakeHost, tmp_path: Path) -> None:
    host = make("host-0")
    library = "__import__('ctypes').CDLL(None, use_errno=True)"
    assert answer(host, f"{library}.umount2({str(tmp_path / 'run')!r}.encode(), 2)") == -1
    assert answer(host, f"{library}.unshare(0x20000)") == -1
    capabilities = answer(host, "[line for line in open('/proc/self/status') if line.startswith(('CapEff', 'CapBnd'))]")
    assert [int(line.split()[1], 16) for line in capabilities] == [0, 0]


@pytest.mark.deep
def test_hosts_reach_each_other_and_a_server_of_the_machine_only_through_its_door(make: MakeHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ours = make.backend.reachable("127.0.0.1", port)  # type: ignore[attr-defined]

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(connection.recv(100).upper())

        threading.Thread(target=serve, daemon=True).start()
        first, second = make("host-0"), make("host-1")
        asks = "(lambda s: (s.sendall(b'word'), s.recv(100).decode())[1])(socket.create_connection({}, timeout=10))"
        assert answer(first, f"socket.create_connection(('127.0.0.1', {port}), timeout=10)") == "ConnectionRefusedError"
        assert answer(first, asks.format(ours)) == "WORD"
        # Nobody listens there, and it is the other host that says so.
        there = (second.address, 1)
        assert answer(first, f"socket.create_connection({there}, timeout=10)") == "ConnectionRefusedError"
        assert answer(first, "socket.create_connection(('192.0.2.1', 80), timeout=10)") == "OSError"


def test_a_host_that_is_killed_is_gone_at_once_with_all_its_processes(make: MakeHost) -> None:
    host = make("host-0")
    with Started(host, ECHO) as echo:
        assert echo.says() == b"ready\n"
        assert not host.dead()
        host.lose()
        assert echo.says() == b""  # its link is up, and the kernel says goodbye for it
        assert status(echo.process) == -signal.SIGKILL
        assert echo.process.end() == -signal.SIGKILL
        assert not echo.process.present()
        assert host.dead()
    assert host.shut().gone


@pytest.mark.deep
def test_a_host_whose_link_is_cut_falls_silent_and_is_not_seen_to_end(make: MakeHost) -> None:
    lost, other = make("host-0"), make("host-1")
    with Started(lost, ECHO) as echo, Started(other, ECHO) as still:
        assert echo.says() == still.says() == b"ready\n"
        lost.cut()
        lost.lose()
        while lost.seconds_silent < 2.5:
            time.sleep(0.05)
        assert echo.process.poll() is None
        still.process.send(b"others go on\n")
        assert still.says() == b"others go on\n"
        assert other.seconds_silent < 2.5
        # Who gives it up comes to know by the machine that it is gone.
        assert echo.process.end() == -signal.SIGKILL


@pytest.mark.deep
def test_nothing_of_hosts_is_left_when_their_controller_is_killed(tmp_path: Path) -> None:
    script = (
        "import json, os, sys; from pathlib import Path; from trainer.hosts.namespace import NamespaceHosts\n"
        "backend = NamespaceHosts(fresh=True); host = backend.host(Path(sys.argv[1]), 'host-0', [])\n"
        "host.begin(dict(os.environ)); host.launch('a', ['-c', 'import time; time.sleep(600)'], dict(os.environ))\n"
        "print(json.dumps([backend._network.namespace, *host.view.namespaces.values()]), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    namespaces = json.loads(done.stdout)
    assert len(namespaces) == 6
    deadline = time.monotonic() + 30
    while in_use(namespaces) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert in_use(namespaces) == []


def test_without_the_program_ip_process_groups_take_their_place_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    backend, why = open_hosts(None)
    assert (backend.kind, why) == (PROCESS, "no namespaces here (the program ip is not installed)")
    assert SILENT not in backend.modes
    with pytest.raises(BackendError, match="install iproute2"):
        open_hosts("namespace")


@pytest.mark.deep
def test_who_is_not_root_gets_the_same_in_a_user_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    try:
        backend = NamespaceHosts(fresh=True)
    except BackendError as error:
        pytest.skip(f"no user namespaces: {error.why}")
    host = backend.host(tmp_path, "host-0", [])
    assert isinstance(host, NamespaceHost)
    user = os.readlink(f"/proc/{backend._network._process.pid}/ns/user")
    assert user != os.readlink("/proc/self/ns/user")
    host.begin(ENVIRONMENT)
    assert answer(host, "os.readlink('/proc/self/ns/user')") == user
    assert answer(host, f"os.listdir({str(tmp_path)!r})") == ["hosts"]
    assert host.shut().gone
    assert all(one.gone for one in backend.close())


def test_a_file_of_machines_belongs_to_ssh_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a file of machines is for hosts that ssh reaches"):
        open_hosts("namespace", machines=tmp_path)
    with pytest.raises(UsageError, match="a file of machines"):
        open_hosts("ssh")
