"""Hosts get what their shards need, and no more: frozen files, then objects from a peer or from the operator's store.

What a host has already is not fetched again; all of it is read again and checked by its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from ckptstore import Digest, Store
from ckptstore.errors import CkptStoreError
from trainer.lifecycle.access import Access
from trainer.lifecycle.pulling import PullEndedError, pull_on_hosts
from trainer.lifecycle.staging import stage
from trainer.recovery.blame import Blame
from trainer.recovery.entries import Staged
from trainer.recovery.replicas import fetch
from trainer.workers.hosts import Host


class HostLostError(CkptStoreError):
    """A host is in no state to take part: ``blame`` says which shard's, and why. The controller replaces it."""

    def __init__(self, blame: Blame) -> None:
        super().__init__(f"host of shard {', '.join(map(str, blame.shards))}", blame.why)
        self.blame = blame


@dataclass(frozen=True, slots=True)
class Peer:
    """The host that keeps a replica of a shard, and the receipt of that shard."""

    host: Host
    receipt: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where hosts get things from: the frozen ``trees`` and everything else of the ``operator``'s store, which a
    process of a host reaches by ``access``."""

    operator: Store
    trees: Mapping[str, Digest]
    access: Access


def equip(
    source: Source,
    members: Sequence[Host],
    root: Digest | None,
    peers: Mapping[int, Peer],
    name: str,
    *,
    pool: Executor,
    say: Callable[[str], object],
) -> list[Staged]:
    """Bring all hosts, at the same time, what they lack to restore ``root`` and train.

    Args:
        source: where it comes from.
        members: the hosts, by shard.
        root: the checkpoint; None at the very start.
        peers: by shard, who has a replica of it; asked where the host is new.
        name: of the processes that pull, new for each call.
        pool: threads that outlive those processes.
        say: is told, in them, of replicas that are of no use.

    Raises:
        HostLostError: a host cannot be used.
        CkptStoreError: the operator's store does not give what is needed.
    """

    def one(shard: int) -> Staged:
        host = members[shard]
        files = stage(source.operator, source.trees, host, shard)
        if files.refused:
            raise HostLostError(Blame((shard,), "staging", files.refused))
        is_new = files.bytes > 0
        peer = _from_peer(peers[shard], host, say) if is_new and shard in peers else 0
        received, verified = _pull(source, shard, host, root, name)
        return Staged(shard, host.name, root, files.bytes, files.checked_bytes, peer, received, verified)

    return list(pool.map(one, range(len(members))))


def _from_peer(peer: Peer, host: Host, say: Callable[[str], object]) -> int:
    """Bytes that a replica gave. One that is wrong does no harm: what is not there comes from the operator's store."""
    try:
        return fetch(peer.receipt, peer.host, host)
    except (CkptStoreError, OSError) as error:
        say(f"the replica on {peer.host.name} is of no use: {error}")
        return 0


def _pull(source: Source, shard: int, host: Host, root: Digest | None, name: str) -> tuple[int, int]:
    """Bytes of objects that came from the operator's store, and bytes that were read again on the host."""
    if root is None:
        return 0, 0
    try:
        (done,) = pull_on_hosts(source.access, [(host, shard)], [root], name)
    except PullEndedError as error:
        raise HostLostError(Blame((shard,), "process gone", str(error))) from error
    return sum(one.received_bytes for one in done.pulled), sum(one.readback_bytes for one in done.pulled)
