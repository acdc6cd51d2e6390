"""Merkle trees: no list of leaves poses as another, no node as a leaf, nothing stored as a node."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.format import canonical
from ckptstore.format.digest import Digest, derive
from ckptstore.format.merkle import MerkleTree
from tests.format.strategies import patient

STATE = MerkleTree("state")
A, B, C, D = b"a", b"b", b"c", b"d"


def recursive_head(tree: MerkleTree, leaves: list[bytes]) -> bytes:
    """The head as RFC 6962 defines it, from the top down."""
    if not leaves:
        return derive(f"ckptstore 1 {tree.subject} node")
    if len(leaves) == 1:
        return derive(f"ckptstore 1 {tree.subject} leaf", leaves[0])
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    halves = recursive_head(tree, leaves[:k]) + recursive_head(tree, leaves[k:])
    return derive(f"ckptstore 1 {tree.subject} node", halves)


@given(st.lists(st.binary(max_size=8), max_size=40))
@settings(patient, max_examples=100)
def test_the_head_has_the_shape_of_rfc_6962(leaves: list[bytes]) -> None:
    """F-20, F-21."""
    assert STATE.head([STATE.leaf(leaf) for leaf in leaves]) == recursive_head(STATE, leaves)


def test_the_root_binds_what_the_tree_is_about_and_its_count() -> None:
    """F-22."""
    head = recursive_head(STATE, [A, B, C]).hex()
    statement = canonical.encode({"count": 3, "tree": head, "shards": 2})
    assert STATE.root([A, B, C], {"shards": 2}) == Digest(derive("ckptstore 1 state root", statement))
    assert len({STATE.root([A, B, C], bound) for bound in ({}, {"shards": 2}, {"shards": 3})}) == 3  # type: ignore[arg-type]


def test_no_list_of_leaves_gives_the_root_of_another() -> None:
    """F-21 (B049, bernstein#1854, raijin#21, ginger-lib#110): padding, order, joined hashes, one leaf, none."""
    ha, hb, hc = (STATE.leaf(leaf) for leaf in (A, B, C))
    ab = STATE.node(ha, hb)
    lists: list[list[bytes]] = [
        [],
        [b""],
        [A],
        [A, A],
        [A, B],
        [B, A],
        [A, B, C],
        [A, B, C, C],
        [A, B, C, D],
        [A, C, B],
        [A + B, C],
        [A, B + C],
        [ha],
        [ha + hb],
        [ab],
        [ab, hc],
        [ha, hb, hc],
        [ha + hb, C],
        [STATE.head([ha, hb, hc])],
    ]
    roots = {STATE.root(leaves, {}) for leaves in lists}
    heads = {STATE.head([STATE.leaf(leaf) for leaf in leaves]) for leaves in lists}
    assert len(roots) == len(lists)
    assert len(heads) == len(lists)
    assert not {root.raw for root in roots} & heads


def test_a_single_leaf_is_hashed() -> None:
    """F-20 (B049)."""
    raw = Digest.of(b"chunk").raw
    assert STATE.head([STATE.leaf(raw)]) != raw
    assert STATE.root([raw], {}).raw not in (raw, STATE.leaf(raw))


def test_contexts_of_subjects_and_kinds_of_nodes_are_apart() -> None:
    """F-11."""
    trees = [MerkleTree(subject) for subject in ("tensor", "state", "rng")]
    data = bytes(64)
    hashes = [h for tree in trees for h in (tree.leaf(data), tree.node(data[:32], data[32:]), tree.root([], {}).raw)]
    assert len(set(hashes)) == len(hashes)
    assert Digest.of(data).raw not in hashes


def test_no_stored_bytes_have_the_digest_of_a_node() -> None:
    """F-10, F-11 (B049): the very bytes that were hashed for a node have another plain digest."""
    leaves = [A, B]
    head = STATE.head([STATE.leaf(leaf) for leaf in leaves])
    inputs = [A, STATE.leaf(A) + STATE.leaf(B), canonical.encode({"count": 2, "tree": head.hex()})]
    derived = {STATE.leaf(A), head, STATE.root(leaves, {}).raw}
    assert not {Digest.of(data).raw for data in inputs} & derived


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 64, 65])
def test_each_leaf_and_the_count_matter(count: int) -> None:
    """F-22."""
    leaves = [bytes([number]) for number in range(count)]
    root = STATE.root(leaves, {})
    others = [STATE.root([*leaves[:n], b"other", *leaves[n + 1 :]], {}) for n in range(count)]
    others += [STATE.root([*leaves[:n], *leaves[n + 1 :]], {}) for n in range(count)]
    others += [STATE.root([*leaves, leaf], {}) for leaf in [*leaves[-1:], b""]]
    assert root not in others
