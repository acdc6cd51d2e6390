"""Files on their way into a directory store: each belongs to one writer, and none outlives its writer for long."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ckptstore.backends.durable import discard, storage_errors, sync, write_temporary
from ckptstore.backends.folders import Folders
from ckptstore.backends.owners import Liveness, Owner, this_process
from ckptstore.backends.protocol import Buffer

TEMPORARIES = "tmp"

_FILE_MODE = 0o444
_STALE_AFTER = 86_400.0  # seconds since the last write; writing one object takes a few


@contextmanager
def temporary(folders: Folders, what: str, data: Buffer, *, mode: int = _FILE_MODE) -> Iterator[tuple[int, str]]:
    """(Descriptor of the temporaries' folder, name) of a new synced and closed file with the bytes ``data``.

    Its name is its owner and a nonce, its mode by default read-only. It is removed at the end, and whatever other names
    it has got stay. What the block itself raises is passed on as it is: it happened elsewhere.

    Raises:
        NoSpaceError, ReadOnlyError, BackendError: ``what`` failed, and the file is gone.
    """
    place = folders.path / TEMPORARIES
    with ExitStack() as stack:
        with storage_errors(what, place, needed=memoryview(data).nbytes):
            fd = stack.enter_context(folders.opened((TEMPORARIES,), make=True))
            name = f"{this_process()}.{secrets.token_hex(8)}"
            write_temporary(what, place / name, (data,), mode=mode, folder_fd=fd)
        try:
            yield fd, name
        finally:
            discard(name, folder_fd=fd)


def write_local(folders: Folders, name: str, data: Buffer, *, mode: int) -> None:
    """Let the local file ``name`` of a store's folder have the bytes ``data``, whole and durable, whatever it had.

    A crash leaves the old bytes or the new ones, and a temporary where the next writer sweeps it up: beside the file it
    would lie among the keys, and be none.

    Raises:
        NoSpaceError, ReadOnlyError, BackendError: it could not be written, and is as it was.
    """
    place = folders.path / name
    what = f"writing {place}"
    with (
        temporary(folders, what, data, mode=mode) as (temporaries, temporary_name),
        storage_errors(what, place, needed=memoryview(data).nbytes),
        folders.opened(()) as top,
    ):
        os.replace(temporary_name, name, src_dir_fd=temporaries, dst_dir_fd=top)
        sync(top)


def remove_stale(folders: Folders) -> tuple[str, ...]:
    """Remove the temporaries of writers that died, and return their names, sorted.

    Those of running processes stay. Where that cannot be told (another host, another boot), a temporary is stale a day
    after its last write. A writer that loses one nevertheless fails, and publishes nothing.

    Raises:
        ReadOnlyError, BackendError: a stale one cannot be removed.
    """
    removed: list[str] = []
    with (
        storage_errors("removing stale temporaries", folders.path / TEMPORARIES, needed=0),
        suppress(FileNotFoundError),  # no temporaries at all
        folders.opened((TEMPORARIES,)) as fd,
    ):
        for name in sorted(os.listdir(fd)):
            with suppress(FileNotFoundError):  # its writer has finished, or somebody else sweeps too
                if _is_stale(fd, name):
                    os.unlink(name, dir_fd=fd)
                    removed.append(name)
    return tuple(removed)


def _is_stale(folder: int, name: str) -> bool:
    owner = Owner.parse(name.rpartition(".")[0])
    if owner is None:
        return False
    match owner.liveness():
        case Liveness.ALIVE:
            return False
        case Liveness.DEAD:
            return True
        case Liveness.UNKNOWN:
            return time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > _STALE_AFTER
