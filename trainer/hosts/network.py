"""The controller's side of the network of hosts in namespaces, and the calls that hosts make over it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.errors import BackendError, MalformedError

_PROGRAM = Path(__file__).with_name("switch.py")
_PACKET = 2**17  # bytes
_HELLO_LIMIT = 2**20  # bytes
_CALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """A host's first process has called: what it saw, and the connection.

    ``namespaces`` are the kernel's names of its own by kind, ``listing`` what its folder held, ``visible`` what else of
    the run's folder it can see.
    """

    connection: socket.socket
    address: str
    pid: int
    namespaces: Mapping[str, str]
    listing: tuple[str, ...]
    visible: tuple[str, ...]


class Network:
    """A bridge in a network namespace of its own, which ends with this object's :meth:`close` or with this process.

    Args:
        user: make it in a user namespace, for who is not root.

    Raises:
        BackendError: this machine does not let us; says what was refused.
    """

    def __init__(self, *, user: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        with theirs:
            arguments = [sys.executable, "-I", "-S", str(_PROGRAM), str(theirs.fileno()), *(["user"] if user else [])]
            try:
                self._process = subprocess.Popen(
                    arguments, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
                )
            except OSError as error:
                ours.close()
                raise BackendError("network of hosts", f"{error.strerror}: {sys.executable}") from None
        self._lock = threading.Lock()
        self._called = threading.Condition()
        self._calls: dict[str, tuple[socket.socket, dict[str, Any]]] = {}
        self._awaited: set[str] = set()
        try:
            self._receive()
            self.namespace = os.readlink(f"/proc/{self._process.pid}/ns/net")
            self._listener, self._address = self.listen()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._accept, name="calls of hosts", daemon=True).start()

    def listen(self) -> tuple[socket.socket, tuple[str, int]]:
        """A socket that listens in the network, where hosts can reach it, and its address."""
        with self._lock:
            self._control.send(json.dumps({"do": "listen"}).encode())
            answer, descriptors = self._receive()
        listener = socket.socket(fileno=descriptors[0])
        return listener, (answer["address"], answer["port"])

    def host(self, number: int, name: str, area: Path, home: Path, readable: Sequence[Path], log: Path) -> Call:
        """Make the namespaces and the link of a host, and wait until it calls.

        Args:
            number: of its link, new for each host.
            name: its hostname.
            area: the run's folder, which it cannot see but for the following.
            home: its own folder.
            readable: folders that it may read.
            log: file for the words of its first process.
        """
        token = secrets.token_hex(16)
        self._awaited.add(token)
        order = {
            "token": token,
            "name": name,
            "area": str(area),
            "home": str(home),
            "readable": [str(path) for path in readable],
            "controller": self._address,
        }
        answer = self._ask(do="host", number=number, order=order, log=str(log))
        pid, address = answer["pid"], answer["address"]
        deadline = time.monotonic() + _CALL_SECONDS
        with self._called:
            while token not in self._calls:
                if not Path(f"/proc/{pid}").exists() or time.monotonic() > deadline:
                    words = log.read_text(errors="replace").strip()[-300:] if log.exists() else ""
                    raise BackendError(f"host {name}", words or f"it did not call within {_CALL_SECONDS:g} s")
                self._called.wait(0.1)
            connection, seen = self._calls.pop(token)
        return Call(connection, address, pid, seen["namespaces"], tuple(seen["listing"]), tuple(seen["visible"]))

    def cut(self, number: int) -> None:
        """Take a host's link down."""
        self._ask(do="cut", number=number)

    def unplug(self, number: int) -> None:
        """Take a host's link away, if it is there."""
        self._ask(do="unplug", number=number)

    def links(self) -> list[str]:
        """Names of the links that there are."""
        return list(self._ask(do="links")["links"])

    def close(self) -> bool:
        """End it with all that is in it; whether no process is in its namespace any more."""
        for one in (self._control, getattr(self, "_listener", None)):
            if one is not None:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        return not in_use([getattr(self, "namespace", "")])

    # -- inside -------------------------------------------------------------------------------------------------------

    def _ask(self, **request: object) -> dict[str, Any]:
        with self._lock:
            try:
                self._control.send(json.dumps(request).encode())
                return self._receive()[0]
            except OSError as error:
                raise BackendError("network of hosts", f"it is gone: {error.strerror}") from None

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        data, descriptors, _, _ = socket.recv_fds(self._control, _PACKET, 1)
        if not data:
            words = b"" if self._process.stderr is None else self._process.stderr.read()
            last = words.decode(errors="replace").strip().rpartition("\n")[2]
            raise BackendError("network of hosts", f"its process ended: {last}"[:300])
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise BackendError("network of hosts", answer["error"])
        return answer, descriptors

    def _accept(self) -> None:
        """In a thread of its own: take calls, and put them where they are waited for."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with suppress(OSError, ValueError, MalformedError):
                self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        connection.settimeout(10)
        with connection.makefile("rb", buffering=0) as lines:
            seen = json.loads(lines.readline(_HELLO_LIMIT))
        token = str(seen["token"]) if isinstance(seen, dict) and "token" in seen else ""
        if token not in self._awaited:
            connection.close()
            raise MalformedError("call of a host", "nobody expects it")
        self._awaited.discard(token)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._called:
            self._calls[token] = (connection, seen)
            self._called.notify_all()


def in_use(namespaces: Sequence[str]) -> list[str]:
    """Those of some namespaces, by the kernel's names for them, that a process is in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/*"):
        with suppress(OSError):
            found.add(os.readlink(entry))
    return [name for name in namespaces if name in found]
