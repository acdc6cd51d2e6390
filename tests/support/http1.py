"""HTTP/1.1 messages as values, read from and written to asyncio streams, as a proxy before an S3 server needs them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import unquote

Headers = tuple[tuple[str, str], ...]

_PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Message:
    """Headers in their order, with the names as they came, and the body's bytes as they came."""

    headers: Headers
    body: bytes

    def header(self, name: str) -> str | None:
        """The first value under ``name``, whatever its case."""
        return next((value for found, value in self.headers if found.lower() == name.lower()), None)

    def with_header(self, name: str, value: str | None) -> Self:
        """The same with ``value`` as the only one under ``name``, in its old place; without any for None."""
        kept: list[tuple[str, str]] = []
        for found, old in self.headers:
            if found.lower() != name.lower():
                kept.append((found, old))
            elif value is not None:
                kept.append((found, value))
                value = None
        if value is not None:
            kept.append((name, value))
        return replace(self, headers=tuple(kept))

    def with_body(self, body: bytes) -> Self:
        """The same with another body, and a Content-Length that says so."""
        return replace(self, body=body).with_header("Content-Length", str(len(body)))


@dataclass(frozen=True, slots=True)
class Request(Message):
    method: str
    target: str
    """Path and query as they stand in the first line, percent-encoded."""
    resign: bool = False
    """Whether what was signed has changed, so that it has to be signed anew."""

    @property
    def path(self) -> str:
        """The decoded path: ``/bucket/key``."""
        return unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, str]:
        """The decoded query; a name without a value has an empty one."""
        pairs = (part.partition("=") for part in self.target.partition("?")[2].split("&") if part)
        return {unquote(name): unquote(value) for name, _, value in pairs}

    @property
    def head(self) -> bytes:
        return _head(f"{self.method} {self.target} HTTP/1.1", self.headers)


@dataclass(frozen=True, slots=True)
class Response(Message):
    status: int
    reason: str

    @property
    def head(self) -> bytes:
        return _head(f"HTTP/1.1 {self.status} {self.reason}", self.headers)


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The first line and the headers of the next request; its body is still to be read."""
    line, headers = await _read_head(reader)
    method, target, _ = line.split(" ", 2)
    return Request(headers, b"", method, target)


async def read_request_body(reader: asyncio.StreamReader, request: Request, limit: int | None = None) -> Request:
    """``request`` with its body, of which no more than ``limit`` bytes are waited for. Chunked framing stays in it."""
    if (request.header("Transfer-Encoding") or "").lower() == "chunked":
        framed, _ = await _read_chunks(reader)
        return replace(request, body=framed)
    size = int(request.header("Content-Length") or 0)
    wanted = size if limit is None else min(size, limit)
    return replace(request, body=await reader.readexactly(wanted) if wanted else b"")


async def read_response(reader: asyncio.StreamReader, method: str) -> Response:
    """The whole answer to a request of ``method``; chunked framing is taken off and replaced by a Content-Length."""
    while True:
        line, headers = await _read_head(reader)
        _, status, reason = (line + " ").split(" ", 2)
        if status != "100":
            break
    response = Response(headers, b"", int(status), reason.strip())
    if method == "HEAD" or response.status in (204, 304):
        return response
    if (response.header("Transfer-Encoding") or "").lower() == "chunked":
        _, body = await _read_chunks(reader)
        return response.with_header("Transfer-Encoding", None).with_body(body)
    size = response.header("Content-Length")
    body = await (reader.read() if size is None else reader.readexactly(int(size)))
    return response.with_body(body)


async def write_body(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Write ``body`` no faster than the other side takes it."""
    for start in range(0, len(body), _PIECE):
        writer.write(body[start : start + _PIECE])
        await writer.drain()


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, Headers]:
    raw = await reader.readuntil(b"\r\n\r\n")
    line, *lines = raw.decode("latin-1")[:-4].split("\r\n")
    split = (entry.partition(":") for entry in lines)
    return line, tuple((name, value.strip()) for name, _, value in split)


async def _read_chunks(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """A chunked body, with its framing and without."""
    framed, plain = bytearray(), bytearray()
    while True:
        line = await reader.readuntil(b"\r\n")
        framed += line
        size = int(line.split(b";")[0], 16)
        if size == 0:
            break
        chunk = await reader.readexactly(size + 2)
        framed += chunk
        plain += chunk[:-2]
    while line != b"\r\n":  # trailers, if any
        line = await reader.readuntil(b"\r\n")
        framed += line
    return bytes(framed), bytes(plain)


def _head(line: str, headers: Headers) -> bytes:
    return "\r\n".join([line, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("latin-1")
