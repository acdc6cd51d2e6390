"""A checkpoint in a bucket gets other shards: the same root as in a directory, and each object is fetched once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import ckptstore
from tests.support.training import commit_state, seed_everything


def test_in_a_bucket_it_ends_in_the_root_of_a_directory_and_reads_each_object_once(url: str, tmp_path: Path) -> None:
    roots = []
    for place in (url, tmp_path / "store"):
        store = ckptstore.open(place, create=True)
        seed_everything()
        torch.manual_seed(0)
        states = [ckptstore.TrainingState(model=nn.ModuleDict({name: nn.Linear(300, 300)})) for name in "ab"]
        old = commit_state(store, "main", states, 1)
        there = ckptstore.open(place)
        before = there.traffic
        one = [f"{name}.{kind}" for name in "ab" for kind in ("weight", "bias")]
        done = ckptstore.repartition(there, old, [one], ref="main")
        roots.append(done.root)
        assert (done.rewritten, done.chunks) == (0, 2)
        assert done.read_bytes == 2 * 4 * 300 * (300 + 1)
        if before is not None:
            after = there.traffic
            assert after is not None
            # The pack of the biases and the documents are read back besides, before the ref moves.
            assert after.received_bytes - before.received_bytes < 1.5 * done.read_bytes
            assert len(there.readbacks(done.root)) == 1
        assert ckptstore.open(place).verify("main").ok
    assert roots[0] == roots[1]
