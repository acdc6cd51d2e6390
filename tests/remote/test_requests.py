"""What moving a checkpoint costs in requests, as exact numbers; and a plan says the same before anything is done."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest
from ckptstore.backends.s3.address import S3Address
from ckptstore.backends.s3.backend import S3Backend
from ckptstore.backends.traffic import Traffic
from ckptstore.store import Store
from tests.support.faultanswers import PageSize
from tests.support.faultproxy import FaultProxy
from tests.support.training import commit_state


def states(layers: int, changed: int = 0) -> list[ckptstore.TrainingState]:
    """Two shards; in each, every weight is an object and all biases are one. ``changed`` weights of the first have
    other values."""
    torch.manual_seed(0)
    found = []
    for name in ("first", "second"):
        module = nn.ModuleDict({f"{name}{index}": nn.Linear(300, 300) for index in range(layers)})
        with torch.no_grad():
            for index in range(changed if name == "first" else 0):
                module[f"{name}{index}"].weight.add_(1.0)
        found.append(ckptstore.TrainingState(model=module))
    return found


@pytest.fixture
def store() -> Store:
    return ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)


@pytest.fixture
def far(url: str) -> str:
    """The URL of an empty store in a bucket."""
    ckptstore.open(url, create=True)
    return url


def traffic(store: Store) -> Traffic:
    found = store.traffic
    assert found is not None
    return found


def planned_and_done(
    store: Store, far: str, root: Digest, ref: str | None = "main", shards: tuple[int, ...] | None = None
) -> Traffic:
    """Plan a push, push, and return what it took, which must be what was planned."""
    plan = ckptstore.plan_push(store, ckptstore.open(far), root, ref=ref, shards=shards)
    target = ckptstore.open(far)
    before = traffic(target)
    done = ckptstore.push(store, target, root, ref=ref, shards=shards)
    taken = traffic(target).since(before)
    assert plan.target == taken
    assert plan.source.total == 0
    assert (plan.sent_keys, plan.sent_bytes) == (done.sent_keys, done.sent_bytes)
    assert (plan.present_keys, plan.present_bytes) == (done.present_keys, done.present_bytes)
    return taken


def together(*parts: Mapping[str, int]) -> dict[str, int]:
    names = {name for part in parts for name in part}
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


LEASE = {"HeadObject": 2, "PutObject": 1, "ListObjectsV2": 1, "DeleteObject": 1}
"""Is the store there; the lease; is there a collection; at the end, is the lease there, and its deletion."""

LOOK = {"GetObject": 1, "ListObjectsV2": 2}
"""The store's id; which objects and which documents may be there."""

RECEIPT = {"PutObject": 1}

HEAD = {"ListObjectsV2": 1, "GetObject": 1}
"""The generations of a ref, and that there is none after the last that the listing shows."""

MOVE = {"GetObject": 2, "ListObjectsV2": 1, "HeadObject": 1, "PutObject": 1}
"""The store's header, and what was recorded of its endpoint, once in each process; whether the lease is still there;
the new generation."""

FIRST = {"HeadObject": 1}
"""Whether the lease still was there, when there was no generation before that could have been fenced."""

RECORD = {"GetObject": 1}
"""The record of a ref's head, where there is one."""


def test_a_new_object_costs_one_put_and_one_get_and_a_push_little_more(store: Store, far: str) -> None:
    root = commit_state(store, "main", states(4), 1)
    closure = store.closure(root)
    assert (len(closure.shards), len(closure.objects), len(closure.documents)) == (2, 10, 5)
    taken = planned_and_done(store, far, root)
    assert taken.requests == together(LEASE, LOOK, {"PutObject": 15, "GetObject": 15}, RECEIPT, HEAD, MOVE, FIRST)
    assert taken.requests == {
        "DeleteObject": 1,
        "GetObject": 19,
        "HeadObject": 4,
        "ListObjectsV2": 5,
        "PutObject": 18,
    }
    size = sum(size for _, size in closure.sizes())
    assert size < taken.sent_bytes < size + 4096
    assert size < taken.received_bytes < size + 4096


def test_an_object_that_is_there_costs_one_get(store: Store, far: str) -> None:
    root = commit_state(store, "main", states(4), 1)
    ckptstore.push(store, ckptstore.open(far), root, ref="main")
    taken = planned_and_done(store, far, root)
    assert taken.requests == together(LEASE, LOOK, {"GetObject": 15}, RECEIPT, HEAD, RECORD)


