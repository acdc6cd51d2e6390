"""Servers and networks that keep or hand on other bytes than they should: actions of the fault proxy."""

from __future__ import annotations

import gzip
import re
import zlib
from base64 import b64encode
from dataclasses import dataclass, replace

from tests.support.faultactions import Action
from tests.support.http1 import Request, Response

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass
class FlipRequest(Action):
    """One bit of the request's body is turned over on its way.

    ``unnoticed``: the checksums that came with it are taken off and it is signed again, so that any server stores it.
    """

    at: int = 0
    bit: int = 0
    unnoticed: bool = False

    def request(self, request: Request) -> Request:
        flipped = replace(request, body=_flip(request.body, self.at, self.bit))
        return _without_checksums(flipped) if self.unnoticed else flipped


@dataclass
class FlipResponse(Action):
    """One bit of an object's or a listing's bytes is turned over on its way."""

    at: int = 0
    bit: int = 0

    def response(self, request: Request, response: Response) -> Response:
        if response.status >= 300:
            return response
        return replace(response, body=_flip(response.body, self.at, self.bit))


@dataclass
class OtherBody(Action):
    """A success has another body, of any length, and a Content-Length that fits it."""

    body: bytes

    def response(self, request: Request, response: Response) -> Response:
        return response.with_body(self.body) if response.status < 300 else response


@dataclass
class ForgetChecksums(Action):
    """A server without flexible checksums: those that come with a request are not looked at, and none comes back."""

    def request(self, request: Request) -> Request:
        return _without_checksums(request)

    def response(self, request: Request, response: Response) -> Response:
        for name, _ in response.headers:
            if name.lower().startswith("x-amz-checksum-"):
                response = response.with_header(name, None)
        return response


@dataclass
class StoreFraming(Action):
    """A server that does not understand ``aws-chunked`` keeps the framing and the trailing checksum in the object."""

    def request(self, request: Request) -> Request:
        if request.method != "PUT":
            return request
        crc = b64encode(zlib.crc32(request.body).to_bytes(4, "big")).decode()
        framed = b"%x\r\n%b\r\n0\r\nx-amz-checksum-crc32:%b\r\n\r\n" % (len(request.body), request.body, crc.encode())
        return _without_checksums(request.with_body(framed))


@dataclass
class ContentEncoding(Action):
    """The body of an object comes compressed (``body``), or is said to be so (``header``), or both."""

    body: bool = True
    header: bool = True

    def response(self, request: Request, response: Response) -> Response:
        if response.status >= 300:
            return response
        if self.body and response.body:
            response = response.with_body(gzip.compress(response.body))
        return response.with_header("Content-Encoding", "gzip") if self.header else response


@dataclass
class OtherRange(Action):
    """A ranged GET gets the bytes ``shift`` further on, under a Content-Range that says what was asked."""

    shift: int = 1

    def request(self, request: Request) -> Request:
        found = _RANGE.fullmatch(request.header("Range") or "")
        if found is None:
            return request
        first, last = (int(number) + self.shift for number in found.groups())
        return replace(request.with_header("Range", f"bytes={first}-{last}"), resign=True)

    def response(self, request: Request, response: Response) -> Response:
        return _shifted(response, -self.shift)


@dataclass
class WholeInsteadOfRange(Action):
    """A ranged GET gets the whole object with 200."""

    def request(self, request: Request) -> Request:
        return replace(request.with_header("Range", None), resign=True)


@dataclass
class WrongContentRange(Action):
    """A ranged GET gets the right bytes under a Content-Range that is off by ``shift``."""

    shift: int = 1

    def response(self, request: Request, response: Response) -> Response:
        return _shifted(response, self.shift)


def _shifted(response: Response, shift: int) -> Response:
    found = _CONTENT_RANGE.fullmatch(response.header("Content-Range") or "")
    if found is None:
        return response
    first, last, size = (int(number) for number in found.groups())
    return response.with_header("Content-Range", f"bytes {first + shift}-{last + shift}/{size}")


def _flip(body: bytes, at: int, bit: int) -> bytes:
    if not 0 <= at < len(body):
        return body
    return body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :]


def _without_checksums(request: Request) -> Request:
    for name, _ in request.headers:
        if re.match("x-amz-checksum-|x-amz-sdk-checksum-|content-md5$", name, re.IGNORECASE):
            request = request.with_header(name, None)
    return replace(request, resign=True)
