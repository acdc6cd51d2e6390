"""The network of hosts in namespaces: a network namespace of its own with a bridge, to which each host has one link.

A program of its own that needs nothing but the standard library (``python -I -S switch.py FD [user]``). It serves the
controller over the socket with the descriptor ``FD``, one JSON object a packet, and ends with it. Nothing of it is in
the machine's own network, so nothing is left there however it ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # isolated mode does not look there

import inside  # type: ignore[import-not-found]

ADDRESS, PREFIX, MAC = "10.77.0.1", 24, "02:63:6b:70:74:01"
PACKET = 2**17  # bytes


class Switch:
    """Carries out what comes over ``control``."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._hosts: dict[int, subprocess.Popen[str]] = {}

    def build(self) -> None:
        """The bridge, with the controller's address on it."""
        inside.ip("link", "set", "lo", "up")
        # Without an address of its own it would take that of one of its links, and another's when that one is lost:
        # what hosts then send to the controller would be lost, too, until they ask again for the way.
        inside.ip("link", "add", "br0", "address", MAC, "type", "bridge")
        inside.ip("address", "add", f"{ADDRESS}/{PREFIX}", "dev", "br0")
        inside.ip("link", "set", "br0", "up")

    def serve(self) -> None:
        """Until the controller is gone. What fails is told, and the next request served."""
        while packet := self._control.recv(PACKET):
            passed: list[socket.socket] = []
            try:
                answer = self._answer(json.loads(packet), passed)
            except (OSError, ValueError) as error:
                answer = {"error": getattr(error, "strerror", None) or str(error)}
            socket.send_fds(self._control, [json.dumps(answer).encode()], [one.fileno() for one in passed])
            for one in passed:
                one.close()
        for process in self._hosts.values():
            process.kill()

    def _answer(self, request: dict[str, Any], passed: list[socket.socket]) -> dict[str, Any]:
        match request:
            case {"do": "listen"}:
                listener = socket.create_server((ADDRESS, 0), backlog=64)
                passed.append(listener)
                return {"address": ADDRESS, "port": listener.getsockname()[1]}
            case {"do": "host", "number": int(number), "order": dict(order), "log": str(log)}:
                address = f"{ADDRESS.rpartition('.')[0]}.{10 + number}"
                return {"pid": self._add(number, address, order, log), "address": address}
            case {"do": "cut", "number": int(number)}:
                inside.ip("link", "set", f"v{number}", "down")
                return {}
            case {"do": "unplug", "number": int(number)}:
                if f"v{number}" in self._links():
                    # Not left to the kernel: connections that wait for an answer keep a namespace without processes.
                    inside.ip("link", "delete", f"v{number}")
                return {}
            case {"do": "links"}:
                self._reap()
                return {"links": self._links()}
        return {"error": f"no request like {request}"}

    def _add(self, number: int, address: str, order: dict[str, Any], log: str) -> int:
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", inside.__file__, order["home"]],  # its name is for who lists processes
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        self._hosts[number] = process
        process.stdin.write(json.dumps({**order, "address": address, "prefix": PREFIX}) + "\n")
        process.stdin.close()
        first = process.stdout.readline().strip()
        process.stdout.close()
        if not first.isdecimal():
            raise OSError(0, f"its first process ended: {_tail(log)}")
        inside.ip("link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", first)
        inside.ip("link", "set", f"v{number}", "master", "br0", "up")
        return int(first)

    def _links(self) -> list[str]:
        found = json.loads(inside.ip("-json", "link", "show", "type", "veth") or "[]")
        return [one["ifname"] for one in found if "ifname" in one]

    def _reap(self) -> None:
        for process in self._hosts.values():
            process.poll()


def enter_user_namespace() -> None:
    """Be root of a new user namespace: who has no rights on the machine has all of them in there."""
    uid, gid = os.geteuid(), os.getegid()
    inside.unshare(inside.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _tail(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(errors="replace").strip()[-200:]
    return ""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller
    control = socket.socket(fileno=int(sys.argv[1]))
    switch = Switch(control)
    try:
        if "user" in sys.argv[2:]:
            enter_user_namespace()
        inside.unshare(inside.CLONE_NEWNS | inside.CLONE_NEWNET)
        switch.build()
    except OSError as error:
        control.send(json.dumps({"error": error.strerror or str(error)}).encode())
        return
    control.send(b"{}")
    switch.serve()


if __name__ == "__main__":
    main()
