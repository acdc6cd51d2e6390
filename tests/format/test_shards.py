"""Shard documents: every list in one order, and nothing in it twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptstore.errors import MalformedError
from ckptstore.format.digest import Digest
from ckptstore.format.page import BUFFER, WEIGHT
from ckptstore.format.shard import Alias, Group, Optimizer, PageRef, RngEntry, RolePacks, Shard
from ckptstore.format.values import EntryRef, to_json

A, B = Digest.of(b"a"), Digest.of(b"b")
EMPTY = to_json({})
SHARD = Shard(
    index=0,
    count=2,
    pages=(PageRef(A, 3, BUFFER, "z"), PageRef(B, 1, WEIGHT, "a")),
    packs=(RolePacks(BUFFER, (A,)), RolePacks(WEIGHT, (A, B))),
    rng=(RngEntry("python", EMPTY), RngEntry("torch.cpu", EMPTY)),
    optimizers=(Optimizer("a", "t", (Group(EMPTY, EMPTY),)), Optimizer("b", "t", ())),
    aliases=(Alias("b", "a"), Alias("c", "a")),
)


@pytest.mark.parametrize("name", ["pages", "packs", "rng", "optimizers", "aliases"])
def test_every_list_is_sorted_without_repetition(name: str) -> None:
    """F-51, F-62, F-63, F-64, F-67."""
    assert Shard.parse(SHARD.encode()) == SHARD
    first, second = getattr(SHARD, name)
    for items in ((second, first), (first, first)):
        with pytest.raises(MalformedError, match="sorted"):
            Shard.parse(replace(SHARD, **{name: items}).encode())
    assert Shard.parse(replace(SHARD, **{name: ()}).encode())  # type: ignore[truthy-bool]


def test_a_role_without_packs_is_not_listed() -> None:
    """F-62."""
    with pytest.raises(MalformedError, match="without packs"):
        Shard.parse(replace(SHARD, packs=(RolePacks(WEIGHT, ()),)).encode())


@pytest.mark.parametrize(("path", "owner"), [("a", "a"), ("a", "b"), ("\uffff", "\U00010000"), ("", "")])
def test_the_bytewise_smallest_path_owns(path: str, owner: str) -> None:
    """F-67: in UTF-8, whatever the order of UTF-16 is."""
    with pytest.raises(MalformedError, match="smallest"):
        Shard.parse(replace(SHARD, aliases=(Alias(path, owner),)).encode())


@pytest.mark.parametrize(("index", "count"), [(2, 2), (3, 2), (0, 0)])
def test_a_shard_is_one_of_its_count(index: int, count: int) -> None:
    """F-60."""
    with pytest.raises(MalformedError):
        Shard.parse(replace(SHARD, index=index, count=count).encode())


@pytest.mark.parametrize("part", ["hyper", "selectors"])
def test_values_of_a_group_are_plain_dicts(part: str) -> None:
    """F-44, F-65."""
    for wrong in (to_json([]), to_json(None), to_json({"a": EntryRef(("b",))})):
        group = replace(Group(EMPTY, EMPTY), **{part: wrong})
        with pytest.raises(MalformedError):
            Shard.parse(replace(SHARD, optimizers=(Optimizer("a", "t", (group,)),)).encode())


def test_the_state_of_a_generator_refers_to_no_entry() -> None:
    """F-44, F-63."""
    with pytest.raises(MalformedError, match="entry"):
        Shard.parse(replace(SHARD, rng=(RngEntry("g", to_json((EntryRef(("b",)),))),)).encode())
