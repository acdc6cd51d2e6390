"""The catalogue: an index of a directory store in SQLite, for queries; never consulted for correctness."""

from __future__ import annotations

from ckptstore.catalogue.index import Catalogue, CatalogueError, Staleness

__all__ = ["Catalogue", "CatalogueError", "Staleness"]
