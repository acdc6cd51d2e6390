"""How processes of hosts are launched: the command line and the environment of each, and the receipt for its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ckptstore import Digest
from trainer.compute import numerics
from trainer.compute.config import Ownership, partition, show_cuts
from trainer.preparation.plan import Plan
from trainer.preparation.staged import SOURCES
from trainer.workers.hosts import Host

# Beginnings of variables that the plan or this launcher decides: kernels, threads, and what an outer launcher has set.
_DECIDED = ("ATEN_", "CUBLAS_", "DNNL_", "GLOO_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH", "PYTHONPATH")

# Beginnings of variables by which boto3 finds credentials.
_CREDENTIALS = ("AWS_", "BOTO_")

NO_CREDENTIALS: Mapping[str, str] = MappingProxyType(
    {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
)
"""Keeps boto3 off the files and services that it would ask without any variable."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Receipt for a worker's process group: how it ended, and whether every process of it is gone."""

    generation: int
    shard: int
    host: str
    pid: int
    status: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """What all groups of a run are started with; ``area`` is the run's folder, ``identity`` its prepared identity.

    ``cuts`` are the layers at which the second and each further shard of the group begins; None: those of the plan.
    """

    plan: Plan
    identity: Digest
    area: Path
    cuts: tuple[int, ...] | None = None

    @property
    def owners(self) -> tuple[Ownership, ...]:
        """What each shard of the group owns, in order."""
        return self.plan.owners if self.cuts is None else partition(self.plan.config, self.cuts)


def worker_arguments(launch: Launch, generation: int, host: Host, allow: Sequence[Path]) -> list[str]:
    """Arguments after the interpreter; ``{pipe}`` stands for the descriptor of the pipe for events."""
    allowed = [argument for path in allow for argument in ("--allow", str(path))]
    return [
        # -P: the code comes from the staged sources, and never from the folder that the worker happens to be in.
        *("-P", "-m", "trainer", "worker", "--host", str(host.home), "--identity", str(launch.identity)),
        *("--generation", str(generation), "--area", str(host.run_folder), *allowed),
        *("--heartbeat", str(launch.plan.timeouts.heartbeat), "--pipe", "{pipe}"),
        *(() if launch.cuts is None else ("--cuts", show_cuts(launch.cuts))),
    ]


def pull_arguments(
    name: str,
    host: Host,
    shard: int,
    roots: Sequence[Digest],
    operator: str,
    allow: Sequence[Path],
    *,
    try_to_write: bool,
) -> list[str]:
    """Arguments after the interpreter for the process that pulls a shard from the store with the URL ``operator``."""
    allowed = [argument for path in allow for argument in ("--allow", str(path))]
    wanted = [argument for root in roots for argument in ("--root", str(root))]
    return [
        *("-P", "-m", "trainer", "pull", "--host", str(host.home), "--name", name, "--area", str(host.run_folder)),
        *("--operator", operator, "--shard", str(shard), *wanted, *allowed, "--pipe", "{pipe}"),
        *(["--try-to-write"] if try_to_write else []),
    ]


def worker_environment(plan: Plan, rank: int, host: Host, *, world: int, master: str) -> dict[str, str]:
    """The caller's variables, without what would change the arithmetic, and with what decides it.

    Nothing in them leads to credentials: a worker needs its host's store and no other. ``world`` is the number of the
    group's workers, ``master`` the address of the host of the first.
    """
    return {
        **agent_environment(plan, host),
        **({"GLOO_SOCKET_IFNAME": host.interface} if host.interface else {}),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": master,
        "MASTER_PORT": "0",
    }


def agent_environment(plan: Plan, host: Host) -> dict[str, str]:
    """What all workers of a host have in common, whatever their group."""
    return {**host_environment(host), **numerics.env_for(plan.numerics.kernels), "TORCH_CPP_LOG_LEVEL": "ERROR"}


def host_environment(host: Host, credentials: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's variables for a process of a host, which runs the staged sources.

    Args:
        host: where it runs.
        credentials: all by which it may find credentials; None: it finds none.
    """
    dropped = (*_DECIDED, *_CREDENTIALS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **inherited,
        **(NO_CREDENTIALS if credentials is None else credentials),
        "PYTHONPATH": str(host.home / SOURCES),
        "PYTHONDONTWRITEBYTECODE": "1",  # the staged sources stay as they were frozen
        "PYTHONUNBUFFERED": "1",
    }
