"""Replicas on peers: the bytes of a shard are on another host, and a wrong one is refused by its digest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import ShardReceipt, TrainingState
from ckptstore.errors import CkptStoreError
from ckptstore.format.keys import object_key
from trainer.recovery.replicas import fetch, holder, replicate
from trainer.workers.hosts import Host


def hosts_with_shards(area: Path) -> tuple[list[Host], list[str], list[bytes]]:
    """Three hosts, each with a shard saved in its store; the receipts, and the bytes of the tensor of each."""
    hosts, receipts, held = [], [], []
    attempt = ckptstore.open(area / "operator", create=True).begin("run")
    for shard in range(3):
        host = Host(area, f"host-{shard}")
        weight = nn.ParameterDict({str(shard): nn.Parameter(torch.full((300, 300), float(shard)))})
        store = ckptstore.open(host.store, create=True)
        receipt = store.save_shard(TrainingState(model=weight), attempt, step=1, index=shard, count=3)
        hosts.append(host)
        receipts.append(receipt.encode().decode())
        held.append(weight[str(shard)].detach().numpy().tobytes())
    return hosts, receipts, held


def test_each_shard_is_on_one_other_host_and_a_spare_has_it_from_there(tmp_path: Path) -> None:
    hosts, receipts, held = hosts_with_shards(tmp_path)
    assert sorted(holder(shard, 3) for shard in range(3)) == [0, 1, 2]
    assert all(sent > len(data) for sent, data in zip(replicate(hosts, receipts), held, strict=True))
    assert replicate(hosts, receipts) == (0, 0, 0)
    hosts[1].clear()
    spare = Host(tmp_path, "host-3")
    ckptstore.open(spare.store, create=True)
    assert fetch(receipts[1], hosts[holder(1, 3)], spare) > len(held[1])
    (spare_object,) = [path for path in (spare.store / "objects").rglob("*") if path.is_file()]
    assert spare_object.read_bytes() == held[1]


def test_a_replica_that_is_not_what_it_should_be_is_not_handed_out(tmp_path: Path) -> None:
    hosts, receipts, held = hosts_with_shards(tmp_path)
    replicate(hosts, receipts)
    peer = hosts[holder(1, 3)]
    path = peer.store / object_key(ckptstore.Digest.of(held[1]))
    path.chmod(0o644)
    path.write_bytes(b"\1" + held[1][1:])
    spare = Host(tmp_path, "host-3")
    ckptstore.open(spare.store, create=True)
    with pytest.raises(CkptStoreError):
        fetch(receipts[1], peer, spare)
    assert ShardReceipt.parse(receipts[1].encode()).index == 1
    assert not [path for path in (spare.store / "objects").rglob("*") if path.is_file()]
