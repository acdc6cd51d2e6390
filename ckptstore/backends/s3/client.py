"""A boto3 client for an address."""

from __future__ import annotations

import os
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.loaders import Loader, create_loader

from ckptstore.backends.s3.address import S3Address
from ckptstore.backends.traffic import TrafficMeter
from ckptstore.errors import UsageError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_CONNECT_SECONDS, _READ_SECONDS = 10.0, 60.0


class Clients:
    """The client of an address, made when it is first needed, anew after a fork, and on demand.

    A client may be used from several threads. Its connections may not be used by a child process, and its credentials
    are those that boto3 found when it was made (unless they renew themselves).
    """

    def __init__(self, address: S3Address, meter: TrafficMeter) -> None:
        self._address = address
        self._meter = meter
        self._lock = Lock()
        self._client: S3Client | None = None
        self._process = 0

    def get(self) -> S3Client:
        """The client.

        Raises:
            UsageError: a file that the address names is not there.
            botocore.exceptions.BotoCoreError, ValueError: boto3 makes none of this address and configuration.
        """
        if self._process != os.getpid():
            self._lock, self._client, self._process = Lock(), None, os.getpid()
        with self._lock:
            if self._client is None:
                self._client = self._made()
            return self._client

    def forget(self, rejected: S3Client | None) -> None:
        """Let the next client be one for which boto3 looks for credentials again, as those of this are no good."""
        with self._lock:
            if self._client is rejected:  # else another thread was first
                self._client = None

    def _made(self) -> S3Client:
        address = self._address
        if address.ca_bundle is not None and not os.path.exists(address.ca_bundle):
            raise UsageError(f"store s3://{address.bucket}", f"ca_bundle={address.ca_bundle!r:.200} is not there")
        sums: Any = "when_supported" if address.checksums == "supported" else "when_required"
        options: Any = {"addressing_style": address.addressing}
        config = Config(
            signature_version="s3v4",
            s3=options,
            retries={"total_max_attempts": 1, "mode": "standard"},  # patience is above, where bodies are read too
            connect_timeout=min(_CONNECT_SECONDS, address.attempt_seconds),
            read_timeout=min(_READ_SECONDS, address.attempt_seconds),
            max_pool_connections=address.threads,
            tcp_keepalive=True,
            request_checksum_calculation=sums,
            response_checksum_validation=sums,
            user_agent_extra="ckptstore",
        )
        core = botocore.session.get_session()
        core.register_component("data_loader", _models(core.get_config_variable("data_path")))
        session = boto3.Session(profile_name=address.profile, region_name=address.region, botocore_session=core)
        client = session.client("s3", endpoint_url=address.endpoint_url, verify=address.ca_bundle, config=config)
        client.meta.events.register("before-send.s3", self._count)
        return client

    def _count(self, request: Any, event_name: str, **_: Any) -> None:
        size = request.headers.get("Content-Length") or request.headers.get("X-Amz-Decoded-Content-Length") or 0
        self._meter.request(event_name.rpartition(".")[2], int(size))


@cache
def _models(path: str | None) -> Loader:
    """botocore's descriptions of services: a client takes a fifth of the time if they are not read and parsed anew."""
    return create_loader(path)
