"""Servers that answer otherwise than they should, or say no: actions of the fault proxy."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote

from tests.support.faultactions import Action, Delivery
from tests.support.http1 import Request, Response

_CONTENTS = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)


def error_answer(status: int, code: str, message: str = "injected", *, head: bool = False) -> Response:
    """S3's error document under any status; without a body for HEAD."""
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    headers = (("Content-Type", "application/xml"),)
    return Response(headers, b"", status, code or "Error").with_body(b"" if head or not code else text.encode())


@dataclass
class Status(Action):
    """The server does nothing and answers ``status`` with S3's error ``code`` (empty: no body at all).

    ``status=200`` is the success that carries an error document. ``early`` answers before the body of the request was
    read, and closes.
    """

    status: int
    code: str = ""
    retry_after: int | None = None
    early: bool = False

    def body_limit(self) -> int | None:
        return 0 if self.early else None

    def answer(self, request: Request) -> Response | None:
        found = error_answer(self.status, self.code, head=request.method == "HEAD")
        if self.retry_after is not None:
            found = found.with_header("Retry-After", str(self.retry_after))
        return found

    def deliver(self, request: Request, delivery: Delivery) -> Delivery:
        return replace(delivery, end="close") if self.early else delivery


@dataclass
class RefuseWrites(Action):
    """What a read-only key may not do is refused with 403 AccessDenied: everything but GET and HEAD."""

    def answer(self, request: Request) -> Response | None:
        return None if request.method in ("GET", "HEAD") else error_answer(403, "AccessDenied")


@dataclass
class RefuseConditional(Action):
    """501 NotImplemented for a write with If-None-Match or If-Match."""

    def answer(self, request: Request) -> Response | None:
        conditional = request.header("If-None-Match") or request.header("If-Match")
        return error_answer(501, "NotImplemented") if conditional and request.method in ("PUT", "POST") else None


@dataclass
class IgnoreConditional(Action):
    """A write with If-None-Match or If-Match is done in any case, and answered 200."""

    def request(self, request: Request) -> Request:
        if request.method not in ("PUT", "POST"):
            return request
        return replace(request.with_header("If-None-Match", None).with_header("If-Match", None), resign=True)


@dataclass
class Stale(Action):
    """The first answer to a GET or HEAD, whatever it was, is given to each later one that asks the same."""

    seen: dict[tuple[str, str, str | None], Response] = field(default_factory=dict)

    def answer(self, request: Request) -> Response | None:
        return self.seen.get(_question(request))

    def response(self, request: Request, response: Response) -> Response:
        if request.method in ("GET", "HEAD"):
            self.seen.setdefault(_question(request), response)
        return response


@dataclass
class HeadSaysAbsent(Action):
    """HEAD answers 404 for everything."""

    def answer(self, request: Request) -> Response | None:
        return error_answer(404, "", head=True) if request.method == "HEAD" else None


@dataclass
class HeadSaysPresent(Action):
    """HEAD answers 200 for everything, with ``size`` and an ETag."""

    size: int = 1

    def answer(self, request: Request) -> Response | None:
        if request.method != "HEAD":
            return None
        headers = (
            ("Content-Length", str(self.size)),
            ("ETag", f'"{hashlib.md5(request.path.encode()).hexdigest()}"'),
            ("Last-Modified", "Mon, 02 Nov 2026 10:00:00 GMT"),
        )
        return Response(headers, b"", 200, "OK")


@dataclass
class HeadSaysSize(Action):
    """HEAD gives a size that is off by ``by`` bytes."""

    by: int = 1

    def response(self, request: Request, response: Response) -> Response:
        size = response.header("Content-Length")
        if request.method != "HEAD" or response.status != 200 or size is None:
            return response
        return response.with_header("Content-Length", str(int(size) + self.by))


@dataclass
class OwnEtags(Action):
    """ETags are arbitrary: random, the same for the same content, and what conditions are about."""

    real: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)

    def request(self, request: Request) -> Request:
        for name in ("If-Match", "If-None-Match"):
            value = (request.header(name) or "").strip('"')
            if value in self.real:
                request = replace(request.with_header(name, f'"{self.real[value]}"'), resign=True)
        return request

    def response(self, request: Request, response: Response) -> Response:
        real = (response.header("ETag") or "").strip('"')
        if not real:
            return response
        made = self.made.setdefault(real, secrets.token_hex(16))
        self.real[made] = real
        return response.with_header("ETag", f'"{made}"')


@dataclass
class StorageClass(Action):
    """Objects lie in an archive: HEAD names the class, GET of an object is 403 InvalidObjectState."""

    name: str = "GLACIER"

    def answer(self, request: Request) -> Response | None:
        if request.method != "GET" or _is_bucket(request):
            return None
        return error_answer(403, "InvalidObjectState", "The operation is not valid for the object's storage class")

    def response(self, request: Request, response: Response) -> Response:
        if request.method != "HEAD" or response.status != 200 or _is_bucket(request):
            return response
        return response.with_header("x-amz-storage-class", self.name)


@dataclass
class PageSize(Action):
    """A listing has at most ``size`` keys a page, whatever was asked."""

    size: int = 2

    def request(self, request: Request) -> Request:
        if not _is_listing(request):
            return request
        query = {**request.query, "max-keys": str(self.size)}
        path = request.target.partition("?")[0]
        written = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query.items())
        return replace(request, target=f"{path}?{written}", resign=True)


@dataclass
class ReverseListing(Action):
    """The keys of each page of a listing come in the opposite order."""

    def response(self, request: Request, response: Response) -> Response:
        return _with_entries(request, response, lambda entries: entries[::-1])


@dataclass
class ListingWithout(Action):
    """Listings leave out every key in which the regular expression ``key`` is found."""

    key: str

    def response(self, request: Request, response: Response) -> Response:
        return _with_entries(
            request,
            response,
            lambda entries: [entry for entry in entries if not re.search(self.key, _entry_key(entry))],
        )


def _with_entries(request: Request, response: Response, change: Callable[[list[bytes]], list[bytes]]) -> Response:
    if not _is_listing(request) or response.status != 200:
        return response
    entries = [found.group() for found in _CONTENTS.finditer(response.body)]
    if not entries:
        return response
    start, end = response.body.index(entries[0]), response.body.rindex(entries[-1]) + len(entries[-1])
    return response.with_body(response.body[:start] + b"".join(change(entries)) + response.body[end:])


def _entry_key(entry: bytes) -> str:
    found = re.search(rb"<Key>(.*?)</Key>", entry)
    return "" if found is None else unquote(found.group(1).decode())


def _is_bucket(request: Request) -> bool:
    return "/" not in request.path.strip("/")


def _is_listing(request: Request) -> bool:
    return request.method == "GET" and "list-type" in request.query


def _question(request: Request) -> tuple[str, str, str | None]:
    return request.method, request.target, request.header("Range")
