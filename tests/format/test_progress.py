"""Progress: counters inside one checkpoint agree, or there is no checkpoint."""

from __future__ import annotations

import struct

import pytest

from ckptstore.errors import MalformedError
from ckptstore.format.page import Entry, ValueEntry, make_tensor_entry
from ckptstore.format.progress import Counter, Cursor, NamedState, Progress, count_updates, part_problems, problems
from ckptstore.format.values import to_json

STEP = ("optim", "adam", "step")


def counter_entry(path: str, step: float, dtype: str = "f32", form: str = "<f") -> Entry:
    return make_tensor_entry(path, STEP, dtype, (), (), struct.pack(form, step))


def scheduler(epoch: object) -> NamedState:
    return NamedState("scheduler", "s", to_json({"last_epoch": epoch}))


def stated(step: int, entries: list[Entry], states: list[NamedState], *, tracks: bool = True) -> Progress:
    found = count_updates(entries, states)
    counters = tuple(Counter(name, tracks, values) for name, values in found.items())
    return Progress(cursors=(("data", Cursor("samples", 32 * step, 32)),), states=tuple(states), counters=counters)


ENTRIES = [counter_entry("a", 3.0), counter_entry("b", 3.0)]


def test_a_checkpoint_whose_counters_agree_has_no_problem() -> None:
    """F-75, F-76."""
    progress = stated(3, ENTRIES, [scheduler(3)])
    assert {c.name: c.values for c in progress.counters} == {"optimizer.adam": ((3, 2),), "scheduler.s": ((3, 1),)}
    assert problems(3, progress, count_updates(ENTRIES, progress.states)) == []


@pytest.mark.parametrize("off", [2, 4])
def test_a_counter_off_by_one_is_a_problem_although_everything_was_recomputed(off: int) -> None:
    """F-76 (B014, pytorch-lightning#1772, #4655): a save on the wrong side of an update, forged consistently."""
    entries = [counter_entry("a", off), counter_entry("b", off)]
    for entries_, states in ((entries, [scheduler(3)]), (ENTRIES, [scheduler(off)])):
        progress = stated(3, entries_, states)
        (reason,) = problems(3, progress, count_updates(entries_, states))
        assert "tracks the step, which is 3" in reason


def test_counters_that_are_not_those_of_the_state_are_a_problem() -> None:
    """F-75 (B014)."""
    progress = stated(3, ENTRIES, [scheduler(3)])
    for entries, states in (
        ([counter_entry("a", 3), counter_entry("b", 2)], [scheduler(3)]),
        (ENTRIES[:1], [scheduler(3)]),
        ([], [scheduler(3)]),
        (ENTRIES, [scheduler(2)]),
        (ENTRIES, []),
        ([*ENTRIES, counter_entry("c", 3)], [scheduler(3)]),
    ):
        assert len(problems(3, progress, count_updates(entries, states))) == 1
    unstated = Progress(states=(scheduler(3),))
    assert len(problems(3, unstated, count_updates(ENTRIES, unstated.states))) == 2


def test_counters_that_do_not_track_the_step_are_only_stated() -> None:
    """F-76: frozen parameters, a scheduler by epoch."""
    entries = [counter_entry("a", 3), counter_entry("frozen", 1)]
    progress = stated(3, entries, [scheduler(1)], tracks=False)
    assert progress.counters[0].values == ((1, 1), (3, 1))
    assert problems(3, progress, count_updates(entries, progress.states)) == []


def test_a_cursor_stands_where_the_step_puts_it() -> None:
    """F-72 (B010, gpt-neox PR#308): counted in samples, with its unit."""
    for position, wrong in ((96, 0), (64, 1), (95, 1), (128, 1)):
        progress = Progress(cursors=(("data", Cursor("samples", position, 32)),))
        assert len(problems(3, progress, {})) == wrong
    assert problems(3, Progress(cursors=(("data", Cursor("samples", 7)),)), {}) == []


def test_a_commit_inside_an_update_is_a_problem() -> None:
    """F-71 (B011, transformers#22143)."""
    assert len(problems(3, Progress(micro_index=1), {})) == 1


