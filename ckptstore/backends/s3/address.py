"""Where a store in a bucket is, and how it is to be reached: an S3 URL with options, and never a credential."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from ckptstore.errors import RefusedError, UsageError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_MAX_PREFIX = 400  # bytes: S3 keys have 1,024, ours 512 and a quarantined one some more
_CHOICES = {
    "addressing": ("auto", "path", "virtual"),
    "checksums": ("required", "supported", "sha256"),
    "sse": ("AES256", "aws:kms", "aws:kms:dsse"),
}
_ARCHIVED = ("GLACIER", "DEEP_ARCHIVE")
_EXAMPLE = "s3://bucket/prefix?option=value&…"


@dataclass(frozen=True, slots=True)
class S3Address:
    """A bucket, a prefix (empty, or ending in ``/``), and options.

    What is not given is as boto3 takes it: environment, shared configuration, instance role.

    Args:
        endpoint_url, region, profile, ca_bundle: as boto3 knows them.
        addressing: ``path`` for servers without a host name for each bucket.
        checksums: ``required``: no checksum header unless an operation demands one, which every server understands;
            ``supported``: boto3's own default, a CRC with each request; ``sha256``: a SHA-256 with each object, which
            a server that knows it checks on arrival.
        sse, sse_kms_key_id, bucket_owner, storage_class: go with each request that knows them.
        threads: requests at a time, and connections kept.
        attempt_seconds: time for one attempt at one request, whole body included.
        operation_seconds: time for all attempts at it.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    ca_bundle: str | None = None
    addressing: str = "auto"
    checksums: str = "required"
    sse: str | None = None
    sse_kms_key_id: str | None = None
    bucket_owner: str | None = None
    storage_class: str | None = None
    threads: int = 8
    attempt_seconds: float = 120.0
    operation_seconds: float = 600.0

    def __post_init__(self) -> None:
        what = f"store s3://{self.bucket:.80}"
        if not _BUCKET.fullmatch(self.bucket):
            raise UsageError(what, "not the name of a bucket", _EXAMPLE)
        bare = self.prefix.removesuffix("/")
        if self.prefix and (not _PREFIX.fullmatch(bare) or len(bare) > _MAX_PREFIX or not self.prefix.endswith("/")):
            why = f"prefix {self.prefix!r:.80} is not made of /-separated [A-Za-z0-9._-] names"
            raise UsageError(what, why, f"at most {_MAX_PREFIX} characters, and no name begins with a dot")
        if self.endpoint_url is not None:
            _check_endpoint(what, self.endpoint_url)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in (None, *choices):
                why = f"{name}={getattr(self, name)!r:.40} is not known"
                raise UsageError(what, why, f"one of {', '.join(choices)}")
        if self.storage_class in _ARCHIVED:
            why = f"objects of storage class {self.storage_class} cannot be read back without being restored first"
            raise RefusedError(
                what, why, "store them in a class that can be read; archive a verified copy by lifecycle"
            )
        if not 1 <= self.threads <= 256:
            raise UsageError(what, f"threads={self.threads} is not between 1 and 256")
        if not 0 < self.attempt_seconds <= self.operation_seconds <= 86_400:
            raise UsageError(what, "attempt_seconds <= operation_seconds <= 86400, and above 0, is not so")

    @staticmethod
    def parse(url: str) -> S3Address:
        """The address of ``s3://bucket/prefix?option=value&…``.

        Raises:
            UsageError: it is none; if it seems to hold credentials, it is not repeated in the message.
            RefusedError: a storage class that cannot be read back.
        """
        if not url.startswith("s3://") or not url.isprintable():  # a parser of URLs leaves out line ends unasked
            raise UsageError("store s3://…", "not a URL, or with characters that cannot be printed", _EXAMPLE)
        try:
            parts = urlsplit(url)
            options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        except ValueError:
            raise UsageError("store s3://…", "not a URL", _EXAMPLE) from None
        if "@" in parts.netloc or ":" in parts.netloc:
            why = "a user, a password or a port stands before the bucket's name"
            hint = (
                "credentials come from boto3's own chain (AWS_PROFILE, AWS_ACCESS_KEY_ID, a role), never from the URL"
            )
            raise UsageError("store s3://…", why, hint)
        what = f"store s3://{parts.netloc:.80}"
        if parts.fragment or "#" in url:
            raise UsageError(what, "a # means nothing in it", _EXAMPLE)
        known = {field.name: field for field in fields(S3Address) if field.name not in ("bucket", "prefix")}
        given: dict[str, Any] = {}
        for name, value in options:
            if name not in known:
                raise UsageError(what, f"option {name!r:.40} is not known", f"options are {', '.join(known)}")
            if name in given or not value or not value.isprintable():
                raise UsageError(what, f"option {name} is empty, given twice, or of characters that cannot be printed")
            given[name] = _number(what, name, value) if name in _NUMBERS else value
        prefix = parts.path.strip("/") if parts.path.strip("/") == parts.path[1:].removesuffix("/") else parts.path
        return S3Address(parts.netloc, f"{prefix}/" if prefix else "", **given)

    @property
    def owner(self) -> dict[str, Any]:
        """What each request says of the bucket's owner."""
        return {} if self.bucket_owner is None else {"ExpectedBucketOwner": self.bucket_owner}

    @property
    def url(self) -> str:
        """The URL with the options that differ from the defaults."""
        given = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("bucket", "prefix") and getattr(self, field.name) != field.default
        }
        query = urlencode({name: _text(value) for name, value in given.items()}, quote_via=quote, safe="/:")
        path = f"/{self.prefix.removesuffix('/')}" if self.prefix else ""
        return f"s3://{self.bucket}{path}{'?' if query else ''}{query}"


_NUMBERS = {"threads": int, "attempt_seconds": float, "operation_seconds": float}


def _number(what: str, name: str, text: str) -> int | float:
    try:
        number: int | float = _NUMBERS[name](text)
    except ValueError:
        raise UsageError(what, f"{name}={text!r:.40} is not a number") from None
    return number


def _text(value: object) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _check_endpoint(what: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise UsageError(what, "endpoint_url is not a URL", "http://host:port or https://host") from None
    if "@" in parts.netloc:
        raise UsageError(what, "endpoint_url holds a user or a password", "credentials come from boto3's own chain")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(what, "endpoint_url is not of the form http://host:port or https://host", _EXAMPLE)
