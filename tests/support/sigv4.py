"""AWS Signature Version 4, written anew on a request that was changed on its way."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from urllib.parse import quote

from tests.support.http1 import Request
from trainer.lifecycle.s3client import Credentials


def signed_again(request: Request, identities: Iterable[Credentials]) -> Request:
    """``request`` with the digest of its present body and a signature over its present line and headers.

    Signed are the headers that were signed before, as far as they are still there. Date, scope and identity stay; a
    request of an identity that is not among ``identities``, or of nobody, comes back as it is.
    """
    old = request.header("Authorization") or ""
    fields = dict(part.strip().split("=", 1) for part in old.partition(" ")[2].split(",") if "=" in part)
    access_key, _, scope = fields.get("Credential", "").partition("/")
    identity = next((each for each in identities if each.access_key == access_key), None)
    if identity is None:
        return request
    request = request.with_header("x-amz-content-sha256", hashlib.sha256(request.body).hexdigest())
    values = {name: request.header(name) for name in fields["SignedHeaders"].split(";")}
    signed = {name: value for name, value in values.items() if value is not None}
    names = ";".join(signed)
    canonical = "\n".join(
        [
            request.method,
            request.target.partition("?")[0],
            "&".join(sorted(f"{_encoded(name)}={_encoded(value)}" for name, value in request.query.items())),
            *(f"{name}:{' '.join(value.split())}" for name, value in signed.items()),
            "",
            names,
            signed["x-amz-content-sha256"],
        ]
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = "\n".join(["AWS4-HMAC-SHA256", signed["x-amz-date"], scope, digest])
    key = b"AWS4" + identity.secret_key.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    line = f"AWS4-HMAC-SHA256 Credential={identity.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return request.with_header("Authorization", line)


def _encoded(text: str) -> str:
    return quote(text, safe="-_.~")
