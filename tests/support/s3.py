"""One real S3 server for all tests of this process: started when first asked for, killed when the process ends."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
import trustme

from trainer.lifecycle.ports import LOOPBACK
from trainer.lifecycle.s3client import plain_client
from trainer.lifecycle.s3server import S3Server
from trainer.lifecycle.seaweed import Tls

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "ckptstore"
"""Bucket of the shared server in which every test gets a prefix of its own."""

# What a developer's machine may say about S3 and must not reach a test.
_FOREIGN = (
    *("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"),
    *("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
)

_lock = threading.Lock()
_shared: SharedServer | None = None


@dataclass(frozen=True, slots=True)
class SharedServer:
    """The server of this process, over http and https, with the bucket :data:`BUCKET`."""

    server: S3Server
    authority: Path
    """PEM file of the authority that signed the certificate of the https endpoint."""

    @property
    def url_options(self) -> dict[str, str]:
        """What a store's URL needs to find the server without ``AWS_ENDPOINT_URL_S3``; keys are never in a URL."""
        return {"endpoint_url": self.server.endpoint, "addressing": "path"}

    @property
    def https_url_options(self) -> dict[str, str]:
        """The same over TLS."""
        return {
            "endpoint_url": self.server.https_endpoint,
            "addressing": "path",
            "ca_bundle": str(self.authority),
        }

    def url(self, prefix: str | None = None, *, bucket: str = BUCKET, **options: str) -> str:
        """``s3://bucket/prefix?options``; without a prefix, one that nobody else has."""
        query = f"?{urlencode(options)}" if options else ""
        return f"s3://{bucket}/{fresh_prefix() if prefix is None else prefix}{query}"


def shared() -> SharedServer:
    """The server, started if this is the first call. Safe for threads."""
    global _shared
    with _lock:
        if _shared is None:
            folder = Path(tempfile.mkdtemp(prefix="shared-s3-"))
            atexit.register(_remove, os.getpid(), folder)
            tls = certificates(folder)
            server = S3Server(folder / "server", tls=tls).start()
            server.create_bucket(BUCKET)
            _shared = SharedServer(server, tls.authority)
        elif not _shared.server.running:  # a test killed it and went away
            _shared.server.start()
        return _shared


def certificates(folder: Path) -> Tls:
    """Write a new authority, and a certificate for this machine's loopback with its key, into ``folder``."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", LOOPBACK)
    tls = Tls(certificate=folder / "certificate.pem", key=folder / "key.pem", authority=folder / "authority.pem")
    issued.cert_chain_pems[0].write_to_path(str(tls.certificate))
    issued.private_key_pem.write_to_path(str(tls.key))
    authority.cert_pem.write_to_path(str(tls.authority))
    return tls


def environment() -> dict[str, str | None]:
    """Variables under which any client in this process or below it uses the shared server; None: must not be set."""
    folder = shared().authority.parent
    found: dict[str, str | None] = dict.fromkeys(_FOREIGN)
    found |= shared().server.environment()
    found |= {
        # Files that are not there: the machine's own profiles stay out.
        "AWS_CONFIG_FILE": str(folder / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "no-credentials"),
        "NO_PROXY": "*",
    }
    return found


def lead(environ: pytest.MonkeyPatch) -> None:
    """Let ``environ`` put :func:`environment` into ``os.environ``, until it takes it back."""
    for name, value in environment().items():
        if value is None:
            environ.delenv(name, raising=False)
        else:
            environ.setenv(name, value)


def use_environment() -> SharedServer:
    """The same for the rest of this process; returns the server."""
    lead(pytest.MonkeyPatch())
    return shared()


def fresh_prefix() -> str:
    """A key prefix that nothing else uses, without a slash at its end."""
    return f"test-{secrets.token_hex(6)}"


def new_bucket() -> str:
    """Name of a new, empty bucket of the shared server."""
    name = f"test-{secrets.token_hex(6)}"
    shared().server.create_bucket(name)
    return name


def client(endpoint: str | None = None, **config: Any) -> S3Client:
    """A plain boto3 client with all rights, of the shared server or of a proxy before it at ``endpoint``.

    ``config`` goes into its ``botocore.config.Config``. Close it, or the warning about its sockets fails the test.
    """
    server = shared().server
    return plain_client(server.endpoint if endpoint is None else endpoint, server.admin, **config)


def _remove(owner: int, folder: Path) -> None:
    if os.getpid() != owner:  # a fork that ends is not the end of the tests
        return
    if _shared is not None:
        _shared.server.kill()
    shutil.rmtree(folder, ignore_errors=True)
