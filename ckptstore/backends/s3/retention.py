"""Object lock: a version of an object that is held cannot be deleted until a time.

Retention is of mode GOVERNANCE: nobody deletes by mistake what is held, and a wrong date can be mended by who has the
right to (``s3:BypassGovernanceRetention``). A DELETE that names no version still succeeds and hides the object behind a
marker; so who deletes has to ask first.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ckptstore.backends.s3.failures import code_of, is_status

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MODE = "GOVERNANCE"


def held_until(client: S3Client, bucket: str, name: str, owner: dict[str, Any]) -> datetime | None:
    """Until when the present version of an object is held, in UTC; None if it is not, or is not there.

    A legal hold has no end; it is told as one that lasts to the end of time.
    """
    try:
        answer: Any = client.head_object(Bucket=bucket, Key=name, **owner)
    except client.exceptions.ClientError as error:
        if is_status(error, 404) and code_of(error) != "NoSuchBucket":
            return None
        raise
    if answer.get("ObjectLockLegalHoldStatus") == "ON":
        return datetime.max.replace(tzinfo=UTC)
    until = answer.get("ObjectLockRetainUntilDate")
    return until.astimezone(UTC) if isinstance(until, datetime) else None


def hold(client: S3Client, bucket: str, name: str, owner: dict[str, Any], until: datetime) -> None:
    """Hold the present version of an object until ``until``; one that is held as long, or longer, stays as it is."""
    held = held_until(client, bucket, name, owner)
    if held is not None and held >= until:
        return
    retention: Any = {"Mode": MODE, "RetainUntilDate": until}
    client.put_object_retention(Bucket=bucket, Key=name, Retention=retention, **owner)
