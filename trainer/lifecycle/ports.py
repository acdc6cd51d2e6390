"""Ports of the loopback interface that are free for a server."""

from __future__ import annotations

import secrets
import socket

from ckptstore.errors import BackendError

LOOPBACK = "127.0.0.1"

TWIN = 10_000
"""A server that speaks gRPC does so on the port that is this much higher."""

# Both stay below what the kernel hands out for outgoing connections (32768 and up on Linux), or a client could take one
# by accident while the server is down.
_LOWEST, _HIGHEST = 10_300, 22_700


def free_ports(count: int) -> list[int]:
    """``count`` different ports of the loopback that nobody uses now, each with one that is 10000 higher."""
    draw = secrets.SystemRandom()
    found: list[int] = []
    for _ in range(100 * count):
        port = draw.randrange(_LOWEST, _HIGHEST)
        if port not in found and is_free(port) and is_free(port + TWIN):
            found.append(port)
        if len(found) == count:
            return found
    raise BackendError(f"{count} free ports", f"nearly all between {_LOWEST} and {_HIGHEST} are taken")


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
