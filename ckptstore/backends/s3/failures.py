"""What a failed request means: another try may help, or this error of ours is the answer."""

from __future__ import annotations

import http.client

import urllib3.exceptions
from botocore import exceptions as foreign
from botocore.parsers import ResponseParserError

from ckptstore.errors import BackendError, CkptStoreError, NoSpaceError, NotFoundError, ReadOnlyError, RefusedError

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_TRANSIENT_CODES = frozenset(
    {"BadDigest", "InvalidDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
    | {"RequestTimeout", "RequestTimeoutException", "SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling"}
    | {"InternalError", "ServiceUnavailable", "ThrottlingException", "TooManyRequests", "OperationAborted"}
    | {"ConditionalRequestConflict", "BandwidthLimitExceeded", "PriorRequestNotComplete"}
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"})
_REJECTED = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", *_EXPIRED})
_ELSEWHERE = frozenset({"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "WrongRegion"})
_FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "EntityTooLargeForQuota"})
_NO_ANSWER = (
    foreign.HTTPClientError,  # no connection, a broken one, a time-out
    foreign.IncompleteReadError,
    foreign.ResponseStreamingError,
    foreign.FlexibleChecksumError,
    foreign.ChecksumError,
    foreign.ConnectionError,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
)
_NO_CREDENTIALS = (
    foreign.NoCredentialsError,
    foreign.PartialCredentialsError,
    foreign.ProfileNotFound,
    foreign.ConfigParseError,
)


class TryAgainError(Exception):
    """The answer is of no use, and another one may be."""


def is_status(error: Exception, *statuses: int) -> bool:
    """Whether this is an answer with one of these HTTP statuses."""
    return isinstance(error, foreign.ClientError) and _status(error) in statuses


def code_of(error: Exception) -> str:
    """The S3 code of an answer, empty if there is none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, foreign.ClientError) else ""


def is_rejected(error: Exception) -> bool:
    """Whether the credentials are no good, or no longer, and others may be."""
    return code_of(error) in _REJECTED


def is_without_credentials(error: Exception) -> bool:
    """Whether boto3 found none, or its files could not be read as a whole."""
    return isinstance(error, _NO_CREDENTIALS)


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, foreign.ClientError):
        status = _status(error)
        return code_of(error) in _TRANSIENT_CODES or status in _TRANSIENT_STATUS or 200 <= status < 300
    if isinstance(error, foreign.SSLError):
        return "CERTIFICATE_VERIFY_FAILED" not in str(error)
    return isinstance(error, (TryAgainError, *_NO_ANSWER))


def translated(error: Exception, what: str, where: str, *, writing: bool) -> CkptStoreError:
    """Our error for a failure that no further try will mend, or for which there is no more time.

    Args:
        error: what boto3 raised.
        what: what was done, naming the key.
        where: the store's URL.
        writing: whether a right to write was needed.
    """
    if isinstance(error, foreign.ClientError):
        return _of_answer(error, what, where, writing=writing)
    if is_without_credentials(error) and not isinstance(error, foreign.ConfigParseError):
        return BackendError(what, f"boto3 finds no credentials for {where}", _CREDENTIALS_HINT)
    if isinstance(error, foreign.CredentialRetrievalError | foreign.TokenRetrievalError | foreign.SSOError):
        return BackendError(what, f"boto3 could not fetch credentials for {where}", _CREDENTIALS_HINT)
    if isinstance(error, foreign.SSLError):
        hint = "give the authority's certificate with ca_bundle= or AWS_CA_BUNDLE; verification is never turned off"
        return BackendError(what, f"TLS with {where} failed: {_plain(error)}", hint)
    if isinstance(error, RecursionError):  # botocore follows each redirection, and asks where to in between
        return BackendError(what, f"{where} sends every request elsewhere", _ELSEWHERE_HINT)
    if isinstance(error, foreign.NoRegionError):
        return BackendError(what, "no region is set", "set AWS_DEFAULT_REGION, or add region= to the URL")
    return BackendError(what, f"{type(error).__name__} from {where}: {_plain(error)}", _LATER)


def _of_answer(error: foreign.ClientError, what: str, where: str, *, writing: bool) -> CkptStoreError:
    status, code = _status(error), code_of(error)
    message = str(error.response.get("Error", {}).get("Message", ""))
    why = f"{where} answered {status} {code}" + (f": {_shown(message)}" if message and message != code else "")
    if code == "NoSuchBucket":
        return NotFoundError(what, why, "make the bucket, or check its name and the endpoint")
    if code in _REJECTED:
        return BackendError(what, why, _CREDENTIALS_HINT)
    if code in _ELSEWHERE or status in (301, 307, 308):
        return BackendError(what, why, _ELSEWHERE_HINT)
    if code == "RequestTimeTooSkewed":
        return BackendError(what, why, "set this machine's clock")
    if code == "InvalidObjectState":
        hint = "restore the object from its archive first; what cannot be read back cannot be verified"
        return RefusedError(what, f"{why}; its storage class is an archive", hint)
    if code in _FULL or status == 507:
        return NoSpaceError(what, why, "make room, then run it again: what was stored is used")
    if status in (401, 403):
        if writing:
            return ReadOnlyError(what, why, "these credentials may not write here; verify and pull need no right to")
        return BackendError(what, why, "these credentials need s3:GetObject and s3:ListBucket here")
    if status == 404:
        return NotFoundError(what, why, "ckpt repair gets it from another copy")
    return BackendError(what, why, _LATER if is_transient(error) else "see what the endpoint's documentation says")


def _status(error: foreign.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _plain(error: Exception) -> str:
    return _shown(" ".join(str(error).split()))


def _shown(text: str) -> str:
    """A server's text, without control characters and not longer than a line."""
    return "".join(c if c.isprintable() else "?" for c in text)[:200]


_LATER = "run it again later: what was stored is used"
_ELSEWHERE_HINT = "the bucket is elsewhere: add its region= to the URL, or correct endpoint_url="
_CREDENTIALS_HINT = "renew the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID, a role); what was stored is used"
