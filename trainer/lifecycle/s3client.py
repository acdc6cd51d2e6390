"""Keys to an S3 server on this machine, and a plain client that holds them."""

from __future__ import annotations

import secrets
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptstore.errors import BackendError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

REGION = "us-east-1"

READY_BUCKET = "ready"
"""Bucket in which a starting server has to prove that it takes a write and gives it back."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key pair of one identity; the secret half is in no repr."""

    access_key: str
    secret_key: str = field(repr=False)

    @classmethod
    def random(cls) -> Credentials:
        return cls(secrets.token_hex(10).upper(), secrets.token_urlsafe(30))

    def environment(self, endpoint: str) -> dict[str, str]:
        """The ``AWS_*`` variables by which a client finds the server at ``endpoint`` and shows these keys."""
        return {
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            # Nothing else is to be asked for credentials: that is an address outside this machine.
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def plain_client(endpoint: str, identity: Credentials, **config: Any) -> S3Client:
    """A boto3 client with path-style addresses; ``config`` goes into its ``botocore.config.Config``."""
    # Costs half a second to import, and not everybody who imports this module starts a server.
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=identity.access_key,
        aws_secret_access_key=identity.secret_key,
        region_name=REGION,
        # No proxy of the environment: the server is on this machine.
        config=Config(**{"signature_version": "s3v4", "s3": {"addressing_style": "path"}, "proxies": {}, **config}),
    )


def create_bucket(client: S3Client, name: str) -> None:
    """Make the bucket ``name`` unless it is there."""
    with suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        client.create_bucket(Bucket=name)


def write_comes_back(endpoint: str, identity: Credentials) -> bool:
    """Whether an object that was just put into :data:`READY_BUCKET` is there with the same bytes.

    Raises:
        BackendError: the server refuses, fails or does not answer.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    sent = secrets.token_bytes(16)
    once = plain_client(endpoint, identity, retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=20)
    with closing(once) as client:
        try:
            create_bucket(client, READY_BUCKET)
            client.put_object(Bucket=READY_BUCKET, Key="write", Body=sent)
            return client.get_object(Bucket=READY_BUCKET, Key="write")["Body"].read() == sent
        except (BotoCoreError, ClientError) as error:
            raise BackendError("S3 server", f"no signed write yet: {error}") from error