def test_where_little_has_changed_little_is_sent(store: Store, far: str) -> None:
    """Of 40 weights 2 are others: 5 %."""
    first = commit_state(store, "main", states(20), 1)
    ckptstore.push(store, ckptstore.open(far), first, ref="main")
    second = commit_state(store, "main", states(20, changed=2), 2)
    before, after = (dict(store.closure(root).sizes()) for root in (first, second))
    changed = {key: size for key, size in after.items() if key not in before}
    assert len(changed) == 2 + 3  # weights; page, shard and checkpoint
    taken = planned_and_done(store, far, second)
    history = {"GetObject": 1}  # the parent is read, and was not retired
    keys = {"PutObject": len(changed), "GetObject": len(after)}
    assert taken.requests == together(LEASE, LOOK, keys, history, RECEIPT, HEAD, RECORD, MOVE)
    assert sum(changed.values()) < taken.sent_bytes < sum(changed.values()) + 4096


def test_an_ancestor_that_is_new_there_costs_two_puts_and_a_get(store: Store, far: str) -> None:
    commit_state(store, "main", states(1), 1)
    commit_state(store, "main", states(1, changed=1), 2)
    root = commit_state(store, "main", states(1), 3)
    keys = len(store.closure(root).sizes())
    taken = planned_and_done(store, far, root)
    new = {"PutObject": keys, "GetObject": keys}
    ancestors = {"PutObject": 2 * 2, "GetObject": 2}
    retired = {"ListObjectsV2": 1}  # which of them are said to be gone
    assert taken.requests == together(LEASE, LOOK, retired, ancestors, new, RECEIPT, HEAD, MOVE, FIRST)


def test_some_shards_cost_a_pin_more(store: Store, far: str) -> None:
    root = commit_state(store, "main", states(1), 1)
    keys = len(store.closure(root, [1]).sizes())
    taken = planned_and_done(store, far, root, ref=None, shards=(1,))
    new = {"PutObject": keys, "GetObject": keys}
    pin = {"PutObject": 1, "HeadObject": 3}  # whether the lease is still there: before it, after it, at the end
    assert taken.requests == together(LEASE, LOOK, pin, new, RECEIPT)


def test_a_pull_reads_each_key_once(store: Store, far: str, tmp_path: Path) -> None:
    commit_state(store, "main", states(1), 1)
    root = commit_state(store, "main", states(2, changed=1), 2)
    ckptstore.push(store, ckptstore.open(far), root)
    near = ckptstore.open(tmp_path / "near", create=True)
    keys = len(store.closure(root).sizes())
    for new in (keys, keys - len(store.closure(root).objects)):  # what is here already is read here, documents there
        plan = ckptstore.plan_pull(ckptstore.open(far), near, root, ref="main")
        source = ckptstore.open(far)
        before = traffic(source)
        done = ckptstore.pull(source, near, root, ref="main")
        taken = traffic(source).since(before)
        assert plan.source == taken
        assert plan.target.total == 0
        assert taken.requests == {"GetObject": new + 1}  # and the parent
        assert taken.sent_bytes == 0
        assert (plan.sent_bytes, plan.present_bytes) == (done.sent_bytes, done.present_bytes)


def test_a_plan_for_a_store_that_is_not_there_yet(store: Store, url: str) -> None:
    root = commit_state(store, "main", states(1), 1)
    plan = ckptstore.plan_push(store, url, root, ref="main")
    target = ckptstore.open(url, create=True)
    before = traffic(target)
    ckptstore.push(store, target, root, ref="main")
    assert plan.target == traffic(target).since(before)


def test_a_plan_changes_nothing(store: Store, far: str) -> None:
    root = commit_state(store, "main", states(1), 1)
    target = ckptstore.open(far)
    before = [stat.key for stat in target.backend.list("")]
    for _ in range(2):
        ckptstore.plan_push(store, target, root, ref="main", max_age=60)
    assert [stat.key for stat in target.backend.list("")] == before
    assert set(traffic(target).requests) <= {"GetObject", "HeadObject", "ListObjectsV2", "ListObjectVersions"}
    assert ckptstore.push(store, target, root, ref="main").sent_keys == len(store.closure(root).sizes())


def test_looking_for_few_among_many_takes_few_listings_whatever_the_pages(url: str, proxy: FaultProxy) -> None:
    """What a listing does not come to may be there."""
    ckptstore.open(url, create=True)
    backend = S3Backend(replace(S3Address.parse(url), endpoint_url=proxy.endpoint, addressing="path"))
    keys = [f"documents/{number:02x}/{Digest.of(bytes([number])).hex}" for number in range(9)]
    for key in keys:
        backend.create(key, b"x")
    absent = f"documents/ff/{'f' * 64}"
    assert backend.present([*keys, absent]) == set(keys)
    proxy.add(PageSize(2), method="GET", path="list-type")
    before = backend.traffic
    assert backend.present([absent]) == {absent}
    assert backend.traffic.since(before).requests == {"ListObjectsV2": 1}
