"""Remotes in buckets, and the ledger of what is there, against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import RefusedError
from ckptstore.readbacks.durability import ledger
from ckptstore.remotes import add_remote, known_remotes, open_remote, remotes_of
from ckptstore.store import Store
from tests.support.s3 import SharedServer
from tests.support.training import commit_state


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with one checkpoint that nobody has read back."""
    made = ckptstore.open(tmp_path / "store", create=True)
    torch.manual_seed(0)
    commit_state(made, "main", [ckptstore.TrainingState(model=nn.Linear(300, 300))], 1)
    return made


@pytest.fixture
def bucket(s3: SharedServer) -> Store:
    return ckptstore.open(s3.url(**s3.url_options), create=True)


def test_a_bucket_is_known_by_name_and_its_copy_counts_without_asking_it(store: Store, bucket: Store) -> None:
    kept = add_remote(store, "bucket", bucket.url)
    assert known_remotes(store) == {"bucket": kept}
    root = store.resolve("main")
    done = ckptstore.push(store, open_remote(store, "bucket"), root, ref="main")
    assert done.receipt.method == "server-read"
    found = ledger(store)
    assert found.roots[0].verified(found.at) == 1
    assert [(holder.name, holder.url) for holder in found.holders[1:]] == [("bucket", bucket.url)]


def test_asking_a_bucket_takes_few_requests(store: Store, bucket: Store) -> None:
    root = store.resolve("main")
    ckptstore.push(store, bucket, root)
    add_remote(store, "bucket", bucket.url)
    bucket.add_receipt(bucket.verify(root).receipt(bucket.url))
    remote = open_remote(store, "bucket")
    assert remote.traffic is not None
    before = remote.traffic
    found = ledger(store, ask={"bucket": remote})
    asked = remote.traffic.since(before).requests
    assert [receipt.operation for receipt in found.learned] == ["verify"]
    assert found.roots[0].verified(found.at) == 1
    # the header and two receipts; the receipts' listing, and hints of what is there
    assert asked.get("GetObject") == 3
    assert sum(asked.values()) <= 3 + 1 + len(found.roots[0].keys)
    assert set(asked) <= {"GetObject", "ListObjectsV2", "HeadObject"}


def test_an_object_that_the_bucket_has_lost_is_no_copy(store: Store, bucket: Store) -> None:
    root = store.resolve("main")
    ckptstore.push(store, bucket, root)
    add_remote(store, "bucket", bucket.url)
    bucket.backend.delete(max(store.closure(root).objects))
    assert (found := ledger(store)).roots[0].verified(found.at) == 1
    assert (found := ledger(store, ask={"bucket": open_remote(store, "bucket")})).roots[0].lacking(1, found.at) == 1


def test_a_bucket_has_a_ledger_and_keeps_no_remotes(store: Store, bucket: Store) -> None:
    root = store.resolve("main")
    ckptstore.push(store, bucket, root, ref="main")
    found = ledger(ckptstore.open(bucket.url))
    assert found.roots[0].verified(found.at) == 1
    assert found.holders[0].here
    assert remotes_of(bucket) == {}
    with pytest.raises(RefusedError, match="only a store in a directory keeps remotes"):
        known_remotes(bucket)
