"""An HTTP proxy before an S3 server that does to each request what its rules say.

    with FaultProxy(server.port, server.admin) as proxy:
        proxy.add(Status(503, "SlowDown"), method="PUT", path="/objects/", times=3)
        ... a client of proxy.endpoint ...
        assert proxy.count("PUT") == 5

Signatures stay valid: the Host header is what the client wrote, and where an action changes what was signed, the proxy
signs again with the keys it was given. Messages are read whole before they go on, so an action sees all of them.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.support.faultactions import Action, Delivery, DownError, HangError, ResetError
from tests.support.faultrules import Exchange, Rule
from tests.support.http1 import (
    Request,
    Response,
    read_request,
    read_request_body,
    read_response,
    write_body,
)
from tests.support.sigv4 import signed_again
from trainer.lifecycle.ports import LOOPBACK, free_ports
from trainer.lifecycle.s3client import Credentials

_T = TypeVar("_T")

# How long bytes that were written before a reset get to reach the client; a reset overtakes what is still queued.
_BEFORE_RESET = 0.05


class FaultProxy:
    """Listens on a free port of the loopback in a thread of its own, from ``start()`` (or ``with``) to ``stop()``.

    Args:
        upstream: port of the real server, http on the loopback.
        identities: keys with which changed requests are signed again.
    """

    def __init__(self, upstream: int, *identities: Credentials) -> None:
        self.rules: list[Rule] = []
        self.log: list[Exchange] = []
        self.port = 0
        self._upstream = upstream
        self._identities = identities
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        self._listener: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._return: asyncio.TimerHandle | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def add(
        self,
        action: Action,
        *,
        method: str | None = None,
        path: str = "",
        when: Callable[[Request], bool] = lambda request: True,
        skip: int = 0,
        times: int | None = None,
        probability: float = 1.0,
        seed: int = 0,
    ) -> Rule:
        """Take ``action`` on requests from now on; see :class:`Rule`. Several may be taken on one request."""
        rule = Rule(action, method, path, when, skip, times, probability, seed)
        self.rules.append(rule)
        return rule

    @property
    def busy(self) -> int:
        """How many requests are being served, those of clients that went away too."""
        return sum(entry.under_way for entry in tuple(self.log))

    def heal(self) -> None:
        """Forget all rules, and listen again if the endpoint is down."""
        self.rules.clear()
        self.up()

    def count(self, method: str | None = None, path: str = "") -> int:
        """How many requests of ``method`` came in whose target ``path`` (a regular expression) is found."""
        return sum(method in (None, entry.method) and bool(re.search(path, entry.target)) for entry in tuple(self.log))

    def down(self, seconds: float | None = None) -> None:
        """Reset all connections and refuse new ones, for so many seconds or until :meth:`up`."""
        self._run(self._go_down(seconds))

    def up(self) -> None:
        """Listen again, on the same port. Without effect while it listens."""
        self._run(self._listen())

    def start(self) -> Self:
        self._thread.start()
        # Not one that the kernel picks: while the endpoint is down, it could pick the same for a client.
        self.port = free_ports(1)[0]
        self._run(self._listen())
        return self

    def stop(self) -> None:
        self._run(self._go_down(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _listen(self) -> None:
        if self._return is not None:
            self._return.cancel()
            self._return = None
        if self._listener is None:
            self._listener = await asyncio.start_server(self._client, LOOPBACK, self.port, limit=1 << 20)

    async def _go_down(self, seconds: float | None, spared: asyncio.Task[None] | None = None) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._return is not None:
            self._return.cancel()
            self._return = None
        if seconds is not None:
            self._return = self._loop.call_later(seconds, lambda: self._loop.create_task(self._listen()))
        ending = self._clients - {spared} if spared is not None else set(self._clients)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
            writer.close()
        except HangError:
            with suppress(ConnectionError, asyncio.CancelledError):
                await reader.read()  # until the client has had enough
            _reset(writer)
        except DownError as error:
            _reset(writer)
            await self._go_down(error.seconds, spared=task)
        except (ResetError, asyncio.CancelledError):
            _reset(writer)
        except (asyncio.IncompleteReadError, ConnectionError):  # the client went away
            writer.transport.abort()
        finally:
            self._clients.discard(task)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; True if the connection may carry another."""
        request = await read_request(reader)
        actions = [rule.action for rule in tuple(self.rules) if rule.takes(request)]
        entry = Exchange(request.method, request.target, tuple(type(action).__name__ for action in actions))
        self.log.append(entry)
        try:
            return await self._carry(entry, request, actions, reader, writer)
        finally:
            entry.under_way = False

    async def _carry(
        self,
        entry: Exchange,
        request: Request,
        actions: list[Action],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """The rest of an exchange, once the head of its request is here."""
        for action in actions:
            await action.arrive(request)
        limits = [limit for action in actions if (limit := action.body_limit()) is not None]
        limit = min(limits, default=None)
        if limit != 0 and (request.header("Expect") or "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            request = await read_request_body(reader, request, limit)
        except asyncio.IncompleteReadError as error:  # the client went away in the middle
            entry.request_bytes = len(error.partial)
            raise
        entry.request_bytes = len(request.body)
        answers = [answer for action in actions if (answer := action.answer(request)) is not None]
        response = answers[0] if answers else None
        if response is None:
            if limit is not None:
                await self._send_part(request)
                raise ResetError
            response = await self._served(request, actions)
        delivery = Delivery(response, end="close" if limit is not None else "keep")
        for action in actions:
            delivery = action.deliver(request, delivery)
        entry.status = response.status
        entry.response_bytes = len(delivery.response.body)
        await _deliver(writer, delivery)
        return delivery.end == "keep" and (response.header("Connection") or "").lower() != "close"

    async def _served(self, request: Request, actions: list[Action]) -> Response:
        sent = request.with_header("Expect", None)
        for action in actions:
            sent = action.request(sent)
        if sent.resign:
            sent = signed_again(sent, self._identities)
        try:
            response = await self._ask(sent)
            for _ in range(sum(action.repeats for action in actions)):
                await self._ask(sent)
        except (ConnectionError, asyncio.IncompleteReadError) as error:  # as without a proxy before it
            raise ResetError from error
        for action in actions:
            await action.answered(request)
        for action in actions:
            response = action.response(request, response)
        return response

    async def _ask(self, request: Request) -> Response:
        reader, writer = await asyncio.open_connection(LOOPBACK, self._upstream, limit=1 << 20)
        try:
            writer.write(request.head)
            await write_body(writer, request.body)
            return await read_response(reader, request.method)
        finally:
            writer.transport.abort()

    async def _send_part(self, request: Request) -> None:
        """Let the server see a request that ends in the middle."""
        with suppress(ConnectionError):
            _, writer = await asyncio.open_connection(LOOPBACK, self._upstream)
            writer.write(request.with_header("Expect", None).head + request.body)
            await asyncio.sleep(_BEFORE_RESET)
            _reset(writer)


async def _deliver(writer: asyncio.StreamWriter, delivery: Delivery) -> None:
    response = delivery.response
    if delivery.piece is None:
        writer.write(response.head)
        await write_body(writer, response.body)
    else:
        slow = response.head + response.body if delivery.slow_head else response.body
        if not delivery.slow_head:
            writer.write(response.head)
        for start in range(0, len(slow), delivery.piece):
            writer.write(slow[start : start + delivery.piece])
            await writer.drain()
            await asyncio.sleep(delivery.pause)
    await writer.drain()
    if delivery.end == "hang":
        raise HangError
    if delivery.end == "reset":
        await asyncio.sleep(_BEFORE_RESET)
        raise ResetError


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST in place of FIN."""
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
