"""Gather what evidence about checkpoints is made of: documents, receipts and files as they are, names for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.closure import Closure
from ckptstore.evidence import ArchiveInfo, Reference
from ckptstore.evidence.manifest import path_problem
from ckptstore.findings import Place
from ckptstore.format import canonical
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key, document_key, receipt_prefix
from ckptstore.format.records import RECEIPT_LIMIT
from ckptstore.format.tree import Tree
from ckptstore.trees import file_bytes

if TYPE_CHECKING:
    from ckptstore.store import Store

ROOTS = "roots.json"
FILE_LIMIT = 2**20
"""Files of trees up to this many bytes are members, longer ones are named by reference."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Members of an archive by path, and references (key, size, digest) to objects that stay in the store."""

    members: Mapping[str, bytes]
    references: tuple[Reference, ...]


def gather_evidence(store: Store, roots: Sequence[Digest], *, file_limit: int = FILE_LIMIT) -> Gathered:
    """What is to be packed about checkpoints; give it to :func:`ckptstore.evidence.pack`.

    Members are ``roots.json`` (the roots as given), ``documents/…`` and ``receipts/…`` under their keys with their
    exact bytes (closures, checkpoint documents of ancestors, receipts about the roots), and ``trees/<tree>/<path>``
    for files of at most ``file_limit`` bytes. Every object of the closures that is in no such file is a reference.

    Raises:
        CorruptError, NotFoundError, MalformedError: a document or a file is bad or missing.
    """
    members: dict[str, bytes] = {ROOTS: canonical.encode({"roots": [str(root) for root in roots]})}
    references: dict[str, Reference] = {}
    held: set[Digest] = set()
    added: set[Digest] = set()
    for root in dict.fromkeys(roots):
        closure = store.closure(root, store.scope(root))
        for key in (*closure.documents, *(document_key(ancestor) for ancestor, _ in store.history(root))):
            if key not in members:
                members[key] = _document(store, key)
        for stat in store.backend.list(receipt_prefix(root)):
            members[stat.key] = store.backend.get(stat.key, 0, RECEIPT_LIMIT)
        for digest, tree in closure.trees.items():
            if digest not in added:  # checkpoints of one run share its trees
                held |= _add_files(store, digest, tree, file_limit, members)
                added.add(digest)
        references.update(_references(closure))
    left = (references[key] for key in sorted(references) if references[key].digest not in held)
    return Gathered(members, tuple(left))


def misnamed_documents(info: ArchiveInfo) -> list[str]:
    """Members of an archive that stand under the key of a document whose bytes they are not, sorted."""
    wrong = []
    for member in info.members:
        digest = digest_of_key(member.path)
        if digest is not None and digest != member.blake3:
            wrong.append(f"{member.path}: its bytes are {member.blake3}")
    return wrong


def _document(store: Store, key: str) -> bytes:
    digest = digest_of_key(key)
    assert digest is not None
    data = store.objects.document(digest, Place(part=f"document {digest.short}"))
    assert data is not None
    return data


def _add_files(store: Store, digest: Digest, tree: Tree, limit: int, members: dict[str, bytes]) -> set[Digest]:
    """Add the small files of a tree; returns the objects that need no reference for that."""
    held: set[Digest] = set()
    for file in tree.files:
        path = f"trees/{digest.hex}/{file.path}"
        if file.size <= limit and path_problem(path) is None:
            members[path] = b"".join(file_bytes(store.objects, digest, file))
            held.update(file.chunks)
    return held


def _references(closure: Closure) -> dict[str, Reference]:
    return {key: Reference(key, need.length, need.digest) for key, need in closure.objects.items()}
