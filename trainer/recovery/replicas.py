"""Peer replicas: each host keeps the last committed shard of the one before it, so that one loss needs no download.

A replica is a copy in the peer's own store, under the digests that it has everywhere. It is read back when it is made
and again when it is used, and whatever is not there or not right comes from the operator's store as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import ckptstore
from ckptstore import ShardReceipt
from trainer.workers.hosts import Host


def holder(shard: int, shards: int) -> int:
    """The shard whose host keeps the replica of ``shard``."""
    return (shard + 1) % shards


def replicate(hosts: Sequence[Host], receipts: Sequence[str]) -> tuple[int, ...]:
    """Copy each host's shard to the store of its peer, and read it back there; returns the bytes sent, by shard.

    Args:
        hosts: by shard, at least two.
        receipts: of the saved shards, by shard.

    Raises:
        CkptStoreError: a store fails.
    """
    return tuple(
        fetch(receipt, hosts[shard], hosts[holder(shard, len(hosts))]) for shard, receipt in enumerate(receipts)
    )


def fetch(receipt: str, source: Host, target: Host) -> int:
    """Copy the shard of a receipt from one host's store to another's, and read it back there; returns the bytes sent.

    Raises:
        CorruptError, NotFoundError: the source has not what the receipt names.
        CkptStoreError: a store fails.
    """
    parsed = ShardReceipt.parse(receipt.encode())
    return ckptstore.push_shard(ckptstore.open(source.store), ckptstore.open(target.store), parsed).sent_bytes
