"""Temporaries beside an ordinary file or folder that is being written: each says whose it is.

A process that is killed leaves them, and they can be as large as what it wrote. Whoever writes beside them next removes
those whose writer is proven dead, and no other file.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from ckptstore.backends.owners import Liveness, Owner, this_process

_NAME = re.compile(r"\.([0-9a-f-]+)\.[0-9a-f]{32}\.tmp")


def temporary_beside(target: Path) -> Path:
    """A new name in the folder of ``target`` for what will get its name when it is whole."""
    return target.with_name(f".{this_process()}.{secrets.token_hex(16)}.tmp")


def remove_stale(folder: Path) -> None:
    """Remove what writers that died left in ``folder``. What cannot be removed, or is not proven stale, stays."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            owner = Owner.parse(match[1]) if match else None
            if owner is None or owner.liveness() is not Liveness.DEAD:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(entry.path)
