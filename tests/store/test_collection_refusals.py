"""Where something is not understood or cannot be read nothing goes, but for what somebody names."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.backends.memory import MemoryBackend
from ckptstore.collection.collect import collect
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.errors import CkptStoreError, NotFoundError, RefusedError, UsageError
from ckptstore.format.keys import (
    STORE_KEY,
    document_key,
    retired_key,
)
from ckptstore.format.records import Retired
from ckptstore.pinning import pin
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend
from tests.support.lines import aborted, kept, keys, line, planned, rich, saved, store_over, whole
from tests.support.notunderstood import DAMAGE, part

LAST = Policy((KeepLast(1),))


@pytest.fixture(scope="module")
def sound() -> tuple[Store, list[Digest]]:
    """Three checkpoints and an aborted attempt."""
    store = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    roots = line(store, [1, 2, 3])
    aborted(store)
    return store, roots


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_where_something_is_not_understood_or_cannot_be_read_nothing_is_deleted(
    sound: tuple[Store, list[Digest]], damage: Callable[[Store, list[Digest]], str]
) -> None:
    """F-162."""
    store, roots = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True), sound[1]
    for key in keys(sound[0]).keys() - {STORE_KEY}:
        store.backend.create(key, sound[0].backend.get(key))
    named = damage(store, roots)
    before = keys(store)
    for delete in (False, True):
        with pytest.raises(RefusedError) as caught:
            collect(ckptstore.open(store.url) if "features" not in named else store, delete=delete)
        assert "nothing was deleted" in str(caught.value)
        assert named in str(caught.value)
        assert keys(store) == before


def test_all_reasons_are_told_at_once(store: Store) -> None:
    """F-162. B094."""
    roots = line(store, [1, 2, 3])
    chosen = ("unknown prefix", "unreadable pin", "damaged page", "document of an unknown kind", "pin on nothing")
    named = [DAMAGE[name](store, roots) for name in chosen]
    with pytest.raises(RefusedError) as caught:
        planned(store)
    assert all(name in str(caught.value) for name in named)
    assert f"for {len(named)} reasons" in str(caught.value)


@pytest.mark.parametrize("kind", ["tree", "preparation"])
def test_a_missing_tree_is_a_reason_too(store: Store, tmp_path: Path, kind: str) -> None:
    """F-162."""
    root = rich(store, tmp_path)
    part(0, kind, None)(store, [root])
    with pytest.raises(RefusedError, match=root.hex):
        planned(store)


def test_what_is_no_file_is_a_reason_too(disk_store: Store, tmp_path: Path) -> None:
    """F-162: what cannot be listed could be a pin."""
    line(disk_store, [1])
    os.symlink("/etc/hostname", tmp_path / "store" / "refs" / "main" / "0000000000000009")
    with pytest.raises(RefusedError, match="not a regular file"):
        planned(disk_store)


def test_a_store_that_fails_is_a_reason_and_no_proof_of_absence() -> None:
    """An error in reading a retired checkpoint does not make it a gone one."""
    backend = FaultyBackend(MemoryBackend())
    store = store_over(backend)
    roots = line(store, [1, 2])
    backend.create(retired_key(roots[0]), Retired("history only").encode())
    (shard,) = store.checkpoint(roots[0]).shards
    backend.fail("get", ckptstore.errors.BackendError("disk", "input/output error"), prefix=document_key(shard))
    with pytest.raises(CkptStoreError, match="input/output error"):
        planned(store)
    backend.heal()
    assert kept(planned(store)) == set(roots)


# -- by name ----------------------------------------------------------------------------------------------------------


def unreadable(store: Store, root: Digest) -> None:
    part(0, "shard", None)(store, [root])


@pytest.mark.parametrize("how", ["ref", "digest", "hex", "prefix"])
def test_a_head_that_cannot_be_read_goes_by_name(store: Store, how: str) -> None:
    """F-162: and then blocks nothing any more; the newest that can be read stays."""
    roots = line(store, [1, 2, 3])
    unreadable(store, roots[2])
    name = {"ref": "main", "digest": str(roots[2]), "hex": roots[2].hex, "prefix": roots[2].hex[:10]}[how]
    with pytest.raises(RefusedError):
        planned(store, KeepLast(1))
    done = collect(store, LAST, delete=True, retire=[name]).plan
    assert kept(done) == {roots[1]}
    assert (done.retired[0].root, done.retired[0].reason) == (roots[2], "retired by name")
    again = collect(store, LAST, delete=True).plan
    assert (kept(again), again.retired, again.deletions) == ({roots[1]}, (), ())
    assert whole(store, roots[1])


def test_interrupted_while_a_head_goes_by_name_the_next_collection_needs_no_name(store: Store) -> None:
    """F-163."""
    roots = line(store, [1, 2])
    part(1, "page", None)(store, roots)
    plan = planned(store, retire=[roots[1]])
    for item in plan.retired:
        store.backend.create(retired_key(item.root), Retired(item.reason).encode())
    for stat in plan.deletions:
        assert kept(planned(store)) == {roots[0]}
        store.backend.delete(stat.key)
    assert planned(store).deletions == ()


@pytest.mark.parametrize("data", [b"{", None])
def test_interrupted_while_a_head_without_its_document_goes_by_name_neither(store: Store, data: bytes | None) -> None:
    """F-163: damaged, or missing."""
    roots = line(store, [1, 2])
    if data is None:
        store.backend.delete(document_key(roots[1]))
    else:
        store.backend.replace(document_key(roots[1]), data)
    plan = planned(store, retire=[roots[1]])
    for item in plan.retired:
        store.backend.create(retired_key(item.root), Retired(item.reason).encode())
    assert planned(store).deletions == plan.deletions
    collect(store, delete=True)
    assert kept(planned(store)) == {roots[0]}


@pytest.mark.parametrize("data", [b"{", None])
def test_the_document_of_a_retired_ancestor_is_still_needed(store: Store, data: bytes | None) -> None:
    """F-134, F-163: without it nobody knows what lies behind."""
    roots = line(store, [1, 2, 3])
    collect(store, LAST, delete=True)
    if data is None:
        store.backend.delete(document_key(roots[1]))
    else:
        store.backend.replace(document_key(roots[1]), data)
    with pytest.raises(RefusedError, match=f"checkpoint {roots[1]} .an ancestor of {roots[2].short}, head of main"):
        planned(store)


def test_a_retirement_that_came_with_history_says_nothing_against_a_ref(store: Store) -> None:
    """F-163: else damage to a head would be its end, not a thing to repair."""
    roots = line(store, [1, 2])
    store.backend.create(retired_key(roots[1]), Retired("history only: its closure was not transferred").encode())
    unreadable(store, roots[1])
    with pytest.raises(RefusedError, match=f"{roots[1]} .head of main"):
        planned(store)


def test_an_ancestor_whose_document_is_gone_goes_by_its_full_digest(store: Store) -> None:
    roots = line(store, [1, 2, 3])
    store.backend.delete(document_key(roots[1]))
    with pytest.raises(RefusedError, match=str(roots[1])):
        planned(store)
    done = collect(store, delete=True, retire=[roots[1].hex]).plan
    assert kept(done) == {roots[0], roots[2]}  # a record of the ref still leads to the first
    report = store.verify("main")
    assert report.ok
    assert [(ancestor.root, ancestor.status) for ancestor in report.ancestors] == [(roots[1], "retired")]
    assert planned(store).deletions == ()


def test_a_pinned_checkpoint_that_cannot_be_read_goes_by_name(store: Store) -> None:
    roots = line(store, [1, 2])
    pin(store, roots[0])
    unreadable(store, roots[0])
    with pytest.raises(RefusedError, match="pinned"):
        planned(store, KeepLast(1))
    collect(store, LAST, delete=True, retire=[roots[0]])
    assert kept(planned(store)) == {roots[1]}


def test_a_damaged_document_that_nothing_names_goes_by_name(store: Store) -> None:
    line(store, [1])
    digest = Digest.of(b"something else")
    DAMAGE["damaged document that nothing names"](store, [])
    done = collect(store, delete=True, retire=[digest.hex[:8]]).plan
    assert document_key(digest) in {stat.key for stat in done.deletions}
    assert planned(store).deletions == ()


def test_what_can_be_read_and_is_needed_does_not_go_by_name(store: Store) -> None:
    roots = [*line(store, [1, 2, 3]), saved(store, 4, verified=False)]
    pin(store, roots[0])
    for root, why in ((roots[0], "pinned"), (roots[2], "the newest verified of main"), (roots[3], "head of main")):
        with pytest.raises(RefusedError, match=f"{root} is not retired by name: it can be read, and is {why}"):
            planned(store, retire=[root])
    done = collect(store, delete=True, retire=[roots[1]]).plan
    assert kept(done) == {roots[0], roots[2], roots[3]}


def test_names_that_mean_nothing_or_too_much_are_refused(store: Store) -> None:
    line(store, [1])
    for name, error in (
        ("nothing", NotFoundError),
        ("b3:abc", UsageError),
        ("b3:xyz", UsageError),
        ("f" * 12, NotFoundError),
    ):
        with pytest.raises(error):
            planned(store, retire=[name])
    with pytest.raises(RefusedError, match="there is nothing of that name"):
        planned(store, retire=["ab" * 32])
    for text in (b"1", b"2"):  # two documents whose digests begin alike
        store.backend.create(f"documents/ab/abcdef{text.hex() * 29}", b"{}")
    with pytest.raises(UsageError, match="fits 2 documents"):
        planned(store, retire=["abcdef"])
