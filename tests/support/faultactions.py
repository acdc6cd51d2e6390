"""What can go wrong between a client and an S3 server, one class each. :mod:`tests.support.faultproxy` does it.

An action has a say at six points, in this order; each does nothing where a class does not say otherwise:

* ``arrive``: the head of a request is here, its body is not;
* ``answer``: an answer of our own, instead of the server's;
* ``request``: what goes on to the server;
* ``answered``: the server did its part;
* ``response``: what it said;
* ``deliver``: how that goes back over the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from tests.support.http1 import Request, Response

End = Literal["keep", "close", "reset", "hang"]


class HangError(Exception):
    """The client gets no (further) byte; its connection stays open."""


class ResetError(Exception):
    """The client's connection is reset (RST)."""


class DownError(Exception):
    """The endpoint goes away: connections are reset, and new ones refused, for so many seconds or until ``up()``."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Delivery:
    """An answer on its way to the client: the bytes of its body, in which pieces, and what comes after the last."""

    response: Response
    end: End = "keep"
    piece: int | None = None
    pause: float = 0.0
    slow_head: bool = False


class Action:
    """Does nothing: the request goes to the server, and its answer to the client."""

    repeats: ClassVar[int] = 0
    """How often more than once the server is to get the request."""

    def body_limit(self) -> int | None:
        """How many bytes of the request's body are read; the connection does not outlive a request that was cut."""
        return None

    async def arrive(self, request: Request) -> None:
        """May wait, and may raise the errors above."""

    def answer(self, request: Request) -> Response | None:
        return None

    def request(self, request: Request) -> Request:
        return request

    async def answered(self, request: Request) -> None:
        """May wait, and may raise the errors above."""

    def response(self, request: Request, response: Response) -> Response:
        return response

    def deliver(self, request: Request, delivery: Delivery) -> Delivery:
        return delivery


@dataclass
class Delay(Action):
    """Nothing happens for so many seconds after a request came."""

    seconds: float

    async def arrive(self, request: Request) -> None:
        await asyncio.sleep(self.seconds)


@dataclass
class ResetRequest(Action):
    """RST when ``after`` bytes of the request's body came (None: as soon as its head came); the server sees as much."""

    after: int | None = None

    def body_limit(self) -> int | None:
        return self.after

    async def arrive(self, request: Request) -> None:
        if self.after is None:
            raise ResetError


@dataclass
class LostAnswer(Action):
    """The server does what was asked, and the client gets RST instead of the answer (or no byte at all)."""

    hang: bool = False

    async def answered(self, request: Request) -> None:
        raise HangError if self.hang else ResetError


@dataclass
class Blackhole(Action):
    """The request vanishes: the server never sees it, the client never hears of it."""

    async def arrive(self, request: Request) -> None:
        raise HangError


@dataclass
class GoDown(Action):
    """The endpoint goes away with this request, for so many seconds or until the proxy is told ``up()``."""

    seconds: float | None = None

    async def arrive(self, request: Request) -> None:
        raise DownError(self.seconds)


@dataclass
class Twice(Action):
    """The request reaches the server a second time after it was answered; that answer is dropped."""

    repeats: ClassVar[int] = 1


@dataclass
class Call(Action):
    """Calls ``before(request)`` when a request came and ``after(request)`` when the server answered it.

    Both run in threads of their own: other requests go on, also those that they make through the proxy.
    """

    before: Callable[[Request], object] | None = None
    after: Callable[[Request], object] | None = None

    async def arrive(self, request: Request) -> None:
        if self.before is not None:
            await asyncio.to_thread(self.before, request)

    async def answered(self, request: Request) -> None:
        if self.after is not None:
            await asyncio.to_thread(self.after, request)


@dataclass
class ResetResponse(Action):
    """RST after the head and ``after`` bytes of the answer's body."""

    after: int = 0

    def deliver(self, request: Request, delivery: Delivery) -> Delivery:
        return replace(delivery, response=_cut(delivery.response, self.after), end="reset")


@dataclass
class Truncate(Action):
    """The body ends after ``after`` bytes and the connection is closed in order.

    With ``declared`` the Content-Length still promises all of it; without, there is none, and nothing looks wrong.
    """

    after: int
    declared: bool = True

    def deliver(self, request: Request, delivery: Delivery) -> Delivery:
        cut = _cut(delivery.response, self.after)
        return replace(delivery, response=cut if self.declared else _without_length(cut), end="close")


@dataclass
class Stall(Action):
    """After ``after`` bytes of the body nothing more comes, and the connection stays open."""

    after: int = 0

    def deliver(self, request: Request, delivery: Delivery) -> Delivery:
        return replace(delivery, response=_cut(delivery.response, self.after), end="hang")


@dataclass
class Overlong(Action):
    """``extra`` bytes too many.

    ``declared="extra"``: they are there and Content-Length counts them; ``"none"``: they are there and there is no
    Content-Length; ``"only"``: Content-Length counts them and they never come.
    """

    extra: bytes = b"\0"
    declared: Literal["extra", "none", "only"] = "extra"

    def deliver(self, request: Request, delivery: Delivery) -> Delivery:
        response = delivery.response
        longer = response.with_body(response.body + self.extra)
        if self.declared == "none":
            return replace(delivery, response=_without_length(longer), end="close")
        if self.declared == "only":
            return replace(delivery, response=replace(longer, body=response.body), end="close")
        return replace(delivery, response=longer)


@dataclass
class Dribble(Action):
    """The answer comes in pieces of ``piece`` bytes with ``pause`` seconds between them; ``head``: the headers too."""

    piece: int
    pause: float
    head: bool = False

    def deliver(self, request: Request, delivery: Delivery) -> Delivery:
        return replace(delivery, piece=self.piece, pause=self.pause, slow_head=self.head)


@dataclass
class Rate(Action):
    """The bodies of request and answer pass at ``rate`` bytes per second."""

    rate: float

    async def arrive(self, request: Request) -> None:
        await asyncio.sleep(int(request.header("Content-Length") or 0) / self.rate)

    def deliver(self, request: Request, delivery: Delivery) -> Delivery:
        piece = max(1, int(self.rate / 20))
        return replace(delivery, piece=piece, pause=piece / self.rate)


def _cut(response: Response, size: int) -> Response:
    return replace(response, body=response.body[:size])


def _without_length(response: Response) -> Response:
    return response.with_header("Content-Length", None).with_header("Connection", "close")
