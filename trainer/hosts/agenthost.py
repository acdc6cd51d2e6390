"""A host on which an agent starts the processes."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptstore.errors import UsageError
from trainer.hosts.agent import TRAINER
from trainer.hosts.connection import AgentProcess, Connection
from trainer.workers.hosts import Host, Shut

HEARTBEAT = 1.0  # seconds
_GOODBYE = 20.0  # seconds for an agent to end its processes and itself
_LOGS = "logs"


class AgentHost(Host):
    """What hosts with an agent have in common; how the agent is reached is their own affair.

    Args:
        area, name: as of any host.
        fresh: start a new interpreter for each worker; otherwise each is a copy of the agent, which has torch already.
    """

    def __init__(self, area: Path, name: str, *, fresh: bool = False) -> None:
        super().__init__(area, name)
        self.fresh = fresh
        self._connection: Connection | None = None
        self._stderr.parent.mkdir(parents=True, exist_ok=True)

    @property
    def connection(self) -> Connection:
        """To the agent. UsageError before :meth:`begin`."""
        if self._connection is None:
            raise UsageError(f"host {self.name}", "its agent was not started", "call begin() once its files are staged")
        return self._connection

    @property
    def seconds_silent(self) -> float:
        """How long ago the agent was heard; 0 where there is none yet."""
        return 0.0 if self._connection is None else time.monotonic() - self._connection.heard

    def begin(self, environment: Mapping[str, str]) -> None:
        if self._connection is None:
            self._connection = self._start_agent(environment)

    def launch(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        *,
        fork: bool = False,
    ) -> AgentProcess:
        connection = self.connection
        process = AgentProcess(connection, self, name, self.directory / _LOGS / f"{name}.stderr")
        where = str(self._folder(folder))
        stderr = str(self.home / _LOGS / f"{name}.stderr")
        process.start(argv, environment, where, stderr, fork=fork and not self.fresh)
        return process

    def shut(self) -> Shut:
        if self._connection is not None:
            self._connection.drop()
            if not self._connection.ended.wait(_GOODBYE):
                self.lose()
                self._connection.forget()
        return self._shut()

    def dead(self) -> bool:
        """Whether it is known that nothing runs there any more, whatever its agent says or does not say."""
        return False

    def _folder(self, folder: Path | None) -> Path:
        return folder or self.home

    def _agent_arguments(self, python: str) -> list[str]:
        preload = ["--bare"] if self.fresh else []
        return [python, *TRAINER, "agent", "--host", str(self.home), "--heartbeat", str(HEARTBEAT), *preload]

    @property
    def _stderr(self) -> Path:
        """Where the host's own error output goes; not in its folder, which is empty at first."""
        return self.area / "events" / self.name / "host.stderr"

    @abstractmethod
    def swept(self, pid: int) -> bool:
        """Once the agent is gone: make sure that a process group is, too; whether that is known to be so."""

    @abstractmethod
    def _start_agent(self, environment: Mapping[str, str]) -> Connection: ...

    @abstractmethod
    def _shut(self) -> Shut: ...
