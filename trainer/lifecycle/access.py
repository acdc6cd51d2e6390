"""Which store is the operator's, and who reaches it how: the controller with all rights, hosts with few."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import ckptstore
from ckptstore.errors import UsageError
from trainer.lifecycle import s3folder
from trainer.lifecycle.ports import LOOPBACK
from trainer.lifecycle.s3server import S3Server, installed
from trainer.workers.launch import NO_CREDENTIALS

S3 = "s3"
"""The operator's store is in an S3 server that the run starts itself."""

DIRECTORY, BUCKET, SERVER = "directory", "bucket", "bucket of a server of this run"


@dataclass(frozen=True, slots=True)
class Access:
    """How the operator's store is reached.

    ``url`` is for the controller. A process that pulls for a host gets ``host_url``, the variables ``host_environment``
    by which it finds credentials (None: it needs none), and may touch the folders ``host_allow``. ``read_only`` says
    that its credentials are for reading alone. ``again`` are the shell lines after which ``ckpt`` finds the store
    without being told, once the run is over; none if it can be told its URL.
    """

    kind: str
    url: str
    host_url: str
    host_environment: Mapping[str, str] | None = field(default=None, repr=False)
    host_allow: tuple[Path, ...] = ()
    read_only: bool = False
    again: tuple[str, ...] = ()


def check(operator: str | None) -> None:
    """Find out at once whether a run could use this store; one that is given by URL or path is made if it is absent.

    Raises:
        UsageError: it is no store for a run of several processes, or boto3 is missing.
        NotFoundError: the S3 server's program is not installed, or there is no such bucket.
        CkptStoreError: it cannot be opened.
    """
    if operator == S3:
        installed()
        if find_spec("boto3") is None:
            raise UsageError("operator s3", "boto3 is not installed", "pip install 'ckptstore[s3]'")
    elif operator is not None:
        if operator.startswith("memory:"):
            raise UsageError(f"operator {operator}", "hosts are processes and cannot see it", "name a directory")
        ckptstore.open(operator, create=True)


def same_address(address: str, port: int) -> tuple[str, int]:
    """Where a host reaches a server that shares its machine and its network."""
    return address, port


@contextmanager
def reach(
    operator: str | None, out: Path, command: str, reachable: Callable[[str, int], tuple[str, int]] = same_address
) -> Iterator[Access]:
    """Access to the operator's store while the block lasts, and to its server if the run has one of its own.

    Args:
        operator: as in :class:`trainer.lifecycle.record.Settings`.
        out: folder of the run.
        command: how a shell calls the trainer, for ``again``.
        reachable: where hosts reach a server of this machine, as :meth:`trainer.hosts.backend.Backend.reachable` says.

    Raises:
        BackendError: the server does not start.
        UsageError: hosts cannot reach it.
    """
    if operator == S3:
        with _own_server(server_folder(out), command, reachable) as access:
            yield access
        return
    url = str(out / "operator") if operator is None else operator
    if url.startswith("s3://"):
        # Whatever boto3 goes by here, a host's fetching goes by: there is one identity.
        credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        yield Access(BUCKET, url, url, host_environment=credentials)
        return
    absolute = ckptstore.open(url, create=True).url
    yield Access(DIRECTORY, url, absolute, host_allow=(_path_of(absolute),))


def server_folder(out: Path) -> Path:
    """Where the server of a run has its data."""
    return out / "s3"


@contextmanager
def _own_server(folder: Path, command: str, reachable: Callable[[str, int], tuple[str, int]]) -> Iterator[Access]:
    with S3Server(folder) as server:
        server.create_bucket(s3folder.BUCKET)
        s3folder.keep(server)
        # boto3 finds keys by this process's variables, and by no others.
        with _variables(s3folder.environment(folder)):
            address, port = reachable(LOOPBACK, server.port)
            endpoint = f"http://{address}:{port}"
            yield Access(
                SERVER,
                s3folder.store_url(server),
                s3folder.store_url(server, profile=None, endpoint=endpoint),
                host_environment={
                    **NO_CREDENTIALS,
                    **server.reader.environment(endpoint),
                    **s3folder.without_proxy(os.environ, address),
                },
                read_only=True,
                again=(
                    serving(folder, command),
                    f"export AWS_SHARED_CREDENTIALS_FILE={shlex.quote(str(folder / s3folder.CREDENTIALS))}",
                    f"export CKPT_STORE={shlex.quote(s3folder.store_url(server))}",
                ),
            )


def serving(folder: Path, command: str) -> str:
    """The shell line that starts the server of ``folder`` again, beside what else the shell does."""
    return f"{command} s3server {shlex.quote(str(near(folder)))} &"


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def near(path: Path) -> Path:
    """The path relative to the current folder, where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _path_of(url: str) -> Path:
    return Path(os.fsdecode(unquote_to_bytes(urlsplit(url).path)))
