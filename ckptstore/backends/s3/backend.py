"""A bucket as a backend.

A key is the name of an object below the address's prefix. An upload is one PutObject (nothing here is longer than
16 MiB, so there are no multipart uploads that could be left behind), which S3 makes visible whole or not at all. What a
HEAD, a listing or an ETag says is a hint; only bytes that were read are proof, and that is decided above.
"""

from __future__ import annotations

import base64
import builtins
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar

from ckptstore.backends.capabilities import Capabilities
from ckptstore.backends.protocol import Buffer, ReadbackMethod, Stat, Traits, check_key, check_prefix
from ckptstore.backends.s3 import retention
from ckptstore.backends.s3.address import S3Address
from ckptstore.backends.s3.client import Clients
from ckptstore.backends.s3.deleting import delete_objects
from ckptstore.backends.s3.failures import (
    TryAgainError,
    code_of,
    is_rejected,
    is_status,
    is_without_credentials,
    translated,
)
from ckptstore.backends.s3.listing import QUARANTINE, Listings
from ckptstore.backends.s3.patience import Patience
from ckptstore.backends.s3.probe import probe
from ckptstore.backends.traffic import Traffic, TrafficMeter
from ckptstore.backends.window import window
from ckptstore.errors import CkptStoreError, NotFoundError, UsageError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

T = TypeVar("T")

