"""The first process of a host in namespaces: makes its namespaces, calls the controller, and becomes the agent.

A program of its own that needs nothing but the standard library (``python -I -S inside.py``), because a new host has no
sources yet. One JSON object comes on stdin; the process identifier of the host's init goes to stdout.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

# linux/sched.h, linux/mount.h, linux/prctl.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38

_NAMESPACES = ("ipc", "mnt", "net", "pid", "uts")
_LINK_SECONDS = 20.0

_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """OSError with the C library's reason if a call of it failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones, unshare(2)."""
    check(_libc.unshare(flags), "unshare")


def end_with_parent() -> None:
    """Let the kernel end this process when the thread that started it is gone."""
    check(_libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), data.encode())
    check(_libc.mount(*arguments), f"mounting {target}")


def ip(*arguments: str) -> str:
    """What the program ip prints. OSError with its last words if it fails."""
    search = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, check=False, env={"PATH": search}, timeout=30
    )
    if done.returncode:
        raise OSError(0, f"ip {' '.join(arguments)}: {done.stderr.strip()[-200:]}")
    return done.stdout


def close_off(area: str, home: str, readable: list[str]) -> None:
    """Cover the folder of the run; of what is below it only ``home`` stays, and to be read only, ``readable``."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    opened = [(os.open(path, os.O_PATH), path) for path in (home, *readable)]
    mount("tmpfs", area, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=1m,mode=755")
    for descriptor, path in opened:
        if os.path.commonpath((area, path)) == area:
            os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, "", MS_BIND)
        if path != home:
            mount("none", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY)
        os.close(descriptor)
    mount("none", area, "", MS_REMOUNT | MS_BIND | MS_RDONLY)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def plug_in(address: str, prefix: int) -> None:
    """Give the end of the link that the controller puts here its address."""
    deadline = time.monotonic() + _LINK_SECONDS
    while "eth0" not in (name for _, name in socket.if_nameindex()):
        if time.monotonic() > deadline:
            raise OSError(0, f"no link within {_LINK_SECONDS:g} s")
        time.sleep(0.005)
    ip("link", "set", "lo", "up")
    ip("address", "add", f"{address}/{prefix}", "dev", "eth0")
    ip("link", "set", "eth0", "up")


def give_up_capabilities() -> None:
    """From the next program on there is none, so that what is covered stays covered."""
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if capability == 0:
        check(-1, "prctl")
    check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def call(order: dict[str, Any]) -> socket.socket:
    """A connection to the controller, to which it was said who calls and what can be seen from here."""
    deadline = time.monotonic() + _LINK_SECONDS
    while True:
        try:
            line = socket.create_connection(tuple(order["controller"]), timeout=2)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    home, area = Path(order["home"]), Path(order["area"])
    seen = {
        "token": order["token"],
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},
        "listing": sorted(path.relative_to(home).as_posix() for path in home.rglob("*")),
        "visible": sorted(_below(area, [home, *map(Path, order["readable"])])),
    }
    line.sendall(json.dumps(seen).encode() + b"\n")
    return line


def _below(area: Path, given: list[Path]) -> list[str]:
    """Everything below ``area`` that can be seen, but not what is inside of what was ``given``."""
    return [
        path.relative_to(area).as_posix() for path in area.rglob("*") if not any(one in path.parents for one in given)
    ]


def become_agent(line: socket.socket) -> NoReturn:
    """Wait for the word to begin, and become the program that it names, with the connection as stdin and stdout."""
    received = bytearray()
    while not received.endswith(b"\n"):  # not a byte more: what follows is for the agent
        data = line.recv(1)
        if not data:
            os._exit(0)  # nobody needs this host
        received += data
    begin = json.loads(received)
    log = os.open(begin["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, place in ((line.fileno(), 0), (line.fileno(), 1), (log, 2)):
        os.dup2(descriptor, place)
    os.closerange(3, 1024)
    os.chdir(begin["folder"])
    os.execve(begin["arguments"][0], begin["arguments"], begin["environment"])


def main() -> None:
    end_with_parent()
    order = json.loads(sys.stdin.readline())
    unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    try:
        end_with_parent()
        close_off(order["area"], order["home"], order["readable"])
        socket.sethostname(order["name"])
        plug_in(order["address"], order["prefix"])
        line = call(order)
        give_up_capabilities()
        become_agent(line)
    except OSError as error:
        print(f"host {order['name']}: {error.strerror or error}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
