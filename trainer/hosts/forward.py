"""A door in the hosts' network to one server on this machine: bytes are passed on both ways, and nothing else is."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_PIECE = 2**18  # bytes


class Forward:
    """Passes each connection that ``listener`` takes on to ``target``, until it is closed.

    Args:
        listener: a socket that listens, whatever network it is in; closed with this object.
        target: address and port of the server, in this process's network.
    """

    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self._listener, self._target = listener, target
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="door of hosts", daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and end those that there are."""
        with self._lock:
            sockets = (self._listener, *self._open)
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(caller,), name="passes on", daemon=True).start()

    def _pass(self, caller: socket.socket) -> None:
        with caller:
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                return  # the caller sees a connection that ends, as it would where the server is down
            with server:
                server.settimeout(None)
                for one in (caller, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {caller, server}
                back = threading.Thread(target=_pump, args=(server, caller), name="passes back", daemon=True)
                back.start()
                _pump(caller, server)
                back.join()
                with self._lock:
                    self._open -= {caller, server}


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Until ``source`` has said all; then ``target`` is told so."""
    with suppress(OSError):
        while data := source.recv(_PIECE):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