@pytest.mark.parametrize(
    ("dtype", "form"),
    [("u8", "<B"), ("i8", "<b"), ("u16", "<H"), ("i16", "<h"), ("u32", "<I"), ("i32", "<i"),
     ("u64", "<Q"), ("i64", "<q"), ("f16", "<e"), ("f32", "<f"), ("f64", "<d")],
)  # fmt: skip
def test_a_step_counts_in_every_type_that_optimizers_use(dtype: str, form: str) -> None:
    """F-74 (B029, pytorch PR#173901)."""
    assert count_updates([counter_entry("a", 3, dtype, form)], []) == {"optimizer.adam": ((3, 1),)}


def test_a_step_that_is_a_typed_value_counts() -> None:
    """F-74."""
    for step in (3, 3.0):
        assert count_updates([ValueEntry("a", STEP, to_json(step))], []) == {"optimizer.adam": ((3, 1),)}


def test_what_is_no_count_agrees_with_nothing() -> None:
    """F-74."""
    odd: list[Entry] = [
        ValueEntry("a", STEP, to_json(value)) for value in (True, "3", None, -1, 2.5, 2**53, 1e300, float("nan"))
    ]
    odd += [counter_entry("a", value, "f64", "<d") for value in (-1, 2.5, 2.0**60, float("inf"))]
    odd += [counter_entry("a", 2**63, "u64", "<Q"), make_tensor_entry("a", STEP, "bf16", (), (), b"\x40\x40")]
    odd += [make_tensor_entry("a", STEP, "f32", (2,), (), bytes(8)), make_tensor_entry("a", STEP, "f32", (0,), (), b"")]
    for entry in odd:
        assert count_updates([entry], []) == {"optimizer.adam": ((-1, 1),)}
    for epoch in (-1, 2**53):
        assert count_updates([], [scheduler(epoch)]) == {"scheduler.s": ((-1, 1),)}


def test_only_steps_and_last_epochs_are_counters() -> None:
    """F-74."""
    others: list[Entry] = [
        ValueEntry("a", ("optim", "adam", "exp_avg"), to_json(3)),
        ValueEntry("a", ("optim", "adam", "step", "0"), to_json(3)),
        ValueEntry("a", ("extra",), to_json(3)),
    ]
    states = [NamedState("data", "d", to_json({"last_epoch": 3})), scheduler(True), scheduler("3")]
    states += [NamedState("scheduler", "t", to_json([3])), NamedState("scheduler", "u", to_json({}))]
    assert count_updates(others, states) == {}


def test_a_part_of_the_shards_holds_at_most_what_progress_says() -> None:
    """F-77."""
    progress = stated(3, ENTRIES, [scheduler(3)])
    for entries, wrong in ((ENTRIES, 0), (ENTRIES[:1], 0), ([], 0), ([*ENTRIES, counter_entry("c", 3)], 1)):
        assert len(part_problems(3, progress, count_updates(entries, ()))) == wrong
    assert len(part_problems(3, progress, count_updates([counter_entry("a", 2)], ()))) == 1
    assert len(part_problems(3, Progress(), count_updates(ENTRIES, ()))) == 1
    assert part_problems(4, progress, count_updates(ENTRIES, ()))


@pytest.mark.parametrize("values", [(), ((1, 0),), ((1, -1),), ((-2, 1),), ((2, 1), (1, 1)), ((1, 1), (1, 2))])
def test_a_histogram_has_one_form(values: tuple[tuple[int, int], ...]) -> None:
    """F-73."""
    with pytest.raises(MalformedError, match="histogram"):
        Progress.from_json(Progress(counters=(Counter("c", False, values),)).to_json())


def test_lists_of_progress_are_sorted() -> None:
    """F-70."""
    cursor, state, count = Cursor("samples", 0), to_json(None), Counter("c", False, ((1, 1),))
    for progress in (
        Progress(cursors=(("b", cursor), ("a", cursor))),
        Progress(cursors=(("a", cursor), ("a", cursor))),
        Progress(states=(NamedState("scheduler", "a", state), NamedState("data", "b", state))),
        Progress(states=(NamedState("data", "b", state), NamedState("data", "a", state))),
        Progress(counters=(count, count)),
    ):
        with pytest.raises(MalformedError, match="sorted"):
            Progress.from_json(progress.to_json())


def test_what_is_wrong_is_listed_whole() -> None:
    """F-75: every disagreement, not the first."""
    progress = Progress(
        cursors=(("data", Cursor("samples", 1, 32)),),
        counters=(Counter("optimizer.adam", True, ((2, 2),)), Counter("scheduler.s", True, ((3, 1),))),
        micro_index=1,
    )
    assert len(problems(3, progress, {"optimizer.adam": ((3, 2),)})) == 5
