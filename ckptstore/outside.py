"""Outside: nothing that writes ordinary files writes them into a store."""

from __future__ import annotations

import os
from pathlib import Path

from ckptstore.errors import RefusedError
from ckptstore.format.keys import STORE_KEY


def require_outside(target: str | os.PathLike[str]) -> None:
    """RefusedError if ``target``, with every link on the way followed, is a store's directory or lies in one.

    Nothing else may lie among a store's keys: a collection refuses to delete beside it, and a scrub reports it.
    """
    real = Path(os.path.realpath(target))
    for folder in (real, *real.parents):
        if os.path.isfile(folder / STORE_KEY):
            why = f"it lies in the store {folder}, which holds nothing but its own keys"
            raise RefusedError(f"writing {os.fspath(target)}", why, "choose a place outside of every store")
