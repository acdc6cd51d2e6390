"""Merkle trees of RFC 6962 shape over BLAKE3 ``derive_key`` contexts (F-20 to F-22).

Leaf, node and root live in contexts of their own and the root binds what the tree is about and how many leaves it has,
so no leaf list can pose as another, no inner node as a leaf, and no stored file as a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest, derive


@dataclass(frozen=True, slots=True)
class MerkleTree:
    """A family of trees, told apart by ``subject`` ("tensor", "state", "rng")."""

    subject: str

    def leaf(self, data: bytes) -> bytes:
        """Hash of one leaf's bytes."""
        return derive(f"ckptstore 1 {self.subject} leaf", data)

    def node(self, left: bytes, right: bytes) -> bytes:
        """Hash of an inner node."""
        return derive(f"ckptstore 1 {self.subject} node", left, right)

    def head(self, leaves: Sequence[bytes]) -> bytes:
        """Tree hash over hashed ``leaves``: split at the largest power of two below the count; no leaf: node of
        nothing.

        Computed level by level; an odd last node moves up unchanged, which is the RFC 6962 shape.
        """
        if not leaves:
            return derive(f"ckptstore 1 {self.subject} node")
        level = list(leaves)
        while len(level) > 1:
            paired = [self.node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
            level = paired + level[len(paired) * 2 :]
        return level[0]

    def root(self, leaves: Sequence[bytes], bound: dict[str, Json]) -> Digest:
        """Root over the data of ``leaves``, binding ``bound`` and the number of leaves."""
        head = self.head([self.leaf(data) for data in leaves])
        return self.seal(canonical.encode({**bound, "count": len(leaves), "tree": head.hex()}))

    def seal(self, statement: bytes) -> Digest:
        """Root of the tree that ``statement`` describes."""
        return Digest(derive(f"ckptstore 1 {self.subject} root", statement))
