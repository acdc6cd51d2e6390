"""What an endpoint honours of what S3 promises, found out by trying."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError, FlexibleChecksumError

from ckptstore.backends.capabilities import CHECKED, IGNORED, KEPT, Capabilities
from ckptstore.backends.s3.address import S3Address
from ckptstore.backends.s3.failures import TryAgainError, is_status, is_transient

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_DIGITS = b"0123456789"


def probe(client: S3Client, address: S3Address, owner: dict[str, Any], keeping: dict[str, Any]) -> Capabilities:
    """Try each with objects below ``leases/``, which are deleted again (what a crash leaves there is broken by age).

    Args:
        client: to ask with.
        address: where.
        owner: goes with each request.
        keeping: goes with each that makes an object, which a bucket's policy may demand.

    Raises:
        botocore's errors: the endpoint does not answer, or does not let us write.
        TryAgainError: what it gave back is nothing that was ever stored there.
    """
    making = {**owner, **keeping}
    bucket, stem = address.bucket, f"{address.prefix}leases/{secrets.token_hex(16)}"
    # A folder sorts behind its namesake with a dash; servers that walk folders list it before.
    names = (stem, f"{stem}-", f"{stem}/x")
    first, second = b"probe 1", b"probe 2"
    try:
        client.put_object(Bucket=bucket, Key=stem, Body=first, **making)
        conditional = _refused(
            lambda: client.put_object(Bucket=bucket, Key=stem, Body=second, IfNoneMatch="*", **making), 412
        )
        stored = _one_of(client.get_object(Bucket=bucket, Key=stem, **owner)["Body"].read(), first, second)
        return Capabilities(
            conditional_create=conditional and stored == first,
            checksums=_checksums(client, bucket, names[1], owner, making),
            ranged_get=_ranged(client, bucket, names[1], owner),
            versioning=_answer(lambda: client.get_bucket_versioning(Bucket=bucket, **owner)).get("Status") == "Enabled",
            object_lock=_answer(lambda: client.get_object_lock_configuration(Bucket=bucket, **owner))
            .get("ObjectLockConfiguration", {})
            .get("ObjectLockEnabled")
            == "Enabled",
            list_in_order=_in_order(client, bucket, stem, names[2], owner, making),
        )
    finally:
        for name in names:
            client.delete_object(Bucket=bucket, Key=name, **owner)


def _checksums(client: S3Client, bucket: str, name: str, owner: dict[str, Any], making: dict[str, Any]) -> str:
    body = _DIGITS
    good, wrong = (base64.b64encode(hashlib.sha256(data).digest()).decode() for data in (body, b"other"))
    checked = _refused(
        lambda: client.put_object(Bucket=bucket, Key=name, Body=body, ChecksumSHA256=wrong, **making), 400
    )
    client.put_object(Bucket=bucket, Key=name, Body=body, ChecksumSHA256=good, **making)
    if checked:
        return CHECKED
    answer = client.head_object(Bucket=bucket, Key=name, ChecksumMode="ENABLED", **owner)
    return KEPT if answer.get("ChecksumSHA256") == good else IGNORED


def _ranged(client: S3Client, bucket: str, name: str, owner: dict[str, Any]) -> bool:
    answer: Any = _answer(lambda: client.get_object(Bucket=bucket, Key=name, Range="bytes=2-4", **owner))
    try:
        return "Body" in answer and _one_of(answer["Body"].read(), _DIGITS[2:5], _DIGITS) == _DIGITS[2:5]
    except FlexibleChecksumError:
        return False  # it sends the checksum of the whole with a part


def _in_order(
    client: S3Client, bucket: str, stem: str, name: str, owner: dict[str, Any], making: dict[str, Any]
) -> bool:
    try:
        client.put_object(Bucket=bucket, Key=name, Body=b"", **making)
    except ClientError as error:
        if is_transient(error) and not is_status(error, 500):
            raise
        return False  # one that has no place for a folder beside its namesake is no plain map of keys
    listed = client.list_objects_v2(Bucket=bucket, Prefix=stem, **owner).get("Contents", [])
    keys = [item["Key"] for item in listed]
    return len(keys) == 3 and keys == sorted(keys)


def _one_of(data: bytes, *possible: bytes) -> bytes:
    """``data``, if it is one of those; else something happened to it, which says nothing of the endpoint."""
    if data not in possible:
        raise TryAgainError(f"{len(data)} bytes that were never stored")
    return data


def _refused(call: Callable[[], object], status: int) -> bool:
    """Whether the call is answered with this status. Other refusals mean that the endpoint does not know the option."""
    try:
        call()
    except ClientError as error:
        if is_transient(error) and not is_status(error, status):
            raise
        return is_status(error, status)
    return False


def _answer(call: Callable[[], Any]) -> Any:
    """What the call returns; nothing if the endpoint does not know it or does not say."""
    try:
        return call()
    except ClientError as error:
        if is_transient(error):
            raise
        return {}
