"""In what condition a closure is: here, damaged, or gone as a retirement says."""

from __future__ import annotations

from ckptstore.collection.facts import Facts
from ckptstore.collection.inventory import Inventory
from ckptstore.collection.lineage import Named, Node
from ckptstore.collection.reach import Reach
from ckptstore.errors import BackendError, CkptStoreError, UnsupportedVersionError
from ckptstore.format.digest import Digest
from ckptstore.objects import Objects
from ckptstore.retirements import was_retired_by_name


class Condition:
    """Answers for one store, from its listing and its documents. To be asked before anything is taken out of the
    inventory.

    Args:
        objects, inventory, named, facts, reach: of the store.
        retire: what somebody named to be retired.
    """

    def __init__(
        self,
        objects: Objects,
        inventory: Inventory,
        named: Named,
        facts: Facts,
        reach: Reach,
        retire: frozenset[Digest],
    ) -> None:
        self._objects = objects
        self._inventory = inventory
        self._named = named
        self._facts = facts
        self._reach = reach
        self._retire = retire
        self._gone: dict[Digest, bool] = {}

    def is_gone(self, node: Node) -> bool:
        """Whether a closure was retired and is not whole any more. A retirement alone says only that it may be gone."""
        root = node.root
        if root not in self._gone:
            retired = root in self._inventory.retired
            self._gone[root] = retired and self._may_be_gone(root) and not self.is_readable(node)
        return self._gone[root]

    def is_verified(self, node: Node) -> bool:
        """Whether a receipt says that all of it was read back here, and it has all its shards."""
        return self.has_all_shards(node) and self._facts.is_verified(node.root)

    def has_all_shards(self, node: Node) -> bool:
        """Whether the documents of all shards are here."""
        return all(self._inventory.has_document(shard) for shard in node.shards)

    def is_readable(self, node: Node) -> bool:
        """Whether all documents that are to be kept of a checkpoint can be read.

        Raises:
            BackendError: the storage does not say.
        """
        shards = self._named.pinned_shards(node.root) if node.root in self._named.pins else None
        wanted = [digest for index, digest in enumerate(node.shards) if shards is None or index in shards]
        if not all(self._inventory.has_document(digest) for digest in wanted):
            return False
        try:
            self._reach.check_checkpoint(node, shards, files=not self._facts.without_files(node.root))
        except UnsupportedVersionError:
            return True  # somebody can read it, if not we: it is a problem if it is to be kept, and not gone
        except CkptStoreError as error:
            if isinstance(error, BackendError):
                raise
            return False
        return True

    def was_let_go(self, root: Digest) -> bool:
        """Whether somebody named it to be retired, now or in a collection before."""
        return root in self._retire or (
            root in self._inventory.retired and was_retired_by_name(self._objects.backend, root)
        )

    def _may_be_gone(self, root: Digest) -> bool:
        """Whether it is as it should be that a closure with a retirement cannot be read.

        A retirement that came with history says nothing against a ref or a pin; only one by name does.
        """
        named = root in self._named.heads or root in self._named.pins
        return not named or self.was_let_go(root)
