"""How this process keeps memory: what a thread has done with goes back to the system, instead of being kept for it."""

from __future__ import annotations

import ctypes
import sys

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt(3)
_BYTES = 4 * 2**20


def give_back_large_blocks() -> None:
    """Let glibc map every block of 4 MiB or more on its own, so that it goes back when it is freed.

    Chunks have 16 MiB, and each thread of a transfer has one at a time. By default glibc soon keeps what was freed for
    the thread that had it, more than twice as much as is in use. That is a setting of the whole process: a command may
    choose it for itself, a library in somebody's training may not. Does nothing where there is no such call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _BYTES)
