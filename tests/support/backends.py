"""The kinds of backend that the contract suite runs over, and what tests need to look behind them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ckptstore.backends.counting import CountingBackend
from ckptstore.backends.directory import QUARANTINE, DirectoryBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.protocol import PruneBackend
from ckptstore.backends.s3.address import S3Address
from ckptstore.backends.s3.backend import S3Backend
from tests.support import s3 as server
from tests.support.faulty import FaultyBackend


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend under test, and how to see the bytes that it put aside for a key, sorted."""

    backend: PruneBackend
    quarantined: Callable[[str], list[bytes]]


def directory(path: Path) -> Subject:
    backend = DirectoryBackend.create_root(path / "store")
    return Subject(backend, lambda key: quarantined_files(backend, key))


def memory(_path: Path) -> Subject:
    backend = MemoryBackend()
    return Subject(backend, lambda key: sorted(data for name, data in backend.quarantined if name == key))


def bucket(_path: Path) -> Subject:
    return _in_bucket(**server.use_environment().url_options)


def bucket_over_tls(_path: Path) -> Subject:
    return _in_bucket(**server.use_environment().https_url_options)


def _in_bucket(**options: str) -> Subject:
    backend = S3Backend(S3Address.parse(server.shared().url(**options)))
    return Subject(backend, lambda key: quarantined_objects(backend, key))


def counting(inner: Callable[[Path], Subject]) -> Callable[[Path], Subject]:
    def make(path: Path) -> Subject:
        subject = inner(path)
        return Subject(CountingBackend(subject.backend), subject.quarantined)

    return make


def faulty(inner: Callable[[Path], Subject]) -> Callable[[Path], Subject]:
    def make(path: Path) -> Subject:
        subject = inner(path)
        return Subject(FaultyBackend(subject.backend), subject.quarantined)

    return make


KINDS: dict[str, Callable[[Path], Subject]] = {
    "directory": directory,
    "memory": memory,
    "counting-directory": counting(directory),
    "counting-memory": counting(memory),
    "faulty-memory": faulty(memory),
    "s3": bucket,
    "s3-tls": bucket_over_tls,
}
"""Name of each kind, and what makes a fresh one in an empty folder."""


def quarantined_files(backend: DirectoryBackend, key: str) -> list[bytes]:
    """Bytes of the files in quarantine for ``key``, sorted."""
    files = backend.path.joinpath(QUARANTINE).glob(f"{key.replace('/', '+')}.*")
    return sorted(file.read_bytes() for file in files)


def quarantined_objects(backend: S3Backend, key: str) -> list[bytes]:
    """Bytes of the objects in quarantine for ``key``, sorted."""
    address = backend.address
    prefix = f"{address.prefix}quarantine/{key.replace('/', '+')}."
    with closing(server.client()) as client:
        listed = client.list_objects_v2(Bucket=address.bucket, Prefix=prefix).get("Contents", [])
        found = [client.get_object(Bucket=address.bucket, Key=item["Key"])["Body"].read() for item in listed]
    return sorted(found)


def run_without_privilege(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the Python ``program``; root's right to pass over file modes is dropped, so that modes mean something."""

    def drop() -> None:
        if sys.platform == "linux" and os.geteuid() == 0:
            libc = ctypes.CDLL(None)
            for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
                libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: gone after the next exec

    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=drop,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