_FIRST_CONTACT_SECONDS = 15.0  # a wrong endpoint is told soon; one that was there may go away for longer
_RENEWALS = (0.0, 0.3, 1.0)  # seconds until boto3 looks for credentials again
_SMALL = 1 << 16  # bytes: records have no digest for a name, so the server shall notice if one is hurt on the way
_PIECE = 1 << 20  # bytes of a body that are read at a time
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class S3Backend:
    """Keys to objects of a bucket that exists. Safe for threads and after fork."""

    def __init__(self, address: S3Address) -> None:
        """Nothing is asked of the endpoint yet."""
        self.address = address
        self.capabilities: Capabilities | None = None
        """What the endpoint honours, once somebody has found out."""
        self._meter = TrafficMeter()
        self._clients = Clients(address, self._meter)
        self._patience = Patience(address.attempt_seconds, address.operation_seconds)
        self._listings = Listings(address, self._call)
        self._met = False
        self._versions: dict[str, str] = {}

    @property
    def url(self) -> str:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        return self.address.url

    @property
    def traits(self) -> Traits:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        return Traits(threads=self.address.threads, network=True)

    @property
    def traffic(self) -> Traffic:
        """Requests and bytes so far, those of failed attempts too."""
        return self._meter.traffic

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`.

        From the start it is a plain GET of which no more than ``length`` bytes are read; elsewhere a ranged one.
        """
        window(0, offset, length)  # refuses what is negative
        name = self._name(key)

        def work(client: S3Client) -> bytes:
            ranged: Any = {"Range": f"bytes={offset}-{'' if length is None else offset + length - 1}"} if offset else {}
            if offset and length == 0:
                return b""
            try:
                answer: Any = client.get_object(Bucket=self.address.bucket, Key=name, **ranged, **self.address.owner)
            except client.exceptions.ClientError as error:
                if offset and is_status(error, 416):
                    return b""
                raise
            partial = answer["ResponseMetadata"]["HTTPStatusCode"] == 206 or "ContentRange" in answer
            start = _start(answer) if partial else 0
            if start not in (0, offset):
                answer["Body"].close()
                raise TryAgainError(f"bytes from {start} on instead of {offset}")
            data = self._body(answer, None if length is None else offset - start + length)
            if version := answer.get("VersionId"):
                self._versions[key] = version
            return data[offset - start :]

        return self._call(f"reading key {key}", work)

    def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`. The method is always SERVER."""
        return self.get(key, 0, length), ReadbackMethod.SERVER

    def stat(self, key: str) -> Stat | None:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        answer = self._head(key)
        return None if answer is None else Stat(key, answer["ContentLength"])

    def present(self, keys: Collection[str]) -> set[str]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`."""
        return self._listings.present(keys)

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        """See :meth:`~ckptstore.backends.s3.listing.Listings.sizes`."""
        return self._listings.sizes(keys)

    def versions(self, keys: Collection[str]) -> dict[str, str]:
        """See :meth:`~ckptstore.backends.s3.listing.Listings.versions`."""
        return self._listings.versions(keys)

    def versions_read(self) -> dict[str, str]:
        """The version id under which each key was last read by this process, where the bucket keeps versions."""
        return {key: version for key, version in self._versions.copy().items() if version != "null"}

    def list(self, prefix: str) -> Iterator[Stat]:
        """See :class:`~ckptstore.backends.protocol.ReadBackend`.

        Raises:
            CorruptError: the bucket holds something below the prefix that has no legal key as its name.
        """
        check_prefix(prefix)
        return iter(()) if prefix.partition("/")[0] == QUARANTINE else self._listed(prefix)

    def _listed(self, prefix: str) -> Iterator[Stat]:
        stats: Iterator[Stat] = (stat for page in self._listings.pages(prefix) for stat in page.stats)
        if self.capabilities is None or not self.capabilities.list_in_order:
            stats = iter(sorted(stats, key=lambda stat: stat.key))
        last = ""
        for stat in stats:
            if stat.key != last:  # a page may begin with what the one before it ended with
                yield stat
            last = stat.key

    # -- writing ------------------------------------------------------------------------------------------------------

    def create(self, key: str, data: Buffer) -> bool:
        """See :class:`~ckptstore.backends.protocol.WriteBackend`.

        After a lost answer it may be this call's own object that the next attempt finds: then it returns False.
        An endpoint without conditional requests is asked before, and of several creators more than one may be told
        True.
        """
        name = self._name(key)
        body = bytes(data)

        def work(client: S3Client) -> bool:
            if self.capabilities is not None and not self.capabilities.conditional_create:
                return self._created_unconditionally(client, key, body)
            try:
                self._put(client, name, body, {"IfNoneMatch": "*"})
            except client.exceptions.ClientError as error:
                if is_status(error, 412):
                    return False
                if is_status(error, 501):
                    return self._created_unconditionally(client, key, body)
                raise
            return True

        return self._call(f"writing key {key}", work, writing=True)

    def replace(self, key: str, data: Buffer) -> None:
        """See :class:`~ckptstore.backends.protocol.RepairBackend`. An absent key is created.

        What lies there is copied to ``quarantine/<key>.<nonce>``, with ``+`` for ``/``, as far as it can be read.
        """
        name = self._name(key)
        body = bytes(data)
        aside = f"{self.address.prefix}{QUARANTINE}/{key.replace('/', '+')}.{secrets.token_hex(8)}"
        self._put_aside(key, aside)
        self._call(f"replacing key {key}", lambda client: self._put(client, name, body, {}), writing=True)

    def delete(self, key: str) -> bool:
        """See :class:`~ckptstore.backends.protocol.PruneBackend`."""
        there = self.stat(key) is not None
        if there:
            name = self._name(key)
            self._call(
                f"deleting key {key}",
                lambda client: client.delete_object(Bucket=self.address.bucket, Key=name, **self.address.owner),
                writing=True,
            )
        return there

    def hold(self, key: str, until: datetime) -> None:
        """Hold ``key`` against deletion until ``until``; see :mod:`ckptstore.backends.s3.retention`."""
        name = self._name(key)
        self._call(
            f"holding key {key}",
            lambda client: retention.hold(client, self.address.bucket, name, self.address.owner, until),
            writing=True,
        )

    def held_until(self, key: str) -> datetime | None:
        """Until when ``key`` is held against deletion, in UTC; None if it is not, or is not there."""
        name = self._name(key)
        return self._call(
            f"asking how long key {key} is held",
            lambda client: retention.held_until(client, self.address.bucket, name, self.address.owner),
        )

    def delete_many(self, keys: Collection[str]) -> dict[str, CkptStoreError] | None:
        """See :func:`ckptstore.backends.s3.deleting.delete_objects`. A bucket that keeps versions keeps those."""
        return delete_objects(self._call, self.address, keys)

    def modified(self, key: str) -> float | None:
        """When ``key`` was written, in seconds by the server's clock, or None if it is absent."""
        answer = self._head(key)
        return None if answer is None else answer["LastModified"].timestamp()

    def probe(self) -> Capabilities:
        """Find out what the endpoint honours, with a few requests under a key of its own that is deleted again."""
        self.capabilities = self._call(
            "probing the endpoint",
            lambda client: probe(client, self.address, self.address.owner, self._keeping()),
            writing=True,
        )
        return self.capabilities

    def _created_unconditionally(self, client: S3Client, key: str, body: bytes) -> bool:
        if self.stat(key) is not None:
            return False
        self._put(client, self._name(key), body, {})
        return True

    def _put(self, client: S3Client, name: str, body: bytes, condition: dict[str, Any]) -> None:
        sums: dict[str, Any] = {}
        if self.address.checksums == "sha256":
            sums["ChecksumSHA256"] = base64.b64encode(hashlib.sha256(body).digest()).decode()
        elif self.address.checksums == "required" and len(body) <= _SMALL:
            sums["ContentMD5"] = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        options = {**sums, **condition, **self._keeping(), **self.address.owner}
        client.put_object(Bucket=self.address.bucket, Key=name, Body=body, **options)

    def _put_aside(self, key: str, aside: str) -> None:
        """Copy what lies under ``key``, if anything does; bytes that the server cannot read itself are lost already."""
        bucket, name = self.address.bucket, self._name(key)

        def work(client: S3Client) -> None:
            source: Any = {"Bucket": bucket, "Key": name}
            client.copy_object(Bucket=bucket, Key=aside, CopySource=source, **self._keeping(), **self.address.owner)

        try:
            self._call(f"putting key {key} aside", work, writing=True, patience=self._short())
        except NotFoundError:
            return
        except CkptStoreError as error:
            try:
                damaged = self._call(
                    f"reading key {key}", lambda client: self._rest(client, name), patience=self._short()
                )
            except NotFoundError:
                return
            except CkptStoreError:
                damaged = b""
            if not damaged and code_of_cause(error) not in _UNREADABLE:
                raise
            self._call(f"putting key {key} aside", lambda c: self._put(c, aside, damaged, {}), writing=True)

    def _rest(self, client: S3Client, name: str) -> bytes:
        """As many bytes of a damaged object as come before the server gives up."""
        answer: Any = client.get_object(Bucket=self.address.bucket, Key=name, **self.address.owner)
        pieces: builtins.list[bytes] = []
        try:
            while piece := answer["Body"].read(_PIECE):
                pieces.append(piece)
        except Exception:  # whatever ends it, this is what there is
            answer["Body"].close()
        return b"".join(pieces)

    # -- asking -------------------------------------------------------------------------------------------------------

    def _call(
        self, what: str, work: Callable[[S3Client], T], *, writing: bool = False, patience: Patience | None = None
    ) -> T:
        """One operation: tried with patience, its failures in our words."""

        def attempt() -> T:
            pauses = iter(_RENEWALS if self._met else _RENEWALS[:1])
            while True:
                client = None
                try:
                    client = self._clients.get()
                    result = work(client)
                except Exception as error:
                    pause = next(pauses, None)
                    if pause is None or not self._credentials_may_come(error):
                        raise
                    time.sleep(pause)
                    self._clients.forget(client)
                else:
                    self._met = True
                    return result

        if patience is None:
            patience = self._patience if self._met else self._short(_FIRST_CONTACT_SECONDS)
        try:
            return patience.call(what, attempt)
        except CkptStoreError:
            raise
        except Exception as error:
            raise translated(error, what, self.url, writing=writing) from error

    def _credentials_may_come(self, error: Exception) -> bool:
        """Whether boto3 may find better credentials when it looks again.

        A file of them may be written anew just now: that is seen as the old ones, as none, or as half of them.
        """
        return is_rejected(error) or (self._met and is_without_credentials(error))

    def _head(self, key: str) -> Any | None:
        """What a HEAD says of ``key``; None if it says that it is absent."""
        name = self._name(key)

        def work(client: S3Client) -> Any | None:
            try:
                return client.head_object(Bucket=self.address.bucket, Key=name, **self.address.owner)
            except client.exceptions.ClientError as error:
                if is_status(error, 404) and code_of(error) != "NoSuchBucket":
                    return None
                raise

        return self._call(f"asking for key {key}", work)

    def _short(self, seconds: float = 5.0) -> Patience:
        whole = min(seconds, self._patience.operation_seconds)
        return replace(
            self._patience, attempt_seconds=min(whole, self._patience.attempt_seconds), operation_seconds=whole
        )

    def _body(self, answer: Any, limit: int | None) -> bytes:
        """The first ``limit`` bytes of an answer's body. TryAgainError if it ends before its declared length."""
        body, declared = answer["Body"], answer.get("ContentLength")
        wanted = declared if limit is None else limit if declared is None else min(declared, limit)
        taken = BytesIO()  # hands out its bytes as they are; one read of them all would hold them twice
        try:
            while wanted is None or taken.tell() < wanted:
                piece = body.read(_PIECE if wanted is None else min(_PIECE, wanted - taken.tell()))
                if not piece:
                    break
                taken.write(piece)
        finally:
            whole = declared is not None and (limit is None or declared <= limit)
            if not whole:
                body.close()  # the rest is not read, and the connection not used again
        data = taken.getvalue()
        self._meter.received(len(data))
        if declared is not None and len(data) < (declared if limit is None else min(declared, limit)):
            body.close()
            raise TryAgainError(f"{len(data)} of {declared} bytes")
        return data

    def _name(self, key: str) -> str:
        if check_key(key).partition("/")[0] == QUARANTINE:
            raise UsageError(f"key {key!r}", f"{QUARANTINE} is where replaced objects go", "it is no key")
        return self.address.prefix + key

    def _keeping(self) -> dict[str, Any]:
        """How an object is to be kept, for requests that make one."""
        options = {
            "ServerSideEncryption": self.address.sse,
            "SSEKMSKeyId": self.address.sse_kms_key_id,
            "StorageClass": self.address.storage_class,
        }
        return {option: value for option, value in options.items() if value is not None}


def _start(answer: Any) -> int:
    """Where a ranged answer begins."""
    found = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
    if found is None:
        raise TryAgainError("a part of the object without a word which")
    return int(found[1])


_UNREADABLE = frozenset({"InternalError", "InvalidObjectState", ""})


def code_of_cause(error: CkptStoreError) -> str:
    """The S3 code behind one of our errors."""
    return code_of(error.__cause__) if isinstance(error.__cause__, Exception) else ""
