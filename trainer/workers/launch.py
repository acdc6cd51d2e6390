"""How workers are launched: the command line and the environment of each, and the receipt for its end."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptstore import Digest
from trainer.compute import numerics
from trainer.preparation.plan import Plan
from trainer.preparation.staged import SOURCES
from trainer.workers.hosts import Host

ADDRESS = "127.0.0.1"

# Beginnings of variables that the plan or this launcher decides: kernels, threads, and what an outer launcher has set.
_DECIDED = ("ATEN_", "CUBLAS_", "DNNL_", "GLOO_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "TORCH", "PYTHONPATH")


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
    """What all groups of a run are started with; ``area`` is the run's folder, ``identity`` its prepared identity."""

    plan: Plan
    identity: Digest
    area: Path


def worker_arguments(launch: Launch, generation: int, host: Host, allow: Sequence[Path]) -> list[str]:
    """Arguments after the interpreter; ``{pipe}`` stands for the descriptor of the pipe for events."""
    allowed = [argument for path in allow for argument in ("--allow", str(path))]
    return [
        # -P: the code comes from the staged sources, and never from the folder that the worker happens to be in.
        *("-P", "-m", "trainer", "worker", "--host", str(host.directory), "--identity", str(launch.identity)),
        *("--generation", str(generation), "--area", str(launch.area), *allowed),
        *("--heartbeat", str(launch.plan.timeouts.heartbeat), "--pipe", "{pipe}"),
    ]


def worker_environment(plan: Plan, rank: int, host: Host) -> dict[str, str]:
    """The caller's variables, without what would change the arithmetic, and with what decides it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_DECIDED)}
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {
        **inherited,
        **numerics.env_for(plan.numerics.kernels),
        **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),
        "PYTHONPATH": str(host.directory / SOURCES),
        "PYTHONDONTWRITEBYTECODE": "1",  # the staged sources stay as they were frozen
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(len(plan.owners)),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
