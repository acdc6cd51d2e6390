"""The store at the other end of a push or a pull."""

from __future__ import annotations

import ckptstore
from ckptstore import Store
from ckptstore.errors import UsageError

from . import output


def other_store(here: Store, name: str | None, *, create: bool = False) -> Store:
    """The remote or the URL that was given, else the only remote that ``here`` knows."""
    if name is None:
        remotes = ckptstore.known_remotes(here)
        if len(remotes) != 1:
            why = f"none was given, and {here.url} knows {output.count(len(remotes), 'remote')}"
            raise UsageError("the other store", why, f"give a URL or a remote: {', '.join(remotes) or 'none is known'}")
        (name,) = remotes
    return ckptstore.open_remote(here, name, create=create)
