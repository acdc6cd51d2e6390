"""What SeaweedFS is told when it starts as a small S3 server of this machine, and how it says that it stands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from ckptstore.errors import BackendError, ConflictError
from trainer.lifecycle.ports import LOOPBACK, TWIN, is_free
from trainer.lifecycle.s3client import Credentials

IDENTITIES = "identities.json"
"""Name of the file with the identities and their secrets."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for https: the server's certificate and key, and the authority that clients have to trust."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True)
class Ports:
    """Where it listens, on loopback; each port has a twin for gRPC."""

    s3: int
    https: int
    master: int
    volume: int
    filer: int
    admin: int

    def all(self) -> tuple[int, ...]:
        """In the order of the fields."""
        return self.s3, self.https, self.master, self.volume, self.filer, self.admin

    def require_free(self) -> None:
        """ConflictError if somebody listens on one of them or on its twin."""
        taken = [str(port) for port in self.all() if not (is_free(port) and is_free(port + TWIN))]
        if taken:
            why = f"something listens on {', '.join(taken)}; perhaps it runs already"
            raise ConflictError("ports of the S3 server", why, "end what uses them")


def arguments(ports: Ports, data: Path, short: Path, tls: Tls | None) -> list[str]:
    """Of the program: data lie in ``data``, Unix sockets and the file of identities in ``short``."""
    found = [
        "-logtostderr=true",
        "mini",
        f"-dir={data}",
        # Else it listens on every interface and calls itself by the machine's outer address.
        f"-ip={LOOPBACK}",
        f"-ip.bind={LOOPBACK}",
        f"-s3.port={ports.s3}",
        f"-master.port={ports.master}",
        f"-volume.port={ports.volume}",
        f"-filer.port={ports.filer}",
        f"-admin.port={ports.admin}",
        f"-filer.localSocket={short / 'filer'}",
        f"-s3.localSocket={short / 's3'}",
        f"-s3.config={short / IDENTITIES}",
        # Of what it remembers of an election it has no use, being alone; while it holds one, the volume server finds
        # no master, and tries again only after five seconds. What it needs to know it hears from that server.
        "-master.resumeState=false",
        # It would report to its makers.
        "-master.telemetry=false",
        # Else a bucket comes into being by a write to it, and goes with all that is in it.
        "-s3.autoCreateBucket=false",
        "-s3.allowDeleteBucketNotEmpty=false",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    if tls is not None:
        found += [
            f"-s3.port.https={ports.https}",
            f"-s3.cert.file={tls.certificate.absolute()}",
            f"-s3.key.file={tls.key.absolute()}",
        ]
    return found


def identities(admin: Credentials, reader: Credentials) -> str:
    """The JSON of the file that tells it who may do what: ``admin`` everything, ``reader`` read and list."""
    return json.dumps(
        {
            "identities": [
                _identity("admin", admin, ["Admin", "Read", "Write", "List", "Tagging"]),
                _identity("reader", reader, ["Read", "List"]),
            ]
        }
    )


def _identity(name: str, keys: Credentials, actions: list[str]) -> dict[str, object]:
    return {
        "name": name,
        "credentials": [{"accessKey": keys.access_key, "secretKey": keys.secret_key}],
        "actions": actions,
    }


def volume_joined(ports: Ports) -> bool:
    """Whether its master knows its volume server. BackendError if the master does not answer."""
    connection = HTTPConnection(LOOPBACK, ports.master, timeout=2)
    try:
        connection.request("GET", "/dir/status")
        return f"{LOOPBACK}:{ports.volume}".encode() in connection.getresponse().read()
    except (OSError, HTTPException) as error:
        raise BackendError("S3 server", f"no word from its master: {error}") from error
    finally:
        connection.close()
