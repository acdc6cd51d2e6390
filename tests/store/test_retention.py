"""Which checkpoints a policy keeps, and which survive whatever it says."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import Digest
from ckptstore.collection.collect import collect
from ckptstore.collection.policy import KeepBest, KeepEverySteps, KeepEveryTime, KeepLast, Policy, Rule
from ckptstore.errors import RefusedError, UsageError
from ckptstore.format import values
from ckptstore.format.keys import receipt_prefix
from ckptstore.format.records import Receipt
from ckptstore.pinning import pin
from ckptstore.store import Store
from tests.support.lines import kept, line, planned, read_back, reasons, saved, whole


def chosen(roots: list[Digest], *numbers: int) -> set[Digest]:
    return {roots[number] for number in numbers}


# -- rules ------------------------------------------------------------------------------------------------------------


def test_keep_last_keeps_the_newest_of_each_lineage(store: Store) -> None:
    one, two = line(store, [1, 2, 3, 4], "one"), line(store, [5, 6, 7], "two")
    plan = planned(store, KeepLast(2))
    assert kept(plan) == chosen(one, 2, 3) | chosen(two, 1, 2)
    assert {item.root for item in plan.retired} == chosen(one, 0, 1) | chosen(two, 0)
    assert "one of the last 2 of one" in reasons(plan, one[2])


def test_keep_every_keeps_the_first_at_or_after_each_multiple(store: Store) -> None:
    roots = line(store, [0, 40, 90, 100, 120, 230, 290, 310, 320])
    assert kept(planned(store, KeepEverySteps(100))) == chosen(roots, 0, 3, 5, 7, 8)


def test_keep_every_gives_the_same_after_a_collection(store: Store) -> None:
    line(store, [40, 90, 120, 230, 290, 310, 320])
    first = collect(store, Policy((KeepEverySteps(100),)), delete=True).plan
    again = planned(store, KeepEverySteps(100))
    assert kept(again) == kept(first)
    assert (again.retired, again.deletions) == ((), ())


def test_where_a_lineage_counts_anew_so_does_keep_every(store: Store) -> None:
    """B057: a new run that goes on from an old one begins at step 10 again. Also when that step is retired already."""
    roots = line(store, [90, 100, 1000, 10, 100, 110])
    assert kept(planned(store, KeepEverySteps(100))) == chosen(roots, 1, 2, 4, 5)
    collect(store, Policy((KeepEverySteps(100),)), delete=True)
    assert kept(planned(store, KeepEverySteps(100))) == chosen(roots, 1, 2, 4, 5)


def test_keep_every_time_goes_by_the_oldest_receipt(store: Store) -> None:
    times = ["2026-03-01T00:10:00Z", "2026-03-01T05:00:00Z", "2026-03-01T06:00:00Z", "2026-03-01T11:59:59Z"]
    roots = [saved(store, step, time=time) for step, time in enumerate(times)]
    read_back(store, roots[1], "2026-03-02T00:00:00Z")
    assert kept(planned(store, KeepEveryTime(6 * 3600))) == chosen(roots, 0, 2, 3)
    assert "the first from 2026-03-01T06:00:00Z on" in reasons(planned(store, KeepEveryTime(6 * 3600)), roots[2])


def test_a_checkpoint_of_unknown_time_is_kept_by_keep_every_time(store: Store) -> None:
    roots = [saved(store, 1, verified=False), saved(store, 2, time="2026-03-01T00:10:00Z")]
    roots += [saved(store, 3, time="no time"), saved(store, 4, time="2026-03-01T00:20:00Z")]
    plan = planned(store, KeepEveryTime(6 * 3600))
    assert kept(plan) == chosen(roots, 0, 1, 2, 3)
    assert "no receipt says how old it is" in reasons(plan, roots[0])
    assert "no receipt says how old it is" in reasons(plan, roots[2])


@pytest.mark.parametrize(("mode", "expected"), [("max", (1, 3)), ("min", (0, 4))])
def test_keep_best_keeps_the_greatest_or_the_least(store: Store, mode: str, expected: tuple[int, ...]) -> None:
    found = [saved(store, step, metrics={"loss": loss}) for step, loss in enumerate([0.1, 7, 2.5, 3.0, -1.0, 2.0])]
    assert kept(planned(store, KeepBest(2, "loss", mode))) == chosen(found, *expected, 5)


def test_of_equal_metrics_the_older_stays_so_that_nothing_is_exchanged_for_its_equal(store: Store) -> None:
    """B057: best and last are not swapped."""
    roots = [saved(store, step, metrics={"accuracy": 0.5}) for step in (1, 2, 3)]
    roots.append(saved(store, 4, metrics={"accuracy": 0.4}))
    assert kept(planned(store, KeepBest(1, "accuracy"))) == chosen(roots, 0, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), True, "0.99", None, [1.0], 10**400])
def test_what_is_no_finite_number_never_wins(store: Store, value: object) -> None:
    roots = [saved(store, 1, metrics={"accuracy": 0.1}), saved(store, 2, metrics={"accuracy": value})]
    roots += [saved(store, 3, metrics={"other": 1.0}), saved(store, 4)]
    expected = chosen(roots, 1, 3) if type(value) is int else chosen(roots, 0, 3)
    assert kept(planned(store, KeepBest(1, "accuracy"))) == expected


def test_a_metric_that_nothing_has_lets_nothing_go(store: Store) -> None:
    """A kind of loss: a name with a slip in it, and all but the newest would be deleted."""
    roots = [saved(store, step, metrics={"loss": 1.0 / step}) for step in (1, 2, 3)]
    other = [saved(store, step, "other", value=step, metrics={"val_loss": 1.0}) for step in (7, 8)]
    plan = planned(store, KeepLast(1), KeepBest(1, "val_loss", "min"))
    assert kept(plan) == {*roots, *other}
    assert reasons(plan, roots[0]) == "nobody recorded a number 'val_loss' of main"


def test_the_newest_receipt_of_a_metric_counts(store: Store) -> None:
    roots = [saved(store, 1, metrics={"accuracy": 0.9}), saved(store, 2, metrics={"accuracy": 0.5}), saved(store, 3)]
    details = values.to_json({"accuracy": 0.1})
    told = Receipt("metrics", roots[0], None, 0, 0, 0, "none", "2100-01-01T00:00:00Z", store.url, (), details)
    store.add_receipt(told)
    assert kept(planned(store, KeepBest(1, "accuracy"))) == chosen(roots, 1, 2)


def test_a_checkpoint_whose_metrics_cannot_be_read_is_kept_by_keep_best(store: Store) -> None:
    roots = [saved(store, step, metrics={"accuracy": step / 10}) for step in (1, 2, 3)]
    key = next(s.key for s in store.backend.list(receipt_prefix(roots[0])) if b"metrics" in store.backend.get(s.key))
    store.backend.replace(key, b"{")
    plan = planned(store, KeepBest(1, "accuracy"))
    assert kept(plan) == chosen(roots, 0, 2)
    assert "cannot be read" in reasons(plan, roots[0])


def test_what_any_rule_keeps_is_kept(store: Store) -> None:
    roots = [saved(store, step, metrics={"loss": loss}) for step, loss in ((10, 1), (20, 9), (30, 9), (40, 9), (50, 9))]
    rules = (KeepLast(2), KeepEverySteps(20), KeepBest(1, "loss", "min"))
    plan = planned(store, *rules)
    assert kept(plan) == chosen(roots, 0, 1, 3, 4)
    assert set(reasons(plan, roots[3]).split("; ")) == {
        "one of the last 2 of main",
        "the first from step 40 on of main",
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepLast(-1),
        lambda: KeepLast(True),
        lambda: KeepEverySteps(0),
        lambda: KeepEveryTime(0),
        lambda: KeepBest(0, "loss"),
        lambda: KeepBest(1, ""),
        lambda: KeepBest(1, "loss", "least"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(make: Callable[[], Rule]) -> None:
    """B057: keep 0 might mean all or none, so it means neither."""
    with pytest.raises(UsageError):
        make()


# -- what always survives ---------------------------------------------------------------------------------------------


def test_heads_and_pins_and_the_newest_verified_survive_every_policy(store: Store) -> None:
    """F-159."""
    roots = [*line(store, [1, 2, 3]), *line(store, [4, 5], verified=False)]
    pin(store, roots[0], reason="paper")
    plan = planned(store, KeepLast(1))
    assert kept(plan) == chosen(roots, 0, 2, 3, 4)
    assert reasons(plan, roots[0]) == "pinned: paper"
    assert "head of main" in reasons(plan, roots[4])
    assert reasons(plan, roots[2]) == "the newest verified of main"
    assert reasons(plan, roots[3]) == "newer than the newest verified of main"


def test_nothing_is_retired_before_its_replacement_is_verified(store: Store) -> None:
    """F-159. B057: deletes only after the replacement verified."""
    roots = line(store, [1, 2, 3], verified=False)
    plan = planned(store, KeepLast(1))
    assert kept(plan) == set(roots)
    assert "nothing of main is verified" in reasons(plan, roots[0])
    read_back(store, roots[1])
    assert kept(planned(store, KeepLast(1))) == chosen(roots, 1, 2)
    read_back(store, roots[2])
    assert kept(planned(store, KeepLast(1))) == chosen(roots, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "cached", "operation": "read"},
        {"exceptions": ("only shards 0",)},
        {"exceptions": ("what this release does not know",)},
        {"details": values.to_json({"store": "ab" * 16})},
        {"details": None, "where": "s3://far/store"},
        {"operation": "metrics"},
        {"operation": "scrubbed"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_receipt_that_is_no_readback_of_all_of_it_here_verifies_nothing(
    store: Store, change: dict[str, object]
) -> None:
    roots = [saved(store, 1), saved(store, 2, verified=False)]
    receipt = replace(store.verify(roots[1]).receipt(store.url), **change)  # type: ignore[arg-type]
    store.add_receipt(receipt)
    assert kept(planned(store, KeepLast(1))) == set(roots)


def test_a_verified_checkpoint_whose_shards_are_gone_replaces_nothing(store: Store) -> None:
    roots = line(store, [1, 2])
    roots.append(saved(store, 3))
    key = next(
        key for key in store.closure(roots[2]).documents if key != f"documents/{roots[2].hex[:2]}/{roots[2].hex}"
    )
    store.backend.delete(key)
    with pytest.raises(RefusedError, match=f"checkpoint {roots[2]} .head of main.*not in the store"):
        planned(store, KeepLast(1))


def test_a_head_in_the_middle_of_a_lineage_is_kept_and_begins_none(store: Store) -> None:
    """A tag protects what it names, not so many more."""
    roots = line(store, [1, 2, 3, 4, 5])
    store.move_ref("best", roots[2], None)
    plan = planned(store, KeepLast(2))
    assert kept(plan) == chosen(roots, 2, 3, 4)
    assert reasons(plan, roots[2]) == "head of best"


def test_of_branches_each_keeps_its_own_and_the_trunk_is_retired_only_if_all_let_it_go(store: Store) -> None:
    trunk = line(store, [1, 2, 3])
    store.move_ref("side", trunk[1], None)
    main = line(store, [4, 5])
    side = line(store, [6], "side", verified=False)
    plan = planned(store, KeepLast(1))
    # On the side nothing newer than the trunk is verified yet.
    assert kept(plan) == chosen(main, 1) | chosen(side, 0) | chosen(trunk, 1)
    read_back(store, side[0])
    assert kept(planned(store, KeepLast(1))) == chosen(main, 1) | chosen(side, 0)


# -- B057 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", ["main", "new"])
def test_the_checkpoint_of_a_new_run_survives_the_higher_numbers_of_an_old_one(store: Store, ref: str) -> None:
    """F-160. B057 (huggingface/transformers#27138): step 1000 of an old run, step 10 of a new one, keep 1."""
    old = line(store, [900, 1000])
    new = saved(store, 10, ref)
    collect(store, Policy((KeepLast(1),)), delete=True)
    assert store.head(ref) == new
    assert whole(store, new)
    assert whole(store, old[1]) == (ref == "new")
    assert not whole(store, old[0])


def test_steps_with_more_digits_are_newer(store: Store) -> None:
    """F-160. B057 (huggingface/transformers PR#25136): 9900 to 10100, keep 10; as texts 10100 is less than 9900."""
    roots = line(store, range(9900, 10101, 20))
    assert kept(planned(store, KeepLast(10))) == set(roots[-10:])


def test_a_pinned_best_older_than_the_window_survives(store: Store) -> None:
    """F-159. B057 (huggingface/transformers PR#11748). By a pin, by a ref, and by its metric."""
    roots = [saved(store, step, metrics={"accuracy": 1 / step}) for step in (1, 2, 3, 4, 5)]
    pin(store, roots[1], reason="best")
    store.move_ref("best", roots[2], None)
    collect(store, Policy((KeepLast(1), KeepBest(1, "accuracy"))), delete=True)
    assert [whole(store, root) for root in roots] == [True, True, True, False, True]


def test_keep_1_keeps_one_and_never_the_wrong_one(store: Store) -> None:
    """F-159. B057 (unslothai/unsloth-zoo PR#782): keep 1 after each save; at each instant the newest is whole."""
    for step in range(1, 6):
        root = saved(store, step)
        collect(store, Policy((KeepLast(1),)), delete=True)
        assert whole(store, root)
        assert len(kept(planned(store))) == 1


def test_neither_times_of_files_nor_names_of_refs_nor_digests_decide(disk_store: Store, tmp_path: Path) -> None:
    """F-160. B057, the whole kind: what is oldest by every other order is the newest of its lineage."""
    roots = line(disk_store, [5, 4, 3, 2, 1], "zz")
    for age, root in enumerate(reversed(roots)):
        for key in (*disk_store.closure(root).documents, *disk_store.closure(root).objects):
            os.utime(tmp_path / "store" / key, (10**9 - age, 10**9 - age))
    line(disk_store, [9000], "aa")
    plan = planned(disk_store, KeepLast(2))
    assert kept(plan) & set(roots) == chosen(roots, 3, 4)


# -- refs that were set back ------------------------------------------------------------------------------------------


def test_without_a_policy_what_a_ref_named_before_stays(store: Store) -> None:
    """F-161."""
    roots = line(store, [1, 2, 3])
    store.move_ref("main", roots[0], roots[2])
    branch = line(store, [2, 4])
    plan = planned(store)
    assert kept(plan) == {*roots, *branch}
    assert (plan.retired, plan.deletions) == ((), ())
    assert "named it before" in reasons(plan, roots[1])


def test_with_a_policy_the_newest_of_what_a_ref_named_before_stays(store: Store) -> None:
    """F-161: whoever set a ref back by mistake can still set it forward again; a name lets it go."""
    roots = line(store, [1, 2, 3])
    store.move_ref("main", roots[0], roots[2])
    branch = [saved(store, 2, value=20), saved(store, 4, value=40)]
    plan = planned(store, KeepLast(1))
    assert kept(plan) == {roots[2], branch[1]}
    assert "the newest of what main named before" in reasons(plan, roots[2])
    store.move_ref("main", roots[2], branch[1])
    store.move_ref("main", branch[1], roots[2])
    plan = planned(store, KeepLast(1), retire=[roots[2]])
    assert kept(plan) == {branch[1], roots[1]}  # which is then the newest of them
    collect(store, Policy((KeepLast(1),)), delete=True, retire=[root.hex for root in roots[1:]])
    assert kept(planned(store)) == {branch[1]}


def test_a_ref_that_names_nothing_any_more_keeps_what_it_named(store: Store) -> None:
    roots = line(store, [1, 2])
    store.move_ref("main", None, roots[1])
    assert kept(planned(store)) == set(roots)
    assert kept(planned(store, KeepLast(1))) == chosen(roots, 1)
    collect(store, Policy((KeepLast(1),)), delete=True, retire=[roots[1], roots[0]])
    assert kept(planned(store)) == set()


# -- verified copies elsewhere ----------------------------------------------------------------------------------------


def test_what_too_few_others_hold_is_not_retired(store: Store, tmp_path: Path) -> None:
    roots = line(store, [1, 2, 3])
    others = [ckptstore.open(tmp_path / name, create=True) for name in ("left", "right")]
    for other in others:
        ckptstore.push(store, other, roots[0])
    ckptstore.push(store, others[0], roots[1])
    one, two = planned(store, KeepLast(1), min_verified_copies=1), planned(store, KeepLast(1), min_verified_copies=2)
    assert kept(one) == chosen(roots, 2)
    assert kept(two) == chosen(roots, 1, 2)
    assert "only 1 of 2 verified copies are known to be elsewhere" in reasons(two, roots[1])
    assert [item.root for item in two.wanting] == [roots[1]]
    assert one.wanting == ()
    assert kept(planned(store, KeepLast(1), min_verified_copies=3)) == set(roots)


def test_the_own_copy_is_none_elsewhere_and_what_others_keep_is_not_read(store: Store) -> None:
    roots = line(store, [1, 2])
    assert kept(planned(store, KeepLast(1), min_verified_copies=1)) == set(roots)
    with pytest.raises(RefusedError, match="only 0 of 1 verified copies"):
        planned(store, KeepLast(1), retire=[roots[0]], min_verified_copies=1)
    with pytest.raises(UsageError):
        planned(store, KeepLast(1), min_verified_copies=-1)


# -- any lines, any policy --------------------------------------------------------------------------------------------

RULES = st.one_of(
    st.builds(KeepLast, st.integers(1, 3)),
    st.builds(KeepEverySteps, st.integers(1, 5)),
    st.builds(KeepEveryTime, st.just(int(timedelta(days=1).total_seconds()))),
    st.builds(KeepBest, st.integers(1, 2), st.just("m"), st.sampled_from(["min", "max"])),
)
SAVES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]), st.integers(1, 4), st.booleans(), st.sampled_from([None, 0.5, float("nan")])
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=12, deadline=None)
@given(saves=SAVES, rules=st.lists(RULES, min_size=1, max_size=2), back=st.booleans(), pinned=st.integers(0, 6))
def test_whatever_is_saved_and_asked_for_what_must_survive_does(
    saves: list[tuple[str, int, bool, float | None]], rules: list[Rule], back: bool, pinned: int
) -> None:
    """F-158, F-159, F-160: heads, pins, newest verified; documents of all ancestors; and a second time nothing goes."""
    store = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    roots = [
        saved(store, step, ref, verified=good, value=number, metrics=None if metric is None else {"m": metric})
        for number, (ref, step, good, metric) in enumerate(saves)
    ]
    verified = {root for root, save in zip(roots, saves, strict=True) if save[2]}
    if back:
        store.move_ref("c", roots[0], None)
    pin(store, roots[pinned % len(roots)])
    heads = {root for name in store.refs.names() if (root := store.head(name)) is not None}
    history = {head: [root for root, _ in store.history(head)] for head in heads}
    dry = planned(store, *rules)
    done = collect(store, Policy(tuple(rules)), delete=True).plan
    assert (done.kept, done.retired, done.deletions, done.remains) == (
        *(dry.kept, dry.retired, dry.deletions),
        dry.remains,
    )
    expected = {*heads, roots[pinned % len(roots)]}
    expected |= {next((root for root in line if root in verified), line[-1]) for line in history.values()}
    assert expected <= kept(done)
    for root in kept(done):
        assert whole(store, root)
    for head in heads:
        assert [root for root, _ in store.history(head)] == history[head]
        assert store.verify(head).findings == ()
    again = collect(store, Policy(tuple(rules)), delete=True).plan
    assert (again.kept, again.retired, again.deletions) == (done.kept, (), ())
