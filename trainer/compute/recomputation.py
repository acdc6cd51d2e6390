"""Answers from a cache, and the evidence that it changed nothing: some of them again without one, bit for bit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ckptstore import Digest
from trainer.compute.config import Decoding
from trainer.compute.generate import Generation, greedy
from trainer.compute.model import Shard
from trainer.compute.transport import Group, raw_bytes


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What computing ``cases`` answers again, in another company and without a cache, has shown; equal on all ranks.

    The logits of ``steps`` tokens were compared, end tokens among them; ``tokens`` is without these. ``differs`` is the
    number of the first prompt and of the first of its tokens whose logits were not the same bits; None if all were.
    ``seconds`` were taken by it on this rank.
    """

    cases: int
    tokens: int
    steps: int
    differs: tuple[int, int] | None
    seconds: float


def answer(
    shard: Shard,
    group: Group,
    prompts: Sequence[Sequence[int]],
    again: Sequence[int],
    *,
    decoding: Decoding,
    cap: int,
    end: int,
    step: int,
) -> tuple[tuple[Generation, ...], Recomputation]:
    """The answers to all prompts, and to those whose numbers are in ``again`` a second time.

    Arguments and errors are those of :func:`~trainer.compute.generate.greedy`.
    """
    cached, recomputed = _Digests(), _Digests()
    answers = greedy(shard, group, prompts, decoding=decoding, cap=cap, end=end, step=step, on_logits=cached)
    began = time.perf_counter()
    chosen = [prompts[number] for number in again]
    repeated = greedy(
        shard, group, chosen, decoding=decoding, cap=cap, end=end, step=step, cache=False, on_logits=recomputed
    )
    steps, differs = 0, (-1, -1)
    for place, number in enumerate(again):
        old, new = cached.of[number], recomputed.of[place]
        steps += len(new)
        if differs == (-1, -1) and old != new:
            pairs = zip(old, new, strict=False)
            differs = number, next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(old), len(new)))
    # Only rank 0 has logits.
    steps, *where = group.broadcast_words((steps, *differs), step, 0)
    found = Recomputation(
        cases=len(again),
        tokens=sum(len(one.ids) for one in repeated),
        steps=steps,
        differs=None if where[0] < 0 else (where[0], where[1]),
        seconds=time.perf_counter() - began,
    )
    group.drain()
    return answers, found


class _Digests:
    """Digests of logits by prompt, token after token."""

    def __init__(self) -> None:
        self.of: defaultdict[int, list[Digest]] = defaultdict(list)

    def __call__(self, case: int, logits: Tensor) -> None:
        self.of[case].append(Digest.of(raw_bytes(logits.to("cpu").contiguous())))
