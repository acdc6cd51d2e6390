"""A ``ckpt push`` or ``ckpt pull`` that dies at a chosen instant, and what is left where it wrote."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from random import Random
from typing import Any

import ckptstore
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key
from ckptstore_cli.main import run
from tests.support.faultactions import Action, Call, Dribble
from tests.support.faultproxy import FaultProxy
from tests.support.http1 import Request, Response

PROGRAM = "from ckptstore_cli.main import main; main()"


@dataclass(frozen=True, slots=True)
class Moment:
    """When the command dies: at a request that the proxy sees, or after so many seconds.

    Args:
        name: for messages.
        method, path: of the request; ``path`` is a regular expression that its target is searched for.
        skip: how many such requests go by before.
        when: ``before`` it reaches the server, ``inside`` the body of what carries the bytes, or ``after`` the server
            answered, of which the command learns nothing.
        seconds: instead of all that, after its start.
    """

    name: str
    method: str = ""
    path: str = ""
    skip: int = 0
    when: str = "before"
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.skip}" if self.seconds is None else f"{self.name} {self.seconds:.3f} s"


PUSHING = (
    Moment("before an object", "PUT", "/objects/"),
    Moment("inside an object", "PUT", "/objects/", when="inside"),
    Moment("after an object", "PUT", "/objects/", when="after"),
    Moment("before a readback", "GET", "/objects/"),
    Moment("inside a readback", "GET", "/objects/", when="inside"),
    Moment("before a document", "PUT", "/documents/"),
    Moment("after a document", "PUT", "/documents/", when="after"),
    Moment("before the ref", "PUT", "/refs/"),
    Moment("after the ref", "PUT", "/refs/", when="after"),
    Moment("before the receipt", "PUT", "/receipts/"),
    Moment("after the receipt", "PUT", "/receipts/", when="after"),
    Moment("before the lease goes", "DELETE", "/leases/"),
    Moment("after the lease went", "DELETE", "/leases/", when="after"),
)
"""Phases of a push, as requests at its destination."""

PULLING = (
    Moment("before the ref is read", "GET", "/refs/"),
    Moment("before a document", "GET", "/documents/"),
    Moment("inside a document", "GET", "/documents/", when="inside"),
    Moment("before an object", "GET", "/objects/"),
    Moment("inside an object", "GET", "/objects/", when="inside"),
    Moment("after an object", "GET", "/objects/", when="after"),
)
"""Phases of a pull, as requests at its source; what it does in its own directory is met by time."""


def moments(phases: Sequence[Moment], requests: dict[tuple[str, str], int], seconds: float, draw: Random) -> Moment:
    """One at random: two of three at a request of a phase, the others at any time of a run that takes ``seconds``.

    ``requests``: how many there are of each (method, path) in a run that nobody kills.
    """
    if draw.random() < 1 / 3:
        return Moment("at any time", seconds=draw.uniform(0.0, seconds))
    found = draw.choice([phase for phase in phases if requests.get((phase.method, phase.path))])
    skip = draw.randrange(requests[found.method, found.path])
    return Moment(found.name, found.method, found.path, skip, found.when)


@dataclass
class Command:
    """A ``ckpt`` command in a process of its own, whose requests go by the proxy."""

    proxy: FaultProxy
    arguments: Sequence[object]
    process: subprocess.Popen[str] | None = None
    _killed: threading.Event = field(default_factory=threading.Event)

    def start(self) -> subprocess.Popen[str]:
        """Start it."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, self.arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self.process

    def die_at(self, moment: Moment, number: signal.Signals = signal.SIGKILL) -> int:
        """Start it, send the signal at that moment, and return its exit code when it is gone.

        0: it was done before the moment came.
        """

        def strike(request: Request | None = None) -> None:
            process = self.process
            if process is not None and not self._killed.is_set():
                self._killed.set()
                process.send_signal(number)

        for action in _actions(moment, strike):
            self.proxy.add(action, method=moment.method, path=moment.path, skip=moment.skip, times=1)
        process = self.start()
        if moment.seconds is not None:
            try:
                process.wait(moment.seconds)
            except subprocess.TimeoutExpired:
                strike()
        try:
            process.communicate(timeout=120)
        finally:
            process.kill()
            self.proxy.heal()
        end = time.monotonic() + 30
        while self.proxy.busy and time.monotonic() < end:
            time.sleep(0.02)  # what it had sent reaches the server, or is lost
        return process.returncode


def _actions(moment: Moment, strike: Callable[..., None]) -> list[Action]:
    if moment.seconds is not None:
        return []
    if moment.when == "before":
        return [Call(before=strike)]
    if moment.when == "after":
        return [Call(after=strike)]
    if moment.method == "PUT":
        return [_InsideRequest(strike)]
    return [_InsideAnswer(strike), Dribble(piece=50_000, pause=0.02)]


@dataclass
class _InsideRequest(Action):
    """Strikes when the beginning of a body came; the server sees as much, and then the connection goes."""

    strike: Callable[[], None]

    def body_limit(self) -> int | None:
        return 100_000

    def answer(self, request: Request) -> Response | None:
        self.strike()
        return None


@dataclass
class _InsideAnswer(Action):
    """Strikes while an answer that another action stretches is on its way."""

    strike: Callable[[], None]

    def response(self, request: Request, response: Response) -> Response:
        threading.Timer(0.03, self.strike).start()
        return response


def again(*arguments: object) -> dict[str, Any]:
    """The same command once more, in this process; what it printed as JSON."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    assert code == 0, err.getvalue()
    (line,) = out.getvalue().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def content(store: ckptstore.Store) -> dict[str, int]:
    """Sizes of the objects and documents of a store, each of which was read, and has the digest that its name says."""
    found = {}
    for stat in store.backend.list(""):
        digest = digest_of_key(stat.key)
        if digest is None:
            continue
        data = store.backend.get(stat.key)
        assert Digest.of(data) == digest, f"{stat.key} is visible and not whole"
        assert len(data) == stat.size, stat.key
        found[stat.key] = stat.size
    return found


def carried(proxy: FaultProxy, method: str) -> int:
    """Bytes of objects and documents that went by the proxy in requests (PUT) or answers (GET), whole or not."""
    return sum(
        entry.request_bytes if method == "PUT" else entry.response_bytes
        for entry in tuple(proxy.log)
        if entry.method == method and re.search("/(objects|documents)/", entry.target)
    )
