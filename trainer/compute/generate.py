"""Evaluation by the shards alone: losses of known answers, and greedy answers of the model's own.

Every forward is one row of its own length, so a result depends on its prompt only, never on its company. Rows follow
each other through the ranks, so all ranks work. Rank 0 has the head; it tells the others each result, and all end with
the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum, isfinite

import torch
from torch import Tensor

from ckptstore.errors import UsageError
from trainer.compute.model import Shard
from trainer.compute.transport import Channel, Group
from trainer.errors import NotFiniteError

_PACK = 8  # rows in one message


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids of which those from ``start`` on are the response, and those before it the prompt."""

    ids: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.ids):
            raise UsageError(
                "document", f"a response from token {self.start} of {len(self.ids)} leaves prompt or response empty"
            )


@dataclass(frozen=True, slots=True)
class Generation:
    """One greedy answer.

    ``ids`` are the tokens after the prompt without the end token; ``ended`` tells whether that came before the cap;
    ``margin`` is the smallest lead, in logits, of a chosen token over the next best: how far the answer was from being
    another.
    """

    ids: tuple[int, ...]
    ended: bool
    margin: float


def response_losses(shard: Shard, group: Group, documents: Sequence[Document], step: int) -> tuple[float, ...]:
    """Mean cross-entropy in nats per response token of each document; FP64 and equal on all ranks.

    Args:
        step: how many updates the weights have seen; messages of another evaluation are refused.

    Raises:
        NotFiniteError: a loss is infinite or NaN; names the document.
    """
    losses = [0.0] * len(documents)
    with shard.holding_casts():
        for index, hidden, ids in _rows(shard, group, [d.ids for d in documents], step):
            start = documents[index].start
            # The sum is over the FP32 losses as they are, correctly rounded.
            each: list[float] = shard.token_losses(hidden, ids)[0, start - 1 :].tolist()
            losses[index] = fsum(each) / len(each)
    shared = group.broadcast_numbers(losses, step, 0)
    group.drain()
    for index, loss in enumerate(shared):
        if not isfinite(loss):
            raise NotFiniteError(f"loss of document {index} after {step} updates", str(loss))
    return shared


def greedy(
    shard: Shard,
    group: Group,
    prompts: Sequence[Sequence[int]],
    *,
    cap: int,
    end: int,
    step: int,
    on_token: Callable[[int], None] | None = None,
) -> tuple[Generation, ...]:
    """The likeliest continuation of each prompt, equal on all ranks; of equal logits the first token is taken.

    The whole prefix is computed again for each token.

    Args:
        cap: most tokens of an answer, the end token not counted as one.
        end: the token that ends an answer.
        step: how many updates the weights have seen.
        on_token: called with the number of prompts still open after each round, for progress.

    Raises:
        UsageError: an empty prompt, or a cap below 1.
        NotFiniteError: a logit is NaN; names the prompt.
    """
    if cap < 1 or not all(prompts):
        raise UsageError(
            "generation",
            f"cap {cap}, shortest prompt {min(map(len, prompts), default=0)}",
            "both have to be at least 1",
        )
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    margins = [float("inf")] * len(texts)
    live = list(range(len(texts)))
    with shard.holding_casts():
        for slot in range(cap):
            if not live:
                break
            chosen = [0] * len(live)
            for at, hidden, _ in _rows(shard, group, [texts[i] for i in live], step):
                logits = shard.logits(hidden[0, -1])
                top = logits.topk(2).values.tolist()
                chosen[at] = int(logits.argmax()) if all(map(isfinite, top)) else -1
                margins[live[at]] = min(margins[live[at]], top[0] - top[1])
            for i, token in zip(live, group.broadcast_words(chosen, step, slot), strict=True):
                if token < 0:
                    raise NotFiniteError(f"logits of prompt {i} after {step} updates", "they are not numbers")
                ended[i] = token == end
                if not ended[i]:
                    texts[i].append(token)
            live = [i for i in live if not ended[i]]
            if on_token is not None:
                on_token(len(live))
    margins = list(group.broadcast_numbers(margins, step, cap))
    group.drain()
    return tuple(
        Generation(tuple(text[len(prompt) :]), done, margin)
        for prompt, text, done, margin in zip(prompts, texts, ended, margins, strict=True)
    )


def _rows(shard: Shard, group: Group, rows: Sequence[Sequence[int]], step: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Take each row through all shards; on rank 0, yield (index, hidden states [1, T, hidden], ids [1, T]) in order.

    Rows are computed one by one and travel in packs. Rank 0 starts as many packs as there are ranks before it waits for
    the first, so that none is idle.
    """
    packs = [range(first, min(first + _PACK, len(rows))) for first in range(0, len(rows), _PACK)]
    lengths = [[len(rows[index]) for index in pack] for pack in packs]
    last = group.world - 1

    def recv(number: int) -> tuple[Tensor, ...]:
        shape = (1, sum(lengths[number]), shard.cfg.hidden)
        peer = (group.rank - 1) % group.world
        pack = group.recv(shape, shard.dtype, peer, Channel.ACTIVATION, step, number)
        parts: tuple[Tensor, ...] = pack.split(lengths[number], 1)  # type: ignore[no-untyped-call]
        return parts

    def send(number: int, parts: Sequence[Tensor]) -> None:
        group.send(torch.cat(tuple(parts), 1), (group.rank + 1) % group.world, Channel.ACTIVATION, step, number)

    if group.rank:
        for number in range(len(packs)):
            send(number, [shard.body(part) for part in recv(number)])
        return
    started: list[tuple[list[Tensor], list[Tensor]]] = []
    for number in range(len(packs) + last):
        if number < len(packs):
            ids = [torch.tensor([rows[index]], dtype=torch.int64, device=group.device) for index in packs[number]]
            parts = [shard.body(shard.embed(row)) for row in ids]
            started.append((ids, parts))
            if last:
                send(number, parts)
        if number >= last:
            ids, parts = started.pop(0)
            yield from zip(packs[number - last], recv(number - last) if last else parts, ids, strict=True)
