"""What lies among the keys of a directory store and is no regular file: links, pipes, sockets, devices, folders."""

from __future__ import annotations

import os
import stat as modes

from ckptstore.backends.folders import Folders
from ckptstore.backends.protocol import check_key
from ckptstore.errors import UsageError


def foreign_keys(folders: Folders, parts: tuple[str, ...]) -> list[str]:
    """Keys in the folder ``parts``, and not in one below, under which something lies that is no regular file; sorted.

    What has no legal key as its path is left out: nothing can be stored under that.

    Raises OSError, and CorruptError if the folder itself is none.
    """
    try:
        with folders.opened(parts) as folder, os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not modes.S_ISREG(entry.stat(follow_symlinks=False).st_mode)]
    except FileNotFoundError:
        return []
    return sorted(key for key in ("/".join((*parts, name)) for name in names) if _is_key(key))


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except UsageError:
        return False
    return True
