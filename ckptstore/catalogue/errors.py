"""The one error of the catalogue, and what to do next."""

from __future__ import annotations

from typing import ClassVar

from ckptstore.errors import CkptStoreError

REBUILD = "run ckpt catalogue rebuild; the store itself is not affected"
AGAIN = "try again when the other process is done; the store itself is not affected"


class CatalogueError(CkptStoreError):
    """The catalogue cannot be used. The store can."""

    code: ClassVar[str] = "catalogue"
