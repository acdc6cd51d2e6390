"""The static order of work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from trainer.compute.schedule import Kind, Op, schedule, simulate

ranks, micros = st.integers(1, 4), st.integers(1, 16)


@given(ranks, micros)
def test_no_schedule_deadlocks_and_open_microbatches_are_bounded_by_the_pipeline(n: int, m: int) -> None:
    simulation = simulate(schedule(n, m))
    assert all(most <= min(m, n - rank + 1) for rank, most in enumerate(simulation.in_flight))
    assert simulation.slots <= m * (2 * n + 1)


@given(ranks, micros)
def test_every_rank_does_each_kind_of_work_once_a_microbatch_in_ascending_order(n: int, m: int) -> None:
    for rank, ops in enumerate(schedule(n, m)):
        for kind in Kind:
            wanted = [] if kind is Kind.HEAD and rank else list(range(m))
            assert [op.micro for op in ops if op.kind is kind] == wanted


@given(ranks, micros)
def test_a_microbatch_goes_forward_then_to_the_head_then_backward(n: int, m: int) -> None:
    for rank, ops in enumerate(schedule(n, m)):
        for i in range(m):
            kinds = [op.kind for op in ops if op.micro == i]
            assert kinds == [Kind.FORWARD, *([] if rank else [Kind.HEAD]), Kind.BACKWARD]


def test_work_overlaps_between_two_ranks() -> None:
    assert simulate(schedule(2, 4)).slots == 14  # 20 one after the other
    assert simulate(schedule(2, 4)).in_flight == (3, 2)
    assert simulate(schedule(2, 8)).slots == 26
    assert simulate(schedule(1, 4)).slots == 12


def test_a_single_microbatch_is_worked_on_step_by_step() -> None:
    assert schedule(2, 1) == (
        (Op(Kind.FORWARD, 0), Op(Kind.HEAD, 0), Op(Kind.BACKWARD, 0)),
        (Op(Kind.FORWARD, 0), Op(Kind.BACKWARD, 0)),
    )


def test_a_schedule_that_waits_for_itself_is_found_out() -> None:
    zero, one = schedule(2, 2)
    with pytest.raises(UsageError, match=r"rank 0 at head 1, rank 1 at forward 0"):
        simulate(((Op(Kind.HEAD, 1), *zero), one))


@pytest.mark.parametrize(("n", "m"), [(0, 1), (1, 0), (-1, 2)])
def test_nothing_cannot_be_scheduled(n: int, m: int) -> None:
    with pytest.raises(UsageError):
        schedule(n, m)
