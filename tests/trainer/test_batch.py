"""Examples of one update as plain values."""

from __future__ import annotations

import random
from math import inf, nan

import pytest

from ckptstore.errors import UsageError
from trainer.compute.batch import Batch, Microbatch

GOOD = Microbatch(((1, 2, 3), (4, 5, 0)), ((0.0, 0.5, 1.0), (0.0, 1.0, 0.0)))


def test_a_batch_knows_its_shapes_and_its_denominator() -> None:
    batch = Batch((GOOD, Microbatch(((1, 2),), ((0.0, 2.0),))))
    assert [micro.shape for micro in batch.microbatches] == [(2, 3), (1, 2)]
    assert batch.positions == 8
    assert batch.denominator == 4.5


def test_the_denominator_does_not_depend_on_order_or_microbatches() -> None:
    draw = random.Random(3)
    weights = [draw.random() * 10 ** draw.randint(-12, 12) for _ in range(300)]
    rows = [Microbatch(((1, 2),), ((0.0, w),)) for w in weights]
    one = Microbatch(tuple((1, 2) for _ in weights), tuple((0.0, w) for w in sorted(weights)))
    assert Batch(tuple(rows)).denominator == Batch(tuple(reversed(rows))).denominator == Batch((one,)).denominator


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        ((), ()),
        (((1,),), ((0.0,),)),
        (((1, 2), (1, 2, 3)), ((0.0, 1.0), (0.0, 1.0, 1.0))),
        (((1, 2),), ((0.0, 1.0, 1.0),)),
        (((1, 2),), ((0.0, 1.0), (0.0, 1.0))),
        (((1, 2),), ((0.0, -1.0),)),
        (((1, 2),), ((0.0, nan),)),
        (((1, 2),), ((0.0, inf),)),
        (((1, 2),), ((1.0, 1.0),)),
    ],
)
def test_rows_that_make_no_microbatch_are_refused(ids: object, weights: object) -> None:
    with pytest.raises(UsageError):
        Microbatch(ids, weights)  # type: ignore[arg-type]


def test_a_batch_without_anything_to_learn_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to learn"):
        Batch((Microbatch(((1, 2),), ((0.0, 0.0),)),))
    with pytest.raises(UsageError):
        Batch(())
