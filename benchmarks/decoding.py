"""Greedy decoding with a KV cache beside recomputing the prefix for each token, as ratios measured in one run.

``python benchmarks/decoding.py [--model demo] [--cases 32] [--tokens 16] [--rounds 3] [--shapes 4x16,8x8,16x4]`` takes
a model with random weights, whole and in one thread, and prints medians of tokens a second of CPU time. A shape is
positions in a block x blocks in a pass. *recomputed* is the same passes with nothing kept, of a quarter of the cases;
*plain* is one forward over the prefix for each token, in the prefix's own length. The logits with and without a cache
are compared bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.compute import numerics
from trainer.compute.config import DEFAULT_CUTS, PRESETS, Decoding
from trainer.compute.generate import greedy
from trainer.compute.model import Shard, initialise
from trainer.compute.transport import Group, local_groups

END = -1  # no token ends an answer, so that all are equally long


def decoded(
    shard: Shard, group: Group, prompts: Sequence[Sequence[int]], shape: Decoding, tokens: int, *, cache: bool
) -> tuple[float, dict[int, list[Tensor]]]:
    """CPU seconds, and the logits of each prompt."""
    seen: dict[int, list[Tensor]] = {case: [] for case in range(len(prompts))}

    def keep(case: int, logits: Tensor) -> None:
        seen[case].append(logits.clone())

    began = time.process_time()
    greedy(shard, group, prompts, decoding=shape, cap=tokens, end=END, step=0, cache=cache, on_logits=keep)
    return time.process_time() - began, seen


def plain(shard: Shard, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """CPU seconds with one forward over the whole prefix for each token."""
    began = time.process_time()
    with shard.holding_casts():
        for prompt in prompts:
            text = list(prompt)
            for _ in range(tokens):
                hidden = shard.body(shard.embed(torch.tensor([text])))
                text.append(int(shard.logits(hidden[0, -1]).argmax()))
    return time.process_time() - began


def equal(left: dict[int, list[Tensor]], right: dict[int, list[Tensor]]) -> bool:
    """Whether the logits of the prompts of ``right`` are the same bits in ``left``."""
    return all(torch.equal(torch.stack(left[case]), torch.stack(logits)) for case, logits in right.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(DEFAULT_CUTS), default="demo")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default=None)
    parser.add_argument("--cases", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=60, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="4x16,8x8,16x4,16x8")
    given = parser.parse_args()
    numerics.apply(threads=1)
    cfg, compute = PRESETS[given.model], given.compute or numerics.compute_dtype()
    shard, (group,) = Shard(cfg, 0, cfg.layers, True, compute), local_groups(1)
    initialise(shard, seed=3, std=0.05)
    prompts = [
        tuple((7 * i + 13 * t + t * t) % cfg.vocab for t in range(given.prompt + i % 5)) for i in range(given.cases)
    ]
    some = prompts[: max(1, given.cases // 4)]
    cached: dict[str, list[float]] = {name: [] for name in given.shapes.split(",")}
    again: dict[str, list[float]] = {name: [] for name in cached}
    whole: list[float] = []
    for _ in range(given.rounds):
        whole.append(len(some) * given.tokens / plain(shard, some, given.tokens))
        for name in cached:
            block, slots = map(int, name.split("x"))
            shape = Decoding.fitting(given.prompt + 4, given.tokens, block=block, slots=slots)
            seconds, logits = decoded(shard, group, prompts, shape, given.tokens, cache=True)
            cached[name].append(given.cases * given.tokens / seconds)
            seconds, recomputed = decoded(shard, group, some, shape, given.tokens, cache=False)
            again[name].append(len(some) * given.tokens / seconds)
            if not equal(logits, recomputed):
                print(f"{name}: the logits with a cache are NOT those of recomputing")
    rate = statistics.median(whole)
    print(f"{given.model}, {compute}: {given.cases} prompts of about {given.prompt} tokens, {given.tokens} tokens each")
    print(f"{'plain':>8} {rate:8.1f} tokens/s")
    for name in cached:
        kept, repeated = statistics.median(cached[name]), statistics.median(again[name])
        text = f"{name:>8} {kept:8.1f} tokens/s, recomputed {repeated:7.1f}: {kept / repeated:5.1f} times"
        print(f"{text}; {kept / rate:5.1f} times plain")


if __name__ == "__main__":
    main()
