"""Who a temporary file belongs to, so that one whose writer died can be told from one that is being written.

A process id alone is no name: it is used again after the process has gone, after a reboot, and in another container
or on another host that shares the directory. An :class:`Owner` adds the boot, the pid namespace and the start time.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

_OWNER = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,16})-([0-9]{1,10})-([0-9]{1,20})")
_UNKNOWN_BOOT = "0" * 16


class Liveness(Enum):
    """What is known about a process."""

    ALIVE = "alive"
    DEAD = "dead"  # proven: it has gone, or its number belongs to a later process
    UNKNOWN = "unknown"  # another boot, host or pid namespace, or a system that does not tell


@dataclass(frozen=True, slots=True)
class Owner:
    """One process. ``str(owner)`` and :meth:`parse` are inverses; the text is a legal part of a file name.

    ``boot`` is 16 hex digits (zeros where the system does not tell), ``namespace`` the inode of the pid namespace,
    ``started`` the start time in clock ticks since boot (0 where unknown).
    """

    boot: str
    namespace: int
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.boot}-{self.namespace:x}-{self.pid}-{self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The owner that prints as ``text``, or None if ``text`` is not one."""
        match = _OWNER.fullmatch(text)
        if match is None:
            return None
        return cls(match[1], int(match[2], 16), int(match[3]), int(match[4]))

    @property
    def is_of_this_boot(self) -> bool:
        """Whether it runs or ran under the kernel that runs this process, in whatever container."""
        return self.boot != _UNKNOWN_BOOT and self.boot == this_process().boot

    def liveness(self) -> Liveness:
        """Whether this process still runs, as far as this process can prove it."""
        here = this_process()
        if self.boot == _UNKNOWN_BOOT or (self.boot, self.namespace) != (here.boot, here.namespace):
            return Liveness.UNKNOWN
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return Liveness.DEAD
        except (PermissionError, OverflowError):
            pass
        started = _start_time(self.pid)
        if not started or not self.started:  # /proc may hide other users' processes
            return Liveness.UNKNOWN
        return Liveness.ALIVE if started == self.started else Liveness.DEAD


def this_process() -> Owner:
    """The calling process, also after a fork."""
    return _owner(os.getpid())


@cache
def _owner(pid: int) -> Owner:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").replace("-", "")[:16]
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError):
        boot, namespace = _UNKNOWN_BOOT, 0
    return Owner(boot, namespace, pid, _start_time(pid))


def _start_time(pid: int) -> int:
    """Start of process ``pid`` in clock ticks since boot; 0 if unknown, -1 for a zombie, which never writes again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = text[text.rindex(b")") + 1 :].split()  # the name before may hold anything, also ")" and spaces
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
