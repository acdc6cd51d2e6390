"""Hosts in namespaces of their own: network with an address, processes, mounts without a path to another's folder."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckptstore.errors import BackendError
from trainer.hosts.agenthost import AgentHost
from trainer.hosts.backend import ALWAYS, NAMESPACE
from trainer.hosts.connection import Connection
from trainer.hosts.forward import Forward
from trainer.hosts.network import Network, in_use
from trainer.preparation.plan import SILENT
from trainer.workers.hosts import Host, Shut, View

INTERFACE = "eth0"
_PATIENCE = 10.0  # seconds
_ADDRESSES = 200


def open_network() -> Network:
    """A network for hosts, as root or in a user namespace.

    Raises:
        BackendError: this machine has none for us; says why.
    """
    if sys.platform != "linux":
        raise BackendError("namespaces", f"{sys.platform} has none")
    if shutil.which("ip", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))) is None:
        raise BackendError("namespaces", "the program ip is not installed", "install iproute2")
    refused = ""
    for user in (False, True) if os.geteuid() == 0 else (True,):
        try:
            return Network(user=user)
        except BackendError as error:
            refused = refused or error.why
    raise BackendError("namespaces", refused)


class NamespaceHosts:
    """Backend of hosts in namespaces. ``fresh`` as in :class:`AgentHost`.

    Raises:
        BackendError: this machine does not let us.
    """

    kind = NAMESPACE
    claim = (
        "hosts are separate network, pid, mount, ipc and host name namespaces on one machine, each with an address of "
        "its own on a bridge and a folder of its own; of the run's folder they see that and the operator's store, to "
        "be read only, and they have no capabilities; losing one is SIGKILL of the first process of its pid namespace, "
        "with its link taken down before if it is lost silently; the rest of the machine's files is common; nothing is "
        "claimed about separate hardware, kernels, disks, network cards or power"
    )
    modes = (*ALWAYS, SILENT)
    isolated_network = True

    def __init__(self, *, fresh: bool = False) -> None:
        self._fresh = fresh
        self._network = open_network()
        self._forwards: list[Forward] = []
        self._hosts = 0

    def host(self, area: Path, name: str, readable: Sequence[Path]) -> Host:
        self._hosts += 1
        if self._hosts > _ADDRESSES:
            raise BackendError(f"host {name}", f"there are addresses for {_ADDRESSES} hosts in a run")
        return NamespaceHost(area, name, self._network, self._hosts, readable, fresh=self._fresh)

    def reachable(self, address: str, port: int) -> tuple[str, int]:
        listener, ours = self._network.listen()
        self._forwards.append(Forward(listener, (address, port)))
        return ours

    def close(self) -> tuple[Shut, ...]:
        for forward in self._forwards:
            forward.close()
        gone = self._network.close()
        return (Shut("network", 0, (self._network.namespace,), "br0", gone, gone, gone),)


class NamespaceHost(AgentHost):
    """A host behind a link of its own. Its namespaces exist as soon as this object does."""

    def __init__(
        self,
        area: Path,
        name: str,
        network: Network,
        number: int,
        readable: Sequence[Path],
        *,
        fresh: bool = False,
    ) -> None:
        super().__init__(area, name, fresh=fresh)
        self._network, self._number = network, number
        places = [path.resolve() for path in readable]
        call = network.host(number, name, area.resolve(), self.directory.resolve(), places, self._stderr)
        self._call = call
        self._init = os.pidfd_open(call.pid)
        self.view = View(call.address, call.namespaces, call.listing, call.visible)
        self.address = call.address
        self.interface = INTERFACE
        self._home = self.directory.resolve()

    @property
    def home(self) -> Path:
        return self._home

    @property
    def run_folder(self) -> Path:
        return self.area.resolve()

    def _start_agent(self, environment: Mapping[str, str]) -> Connection:
        begin = {
            "arguments": self._agent_arguments(sys.executable),
            "environment": dict(environment),
            "folder": str(self.home),
            "stderr": f"{self.home}/logs/agent.stderr",
        }
        line = self._call.connection
        (self.directory / "logs").mkdir(exist_ok=True)
        with suppress(OSError):  # who is gone already is found out by the agent's silence
            line.sendall(json.dumps(begin).encode() + b"\n")
        reading, writing = line.makefile("rb"), line.makefile("wb")

        def say_no_more() -> None:
            writing.close()
            line.shutdown(socket.SHUT_WR)

        return Connection(reading, writing, self.name, say_no_more, self._hang_up)

    def lose(self) -> None:
        with suppress(ProcessLookupError):
            if self._init >= 0:
                signal.pidfd_send_signal(self._init, signal.SIGKILL)

    def cut(self) -> None:
        """Take its link down: from now on nothing comes from it, not even that it has ended."""
        self._network.cut(self._number)

    def dead(self) -> bool:
        return self._init < 0 or bool(select.select([self._init], [], [], 0)[0])

    def swept(self, pid: int) -> bool:
        return self.dead()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._call.connection.shutdown(socket.SHUT_RDWR)

    def _shut(self) -> Shut:
        if self._connection is None:
            self._hang_up()
        deadline = time.monotonic() + _PATIENCE
        while not self.dead() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.lose()
        with suppress(BackendError):  # it may go by itself at this moment; what counts is whether it is there below
            self._network.unplug(self._number)
        names, link = tuple(self._call.namespaces.values()), f"v{self._number}"
        while (not self.dead() or self._left(names, link)) and time.monotonic() < deadline:
            time.sleep(0.01)  # the kernel takes a namespace apart after its last process
        used, linked, gone = in_use(names), link in self._network.links(), self.dead()
        self._call.connection.close()
        if gone and self._init >= 0:
            os.close(self._init)
            self._init = -1
        return Shut(self.name, self._call.pid, names, link, gone, not used, not linked)

    def _left(self, names: Sequence[str], link: str) -> bool:
        return bool(in_use(names)) or link in self._network.links()
