"""Pins are made of what can be kept, listed, and removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.collection.reach import Reach
from ckptstore.errors import CkptStoreError, NotFoundError, UsageError
from ckptstore.format.keys import document_key
from ckptstore.pinning import list_pins, pin, unpin
from ckptstore.store import Store
from tests.support.lines import line, planned, rich
from tests.support.notunderstood import part, pinned_badly

LAST = Policy((KeepLast(1),))


def test_a_pin_says_what_it_keeps_and_why_until_it_is_removed(store: Store, tmp_path: Path) -> None:
    root = rich(store, tmp_path)
    made = [pin(store, root, reason="paper"), pin(store, root, shards=[1, 0, 1], reason="part")]
    assert made[1].pin.shards == (0, 1)
    assert {item.key for item in list_pins(store)} == {item.key for item in made}
    assert list_pins(store, Digest.of(b"none")) == []
    assert {item.key for item in unpin(store, root)} == {item.key for item in made}
    assert list_pins(store) == []
    with pytest.raises(NotFoundError):
        unpin(store, root)


def test_what_cannot_be_kept_is_not_pinned(store: Store, tmp_path: Path) -> None:
    root = rich(store, tmp_path)
    cases: list[tuple[Callable[[], object], type[CkptStoreError]]] = [
        (lambda: pin(store, Digest.of(b"none")), NotFoundError),
        (lambda: pin(store, root, shards=[2]), UsageError),
        (lambda: pin(store, root, shards=[]), UsageError),
        (lambda: pin(store, root, reason=""), UsageError),
    ]
    for call, error in cases:
        with pytest.raises(error):
            call()
    part(0, "page", None)(store, [root])
    with pytest.raises(NotFoundError):
        pin(ckptstore.open(store.url), root)
    assert list_pins(store) == []
    assert list(store.backend.list("leases/")) == []


def test_trees_and_preparations_can_be_pinned_too(store: Store, tmp_path: Path) -> None:
    """With all that they need: a collection keeps it, and it is what a date would hold."""
    root = rich(store, tmp_path)
    checkpoint = store.checkpoint(root)
    assert checkpoint.files is not None
    assert checkpoint.run is not None
    for digest in (checkpoint.files, checkpoint.run, checkpoint.shards[0]):
        keys = Reach.keys_below(store.objects, digest)
        assert keys[0] == document_key(digest)
        assert set(keys) < {key for key, _ in store.closure(root).sizes()}
        pin(store, digest, reason="part")
    with pytest.raises(UsageError):
        pin(store, checkpoint.files, shards=[0])
    assert {item.root for item in list_pins(store)} == {checkpoint.files, checkpoint.run, checkpoint.shards[0]}
    assert {"pinned: part"} <= {reason for item in planned(store).kept for reason in item.reasons}


def test_a_pin_that_cannot_be_read_can_be_removed(store: Store) -> None:
    root = line(store, [1])[0]
    pinned_badly(store, [root])
    with pytest.raises(CkptStoreError, match="ab" * 16):
        list_pins(store)
    assert len(unpin(store, root)) == 1
    assert planned(store).kept
