"""The catalogue: an index of a store in SQLite or PostgreSQL, for queries; never consulted for correctness."""

from __future__ import annotations

from ckptstore.catalogue.errors import CatalogueError
from ckptstore.catalogue.index import Catalogue, Staleness

__all__ = ["Catalogue", "CatalogueError", "Staleness"]
