"""What a store is there for: the checkpoints that refs name and pins keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.errors import CkptStoreError, CorruptError, MalformedError, NotFoundError
from ckptstore.format import canonical
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import document_key

if TYPE_CHECKING:
    from ckptstore.store import Store


@dataclass(frozen=True, slots=True)
class Kept:
    """Checkpoints that are kept.

    Args:
        heads: by ref, the root that it names now.
        pinned: roots that have a pin, sorted; also such as are not there.
        parts: other documents that have a pin (a tree, a preparation, a shard), sorted.
        faults: refs and pins of which that cannot be said.
    """

    heads: dict[str, Digest]
    pinned: tuple[Digest, ...]
    parts: tuple[Digest, ...] = ()
    faults: tuple[CkptStoreError, ...] = ()

    @property
    def names(self) -> tuple[str | Digest, ...]:
        """Refs, then pinned roots."""
        return (*self.heads, *self.pinned)


def kept_checkpoints(store: Store) -> Kept:
    """The checkpoints that refs of ``store`` name now and those that it has pins for.

    Raises:
        BackendError: the store cannot be listed.
    """
    heads: dict[str, Digest] = {}
    faults: list[CkptStoreError] = []
    for name in store.refs.names():
        try:
            head = store.head(name)
        except (CorruptError, MalformedError) as error:
            faults.append(error)
            continue
        if head is not None:
            heads[name] = head
    pinned: set[Digest] = set()
    for stat in store.backend.list("pins/"):
        try:
            pinned.add(Digest.parse(stat.key.split("/")[1]))
        except MalformedError:
            faults.append(CorruptError(f"pin {stat.key}", "its key names no checkpoint", "move it out of the store"))
    parts = {digest for digest in pinned if not _may_be_checkpoint(store, digest)}
    return Kept(heads, tuple(sorted(pinned - parts, key=str)), tuple(sorted(parts, key=str)), tuple(faults))


def _may_be_checkpoint(store: Store, digest: Digest) -> bool:
    """Whether it is a checkpoint, or cannot be read, which is a finding for those who read it whole."""
    try:
        kind = canonical.decode(store.backend.get(document_key(digest), 0, DOCUMENT_LIMIT + 1), DOCUMENT_LIMIT)
    except (NotFoundError, CorruptError, MalformedError):
        return True
    return type(kind) is not dict or kind.get("kind") == "checkpoint"
