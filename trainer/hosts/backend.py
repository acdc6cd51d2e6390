"""What a kind of hosts has to offer, whatever isolates them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trainer.preparation.plan import KILL, STOP
from trainer.workers.hosts import Host, Shut

NAMESPACE, PROCESS, SSH = "namespace", "process", "ssh"
KINDS = (NAMESPACE, PROCESS, SSH)

ALWAYS = (KILL, STOP)
"""Ways to lose a host that every kind has."""


class Backend(Protocol):
    """A kind of hosts, ready to make them.

    ``claim`` says for people what separates hosts of this kind from each other and what does not; ``modes`` are the
    ways in which one can be lost; ``isolated_network`` is whether they reach nothing but each other and what
    :meth:`reachable` lets them.
    """

    @property
    def kind(self) -> str: ...

    @property
    def claim(self) -> str: ...

    @property
    def modes(self) -> tuple[str, ...]: ...

    @property
    def isolated_network(self) -> bool: ...

    def host(self, area: Path, name: str, readable: Sequence[Path]) -> Host:
        """A new host.

        Args:
            area: folder of the run.
            name: of the host, new in this run.
            readable: folders that its processes may read where they are; all else of ``area`` is out of their reach
                as far as the kind goes.
        """

    def reachable(self, address: str, port: int) -> tuple[str, int]:
        """Address and port at which hosts reach a server that listens at ``address`` on this machine.

        Raises:
            UsageError: they cannot reach it.
        """

    def close(self) -> tuple[Shut, ...]:
        """End what hosts have in common, after the last of them; returns receipts."""
