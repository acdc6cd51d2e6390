"""Where the caller says how old a readback may be, what was read under the same version is not read again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

import ckptstore
from ckptstore import Digest, Receipt
from ckptstore.backends.counting import CountingBackend
from ckptstore.errors import UsageError
from ckptstore.format import values
from ckptstore.format.keys import receipt_prefix
from ckptstore.readbacks.readbacks import readback_of
from ckptstore.store import Store
from tests.support.distant import Distant, Keeping, made
from tests.support.pairs import states
from tests.support.training import commit_state

HOUR = 3600


@pytest.fixture
def root(store: Store) -> Digest:
    return commit_state(store, "main", states(), 1)


@pytest.fixture
def keeping() -> Keeping:
    backend = Keeping()
    made(backend)
    return backend


def again(store: Store, keeping: Keeping, root: Digest, max_age: int = HOUR) -> ckptstore.Transfer:
    return ckptstore.push(store, Store(keeping), root, max_age=max_age)


def rewrite(keeping: Keeping, root: Digest, change: Callable[[Receipt], Receipt]) -> None:
    """Put other receipts in place of those about ``root``."""
    store = Store(keeping)
    receipts = store.receipts(root)
    for stat in list(keeping.list(receipt_prefix(root))):
        keeping.delete(stat.key)
    for receipt in receipts:
        store.add_receipt(change(receipt))


def hours_ago(hours: float) -> str:
    return (datetime.now(UTC) - timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_by_default_everything_is_read(store: Store, root: Digest, keeping: Keeping) -> None:
    sizes = store.closure(root).sizes()
    for _ in range(2):
        done = ckptstore.push(store, Store(keeping), root)
        assert done.receipt.bytes_read == sum(size for _, size in sizes)
        details = values.plain_from_json(done.receipt.details)  # type: ignore[arg-type]
        assert isinstance(details, dict)
        assert details["max_age_seconds"] == 0
        assert details["versions"] == [keeping.versions([key])[key] for key, _ in sorted(sizes)]


def test_what_was_read_under_the_same_version_is_accepted(store: Store, root: Digest, keeping: Keeping) -> None:
    again(store, keeping, root)
    done = again(store, keeping, root)
    keys = len(store.closure(root).sizes())
    assert (done.accepted_keys, done.present_keys, done.sent_keys) == (keys, 0, 0)
    assert done.receipt.bytes_read == 0
    assert done.receipt.method == "none"
    assert f"{keys} keys accepted unread" in done.receipt.exceptions[0]
    assert done.notes == ()
    assert [receipt.bytes_read > 0 for receipt in Store(keeping).readbacks(root)] == [True]
    assert len(Store(keeping).receipts(root)) == 2


def test_a_plan_counts_with_it(store: Store, root: Digest, keeping: Keeping) -> None:
    again(store, keeping, root)
    plan = ckptstore.plan_push(store, Store(keeping), root, max_age=HOUR)
    assert plan.accepted_keys == len(store.closure(root).sizes())
    assert ckptstore.plan_push(store, Store(keeping), root).accepted_keys == 0


def test_what_was_accepted_ages_on(store: Store, root: Digest, keeping: Keeping) -> None:
    """A receipt of a push that read nothing says nothing about when it was read."""
    again(store, keeping, root)
    first = Store(keeping).receipts(root)[0]
    second = again(store, keeping, root).receipt
    rewrite(keeping, root, lambda receipt: replace(first, time=hours_ago(2)) if receipt == first else receipt)
    assert second in Store(keeping).receipts(root)
    assert again(store, keeping, root).accepted_keys == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda receipt: replace(receipt, time=hours_ago(1.1)),
        lambda receipt: replace(receipt, time=hours_ago(-1)),
        lambda receipt: replace(receipt, method="cached"),
        lambda receipt: replace(receipt, operation="metrics"),
        lambda receipt: replace(receipt, closure=Digest.of(b"another")),
        lambda receipt: replace(receipt, details=None),
        lambda receipt: replace(receipt, details=_with(receipt, "store", "6" * 32)),
        lambda receipt: replace(receipt, details=_with(receipt, "versions", ["version-1"])),
    ],
    ids=["old", "future", "cached", "no readback", "another closure", "no details", "another store", "too few"],
)
def test_a_receipt_that_does_not_count_changes_nothing(
    store: Store, root: Digest, keeping: Keeping, change: Callable[[Receipt], Receipt]
) -> None:
    again(store, keeping, root)
    rewrite(keeping, root, change)
    done = again(store, keeping, root)
    assert (done.accepted_keys, done.present_keys) == (0, len(store.closure(root).sizes()))


def _with(receipt: Receipt, name: str, value: object) -> values.Json:
    details = values.plain_from_json(receipt.details)  # type: ignore[arg-type]
    assert isinstance(details, dict)
    return values.to_json({**details, name: value})


def test_another_version_is_read(store: Store, root: Digest, keeping: Keeping) -> None:
    again(store, keeping, root)
    key = max(store.closure(root).objects)
    keeping.replace(key, b"wrong")
    done = again(store, keeping, root)
    assert (done.repaired_keys, done.present_keys) == (1, 0)
    assert done.accepted_keys == len(store.closure(root).sizes()) - 1
    assert Store(keeping).verify(root).ok


def test_receipts_about_other_checkpoints_count(store: Store, root: Digest, keeping: Keeping) -> None:
    again(store, keeping, root)
    second = commit_state(store, "main", [states()[0], states(1.0)[1]], 2)
    unrelated = commit_state(store, "other", states(), 7)
    for later in (second, unrelated):
        shared = set(store.closure(root).objects) & set(store.closure(later).objects)
        done = again(store, keeping, later)
        assert done.accepted_keys >= len(shared) > 0
        assert done.accepted_keys + done.sent_keys == len(store.closure(later).sizes())


def test_receipts_of_one_shard_count(store: Store, root: Digest, keeping: Keeping) -> None:
    ckptstore.push(store, Store(keeping), root, shards=[1])
    part = len(store.closure(root, [1]).sizes())
    assert again(store, keeping, root).accepted_keys == part


def test_a_receipt_that_accepted_something_is_still_understood(store: Store, root: Digest, keeping: Keeping) -> None:
    again(store, keeping, root)
    keeping.replace(max(store.closure(root).objects), b"wrong")
    receipt = again(store, keeping, root).receipt
    readback = readback_of(Digest.of(receipt.encode()), receipt, lambda finding: pytest.fail(str(finding)))
    assert readback is not None
    assert readback.read is not None
    assert sum(readback.read) == 1


def test_no_more_receipts_are_read_than_there_are_keys(store: Store, root: Digest, keeping: Keeping) -> None:
    again(store, keeping, root)
    keys = len(store.closure(root).sizes())
    rewrite(keeping, root, lambda receipt: replace(receipt, time=hours_ago(2)))
    for number in range(2 * keys):
        Store(keeping).add_receipt(Receipt("metrics", root, None, 0, 0, 0, "none", hours_ago(1), f"n{number}"))
    counting = CountingBackend(keeping)
    counting.versions = keeping.versions  # type: ignore[attr-defined]
    counting.versions_read = keeping.versions_read  # type: ignore[attr-defined]
    ckptstore.push(store, Store(counting), root, max_age=HOUR)
    assert counting.total("get", prefix="receipts/").calls == keys


def test_without_versions_it_says_that_the_age_changes_nothing(store: Store, root: Digest) -> None:
    class Forgetful(Keeping):
        def versions(self, keys: object) -> dict[str, str]:
            return {}

        def versions_read(self) -> dict[str, str]:
            return {}

    for backend in (Distant(), Forgetful()):
        made(backend)
        assert ckptstore.push(store, Store(backend), root, max_age=HOUR).notes == ()  # all of it was new
        done = ckptstore.push(store, Store(backend), root, max_age=HOUR)
        assert done.present_keys == len(store.closure(root).sizes())
        (note,) = done.notes
        assert "keeps no versions" in note


def test_versions_that_do_not_fit_are_left_out_and_that_is_said(store: Store, root: Digest) -> None:
    class Wordy(Keeping):
        def versions_read(self) -> dict[str, str]:
            return {key: version + "x" * 200_000 for key, version in super().versions_read().items()}

    backend = Wordy()
    made(backend)
    for _ in range(2):
        done = ckptstore.push(store, Store(backend), root, max_age=HOUR)
        assert done.accepted_keys == 0
        assert done.receipt.bytes_read > 0
        assert done.receipt.exceptions == ()
        (note,) = done.notes
        assert "no room for the versions" in note


@pytest.mark.parametrize("age", [-1, 1.5, True, "60"])
def test_an_age_is_a_whole_number_of_seconds(store: Store, root: Digest, keeping: Keeping, age: object) -> None:
    with pytest.raises(UsageError, match="max_age"):
        ckptstore.push(store, Store(keeping), root, max_age=age)  # type: ignore[arg-type]
