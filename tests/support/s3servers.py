"""Two S3 servers of other makes, for what must hold on a server that keeps fewer promises than SeaweedFS.

Both take If-None-Match without a word and overwrite, and neither compares the checksums that come with an upload.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ckptstore.errors import BackendError, NotFoundError
from trainer.lifecycle.child import Child, program
from trainer.lifecycle.ports import LOOPBACK, free_ports
from trainer.lifecycle.s3client import Credentials, create_bucket, plain_client, write_comes_back

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_HINT = "pip install --require-hashes -r requirements-deep.txt"
_READY_SECONDS = 30.0


class OtherServer(ABC):
    """A server on loopback in a temporary folder; the face is that of :class:`~trainer.lifecycle.s3server.S3Server`.

    Raises:
        NotFoundError: its program is neither beside this Python nor on PATH.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._program = program(self.name, "an S3 server", _HINT)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        self.admin = Credentials.random()
        self.port, self._side_port = free_ports(2)
        self._child: Child | None = None

    @abstractmethod
    def _prepare(self) -> None:
        """Make what the data lie in, once."""

    @abstractmethod
    def _command(self) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment of the server."""

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    def environment(self) -> dict[str, str]:
        """The ``AWS_*`` variables by which a client finds this server and may do everything there."""
        return self.admin.environment(self.endpoint)

    def client(self, **config: Any) -> S3Client:
        """A plain boto3 client; ``config`` goes into its ``botocore.config.Config``."""
        return plain_client(self.endpoint, self.admin, **config)

    def create_bucket(self, name: str) -> None:
        with closing(self.client()) as client:
            create_bucket(client, name)

    def start(self) -> Self:
        """Return once a signed write was accepted and read back; with the same data and keys after ``kill``."""
        if self._child is None:
            self._prepare()
        if self.running:
            return self
        arguments, environment = self._command()
        environment |= {"PATH": "/usr/bin:/bin", "HOME": str(self.folder)}
        child = self._child = Child(
            [str(self._program), *arguments], environment, self.folder, self.folder / "server.log"
        )
        end = time.monotonic() + _READY_SECONDS
        while True:
            try:
                if write_comes_back(self.endpoint, self.admin):
                    return self
            except BackendError as error:
                if not child.running or time.monotonic() > end:
                    child.kill()
                    raise BackendError(self.name, f"does not start: {error.why}\n{child.log_tail()}") from error
            time.sleep(0.05)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop(grace=8.0)

    def remove(self) -> None:
        """Kill it and remove its folder with all data."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Rclone(OtherServer):
    """``rclone serve s3``: a folder of plain files; experimental by its own words."""

    name = "rclone"

    def _prepare(self) -> None:
        (self.folder / "data").mkdir()
        (self.folder / "rclone.conf").touch()

    def _command(self) -> tuple[list[str], dict[str, str]]:
        keys = f"{self.admin.access_key},{self.admin.secret_key}"
        config = str(self.folder / "rclone.conf")
        where = f"local:{self.folder / 'data'}"
        return ["--config", config, "serve", "s3", "--addr", f"{LOOPBACK}:{self.port}", where], {
            "RCLONE_AUTH_KEY": f'"{keys}"',  # a list in CSV, of one pair
            "RCLONE_CONFIG_LOCAL_TYPE": "local",
        }


class JuiceFs(OtherServer):
    """The JuiceFS gateway: MinIO's old gateway code over files and SQLite."""

    name = "juicefs"

    def _prepare(self) -> None:
        made = subprocess.run(
            [
                str(self._program),
                *("format", "--no-update", "--storage", "file", "--bucket", f"{self.folder / 'objects'}/"),
                *("--trash-days", "0", self._meta, "store"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if made.returncode:
            raise BackendError("juicefs format", made.stderr[-1000:])

    @property
    def _meta(self) -> str:
        return f"sqlite3://{self.folder / 'meta.db'}"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        arguments = ["gateway", self._meta, f"{LOOPBACK}:{self.port}", "--multi-buckets", "--keep-etag"]
        arguments += ["--object-meta", "--object-tag", "--no-banner", "--no-usage-report", "--backup-meta", "0"]
        arguments += ["--cache-dir", str(self.folder / "cache"), "--cache-size", "0"]
        arguments += ["--metrics", f"{LOOPBACK}:{self._side_port}", "--log", str(self.folder / "gateway.log")]
        return arguments, {
            "MINIO_ROOT_USER": self.admin.access_key,
            "MINIO_ROOT_PASSWORD": self.admin.secret_key,
        }


OTHERS: dict[str, type[OtherServer]] = {"rclone": Rclone, "juicefs": JuiceFs}
"""Name of each of these servers, and what makes one."""


def why_missing(name: str) -> str | None:
    """Why the server ``name`` of :data:`OTHERS` cannot be started here; None if it can."""
    try:
        program(name, "an S3 server", _HINT)
    except NotFoundError as error:
        return str(error)
    return None
