"""Deleting many objects of a bucket, a thousand a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from botocore.exceptions import ClientError

from ckptstore.backends.protocol import check_key
from ckptstore.backends.s3.address import S3Address
from ckptstore.backends.s3.failures import TryAgainError, is_status, is_transient
from ckptstore.errors import BackendError, CkptStoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_boto3_s3.client import S3Client

T = TypeVar("T")

_MOST = 1000  # objects that one request may name
_GONE = frozenset({"NoSuchKey", "NoSuchVersion"})
_PASSING = frozenset({"InternalError", "SlowDown", "ServiceUnavailable", "OperationAborted"})


class Call(Protocol):
    """How an operation is tried: see ``S3Backend._call``."""

    def __call__(self, what: str, work: Callable[[S3Client], T], *, writing: bool = False) -> T:
        """What ``work`` returns."""
        ...


def delete_objects(call: Call, address: S3Address, keys: Collection[str]) -> dict[str, CkptStoreError] | None:
    """Delete keys; one that is absent counts as deleted.

    Returns why each that is left is left; or None if the endpoint knows no such request, and they have to go one by
    one.
    """
    by_name = {f"{address.prefix}{check_key(key)}": key for key in keys}
    names = list(by_name)
    failed: dict[str, CkptStoreError] = {}
    for start in range(0, len(names), _MOST):
        some = names[start : start + _MOST]
        try:
            left = call(f"deleting {len(some):,} keys", partial(_deleted, address, some), writing=True)
        except CkptStoreError as error:  # which of these are gone is not known
            return failed | {by_name[name]: error for name in names[start:]}
        if left is None:
            return None
        for name, why in left.items():
            key = by_name.get(name)
            if key is not None:
                failed[key] = BackendError(f"deleting key {key}", why, "see what the bucket's policy and locks say")
    return failed


def _deleted(address: S3Address, names: Sequence[str], client: S3Client) -> dict[str, str] | None:
    """Why each name that is left is left; None if there is no such request."""
    wanted: Any = {"Objects": [{"Key": name} for name in names], "Quiet": True}
    try:
        answer: Any = client.delete_objects(Bucket=address.bucket, Delete=wanted, **address.owner)
    except ClientError as error:
        if not is_transient(error) and is_status(error, 400, 405, 411, 501):
            return None
        raise
    left = {str(item.get("Key", "")): item for item in answer.get("Errors", []) if item.get("Code") not in _GONE}
    busy = [str(item.get("Code")) for item in left.values() if item.get("Code") in _PASSING]
    if busy:
        raise TryAgainError(f"{busy[0]} for {len(busy):,} of {len(names):,} objects")
    return {name: f"{item.get('Code', 'error')} {item.get('Message', '')}".strip() for name, item in left.items()}
