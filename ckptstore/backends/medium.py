"""Reading a file from its medium and not from the page cache, and saying honestly how far down the read went.

A readback proves nothing if it is answered from the pages that the write left in memory. So: fsync (dirty pages are
newer than the device), drop the pages, then read around the cache with O_DIRECT where the file system is known to mean
it. Elsewhere the read counts only if mincore(2) shows that no page was left; mapped, locked and tmpfs pages stay.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from ckptstore.backends.durable import read_range, sync
from ckptstore.backends.libc import filesystem_type, resident_pages
from ckptstore.backends.protocol import ReadbackMethod

# Magic numbers of statfs(2).
_MEMORY = frozenset({0x01021994, 0x858458F6, 0x958458F6})  # tmpfs, ramfs, hugetlbfs: there is no medium below
_SERVED = frozenset(
    {
        0x6969,  # nfs
        0x517B,  # smb
        0xFF534D42,  # cifs
        0xFE534D42,  # smb2
        0x65735546,  # fuse
        0x01021997,  # 9p
        0x00C36400,  # ceph
        0x0BD00BD0,  # lustre
        0x5346414F,  # afs
    }
)
# O_DIRECT is accepted by more, but there it may mean nothing (tmpfs) or what the layer below makes of it (overlay).
_MEANS_DIRECT = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010})  # ext4, xfs, btrfs, f2fs

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


def read_from_medium(fd: int, length: int) -> tuple[bytes, ReadbackMethod]:
    """The first ``length`` bytes of the regular file ``fd`` (fewer if it ends before), and how they were read.

    Raises OSError if the device fails, also if it failed to take bytes that were still on their way to it.
    """
    kind = filesystem_type(fd)
    if kind in _MEMORY or not hasattr(os, "posix_fadvise"):
        return read_range(fd, 0, length), ReadbackMethod.CACHED
    if not os.fstatvfs(fd).f_flag & os.ST_RDONLY:  # nothing is dirty there, and some have no fsync at all
        sync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if kind in _MEANS_DIRECT:
        data = _read_direct(fd, length)
        if data is not None:
            return data, ReadbackMethod.DIRECT
    dropped = resident_pages(fd, min(length, os.fstat(fd).st_size)) == 0
    data = read_range(fd, 0, length)
    if not dropped:
        return data, ReadbackMethod.CACHED
    return data, ReadbackMethod.SERVER if kind in _SERVED else ReadbackMethod.DROPPED


def _read_direct(fd: int, length: int) -> bytes | None:
    """The first ``length`` bytes around the page cache, or None if this file cannot be read so."""
    if not _O_DIRECT:
        return None
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT)
    except OSError:
        return None
    try:
        return _read_aligned(fd, length)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _read_aligned(fd: int, length: int) -> bytes | None:
    """O_DIRECT wants memory, position and length in whole blocks: read whole pages, and cut the tail off afterwards."""
    length = min(length, os.fstat(fd).st_size)
    if length == 0:
        return b""
    page = mmap.PAGESIZE
    size = -(-length // page) * page
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room, memoryview(room) as view:
        filled = 0
        while filled < length:
            start = filled - filled % page  # a short read may have ended inside a page: read that page again
            with view[start:] as rest:
                try:
                    count = os.preadv(fd, [rest], start)
                except OSError as error:
                    if error.errno == errno.EINVAL:
                        return None
                    raise
            if start + count <= filled:
                break
            filled = start + count
        return bytes(view[: min(filled, length)])
