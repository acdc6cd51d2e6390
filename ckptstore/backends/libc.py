"""The few Linux calls that :mod:`os` lacks, each with an answer for systems that do not have it."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import cache

_SYNC_FILE_RANGE_WRITE = 2
_PROT_READ = 1
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value
_STATFS_ROOM = 512  # more than any struct statfs; its first member is the type

# What says "there is no such thing here" and not "the device failed".
_NO_SUCH_CALL = frozenset({errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP, errno.EINTR})


@cache
def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc


def _failed() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Ask the kernel to start writing bytes ``[offset, offset + length)`` to the device, without waiting for it.

    It is a hint: nothing is promised to be stored before an fsync, and nothing happens where the call is missing.

    Raises:
        OSError: the device refused to take the bytes.
    """
    libc = _libc()
    if libc is None:
        return
    if libc.sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE) and ctypes.get_errno() not in _NO_SUCH_CALL:
        raise _failed()


def filesystem_type(fd: int) -> int | None:
    """The magic number of the file system that holds ``fd`` (statfs(2)), or None where it cannot be told."""
    libc = _libc()
    if libc is None:
        return None
    room = ctypes.create_string_buffer(_STATFS_ROOM)
    if libc.fstatfs(fd, room):
        return None
    return int(ctypes.c_long.from_buffer(room).value) & 0xFFFF_FFFF


def resident_pages(fd: int, size: int) -> int | None:
    """How many pages of the first ``size`` bytes of ``fd`` lie in the page cache; None where it cannot be told.

    The kernel calls every page resident for those who may not write the file and do not own it.
    """
    libc = _libc()
    if libc is None:
        return None
    if size == 0:
        return 0
    address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        return None
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        marks = ctypes.create_string_buffer(-(-size // page))
        if libc.mincore(address, size, marks):
            return None
        return sum(mark & 1 for mark in marks.raw)
    finally:
        libc.munmap(address, size)
