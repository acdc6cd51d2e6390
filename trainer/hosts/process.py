"""Hosts that share the machine, each with an agent: separate process groups and folders, and nothing more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckptstore.errors import BackendError
from trainer.hosts.agenthost import AgentHost
from trainer.hosts.backend import ALWAYS, PROCESS
from trainer.hosts.connection import Connection
from trainer.workers.hosts import Host, Shut

_PATIENCE = 10.0  # seconds


class ProcessHosts:
    """Backend of hosts that are process groups and folders. ``fresh`` as in :class:`AgentHost`."""

    kind = PROCESS
    claim = (
        "hosts are folders and process groups on one machine, each with an agent of its own; an audit hook in every "
        "worker refuses opens under another host's folder; nothing is claimed about separate hardware, kernels, disks "
        "or networks"
    )
    modes = ALWAYS
    isolated_network = False

    def __init__(self, *, fresh: bool = False) -> None:
        self._fresh = fresh

    def host(self, area: Path, name: str, readable: Sequence[Path]) -> Host:
        return ProcessHost(area, name, fresh=self._fresh)

    def reachable(self, address: str, port: int) -> tuple[str, int]:
        return address, port

    def close(self) -> tuple[Shut, ...]:
        return ()


class ProcessHost(AgentHost):
    """A folder and the process groups of an agent and of what it runs."""

    def __init__(self, area: Path, name: str, *, fresh: bool = False) -> None:
        super().__init__(area, name, fresh=fresh)
        self._agent: subprocess.Popen[bytes] | None = None

    def _start_agent(self, environment: Mapping[str, str]) -> Connection:
        try:
            with self._stderr.open("ab") as stderr:
                agent = self._agent = subprocess.Popen(
                    self._agent_arguments(sys.executable),
                    cwd=self.home,
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    start_new_session=True,
                )
        except OSError as error:
            raise BackendError(f"agent of {self.name}", f"{error.strerror}: {sys.executable}") from None
        assert agent.stdin is not None
        assert agent.stdout is not None
        return Connection(agent.stdout, agent.stdin, self.name, agent.stdin.close, agent.kill)

    def lose(self) -> None:
        """SIGKILL of the agent: the kernel then ends its workers, which asked for that when they began."""
        if self._agent is not None:
            self._agent.kill()

    def swept(self, pid: int) -> bool:
        if pid == 0:
            return True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # a worker that had not asked for it yet
        return not _exists(pid)

    def _shut(self) -> Shut:
        pid, gone = 0, True
        if self._agent is not None:
            pid = self._agent.pid
            with suppress(subprocess.TimeoutExpired):
                self._agent.wait(_PATIENCE)
            gone = self._agent.returncode is not None and not _exists(pid)
        return Shut(self.name, pid, (), "", gone, True, True)


def _exists(pid: int) -> bool:
    """Whether any process of a group exists."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS: only what is left of dead ones
        return False
    return True
