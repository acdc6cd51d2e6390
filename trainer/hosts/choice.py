"""Which kind of hosts a run gets: the one that was asked for, or the best that this machine has."""

from __future__ import annotations

from pathlib import Path

from ckptstore.errors import BackendError, UsageError
from trainer.hosts.backend import KINDS, NAMESPACE, PROCESS, SSH, Backend
from trainer.hosts.namespace import NamespaceHosts
from trainer.hosts.process import ProcessHosts
from trainer.hosts.ssh import SshHosts, read_machines


def open_hosts(kind: str | None, *, fresh: bool = False, machines: Path | None = None) -> tuple[Backend, str]:
    """Hosts of a kind, and why they are not of a better one (empty if they are).

    Args:
        kind: one of :data:`KINDS`; None for namespaces where this machine has them for us, else process groups.
        fresh: start a new interpreter for each worker.
        machines: file that says how machines are reached, for ``ssh`` (:func:`trainer.hosts.ssh.read_machines`).

    Raises:
        BackendError: this machine has no namespaces for us, and they were asked for.
        UsageError: there is no such kind, or the file is missing, or is there for another kind.
    """
    if (kind == SSH) != (machines is not None):
        raise UsageError("hosts", "a file of machines is for hosts that ssh reaches", "--hosts ssh --machines FILE")
    if kind == SSH and machines is not None:
        return SshHosts(read_machines(machines), fresh=fresh), ""
    if kind == PROCESS:
        return ProcessHosts(fresh=fresh), ""
    if kind == NAMESPACE:
        return NamespaceHosts(fresh=fresh), ""
    if kind is not None:
        raise UsageError(f"hosts {kind!r:.40}", f"there are {', '.join(KINDS)}")
    try:
        return NamespaceHosts(fresh=fresh), ""
    except BackendError as error:
        return ProcessHosts(fresh=fresh), f"no namespaces here ({error.why})"
