"""Evaluation by the shards alone: losses of known answers, and greedy answers of the model's own.

A result depends on its own document or prompt only, never on its company: a loss is computed in a forward of one row
of its own length, an answer in passes of one fixed shape (docs/decisions/0061-answers-in-fixed-blocks.md). Rows and
passes follow each other through the ranks, so all ranks work. Rank 0 has the head; it tells the others each result, and
all end with the same values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum, inf, isfinite

import torch
from torch import Tensor

from ckptstore.errors import UsageError
from trainer.compute.cache import Cache
from trainer.compute.config import Decoding
from trainer.compute.decoding import Slot, Stream
from trainer.compute.model import Shard
from trainer.compute.transport import Channel, Group
from trainer.errors import NotFiniteError

_PACK = 8  # rows of losses in one message


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
    decoding: Decoding,
    cap: int,
    end: int,
    step: int,
    cache: bool = True,
    on_logits: Callable[[int, Tensor], None] | None = None,
) -> tuple[Generation, ...]:
    """The likeliest continuation of each prompt, equal on all ranks; of equal logits the first token is taken.

    Every pass has the shapes of ``decoding``, and a row sees the same keys and values with a cache and without one, in
    any company. So its logits are the same, bit for bit.

    Args:
        decoding: shapes of a pass.
        cap: most tokens of an answer, the end token not counted as one.
        end: the token that ends an answer.
        step: how many updates the weights have seen.
        cache: compute full blocks once; without, the whole prefix is computed again for each token.
        on_logits: called on rank 0 with the number of a prompt and the logits of its next token, FP32 [vocab], token
            after token.

    Raises:
        UsageError: an empty prompt, a cap below 1, or too few positions for a prompt and its answer.
        NotFiniteError: a logit is NaN; names the prompt.
    """
    lengths = [len(prompt) for prompt in prompts]
    if cap < 1 or not all(lengths):
        why = f"cap {cap}, shortest prompt {min(lengths, default=0)}"
        raise UsageError("generation", why, "both have to be at least 1")
    if max(lengths, default=0) + cap > decoding.positions:
        why = f"a prompt of {max(lengths)} tokens and an answer of {cap} are more than {decoding.positions} positions"
        raise UsageError("generation", why, "use a plan whose decoding has enough positions")
    texts = [list(prompt) for prompt in prompts]
    ended, margins = [False] * len(texts), [inf] * len(texts)
    # As many streams as ranks: while a pass of one is at a rank, those of the others are at other ranks.
    streams = [range(first, len(texts), group.world) for first in range(min(group.world, len(texts)))]
    passes = _Passes(shard, group, decoding, texts, step, rooms=len(streams) * decoding.slots)
    failed: int | None = None
    with shard.holding_casts():
        flying: deque[tuple[Stream, _Pass]] = deque()
        for number, cases in enumerate(streams):
            rooms = range(number * decoding.slots, (number + 1) * decoding.slots)
            stream = Stream(texts, cases, rooms, decoding, cache=cache)
            flying.append((stream, passes.begin(stream.slots())))
        while flying:
            stream, begun = flying.popleft()
            for slot, token, logits in passes.finish(begun):
                case = slot.case
                if token < 0:
                    failed = case if failed is None else failed
                    continue
                if logits is not None:
                    top = logits.topk(2).values.tolist()
                    margins[case] = min(margins[case], top[0] - top[1])
                    if on_logits is not None:
                        on_logits(case, logits)
                ended[case] = token == end
                stream.take(case, token, ended=ended[case] or len(texts[case]) + 1 == lengths[case] + cap)
            # What is on its way still arrives, so that nothing is left in the group.
            if failed is None and (slots := stream.slots()):
                flying.append((stream, passes.begin(slots)))
    if failed is not None:
        raise NotFiniteError(f"logits of prompt {failed} after {step} updates", "they are not numbers")
    margins = list(group.broadcast_numbers(margins, step, cap))
    group.drain()
    return tuple(
        Generation(tuple(text[length : len(text) - done]), done, margin)
        for text, length, done, margin in zip(texts, lengths, ended, margins, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass on its way: its number, its slots, and on a single rank the rows that choose, [slots, hidden]."""

    number: int
    slots: tuple[Slot, ...]
    rows: Tensor | None


class _Passes:
    """Takes blocks through all shards: embedding on rank 0, layers on each, the head on rank 0 again."""

    def __init__(
        self, shard: Shard, group: Group, decoding: Decoding, texts: Sequence[list[int]], step: int, *, rooms: int
    ) -> None:
        self._shard, self._group, self._decoding, self._texts, self._step = shard, group, decoding, texts, step
        self._cache = Cache(shard, decoding, rooms, group.device)
        self._number = 0

    def begin(self, slots: tuple[Slot, ...]) -> _Pass:
        """This rank's layers of the next pass."""
        number, group, shape = self._number, self._group, self._decoding
        self._number += 1
        if group.rank == 0:
            x = self._shard.embed(self._ids(slots))
        else:
            sides = (shape.slots, shape.block, self._shard.cfg.hidden)
            x = group.recv(sides, self._shard.dtype, group.rank - 1, Channel.ACTIVATION, self._step, number)
        x = self._shard.blocks(x, *self._cache.at(slots))
        if group.rank < group.world - 1:
            group.send(x, group.rank + 1, Channel.ACTIVATION, self._step, number)
            return _Pass(number, slots, None)
        last = [slot.last or 0 for slot in slots] + [0] * (shape.slots - len(slots))
        rows = x[torch.arange(shape.slots, device=x.device), torch.tensor(last, device=x.device)]
        if group.rank and _choosing(slots):
            group.send(rows, 0, Channel.ACTIVATION, self._step, number)
        return _Pass(number, slots, rows)

    def finish(self, begun: _Pass) -> list[tuple[Slot, int, Tensor | None]]:
        """The tokens chosen in a pass, -1 for one that has no numbers to choose by; on rank 0 with their logits."""
        choosing, group = _choosing(begun.slots), self._group
        if not choosing:
            return []
        tokens, logits = [0] * len(choosing), None
        if group.rank == 0:
            rows = begun.rows
            if rows is None:
                sides = (self._decoding.slots, self._shard.cfg.hidden)
                rows = group.recv(
                    sides, self._shard.dtype, group.world - 1, Channel.ACTIVATION, self._step, begun.number
                )
            logits = self._shard.logits(rows)
            best, finite = logits.argmax(-1).tolist(), logits.amax(-1).isfinite().tolist()
            tokens = [best[at] if finite[at] else -1 for at in choosing]
        words = group.broadcast_words(tokens, self._step, begun.number)
        return [
            (begun.slots[at], token, None if logits is None else logits[at])
            for at, token in zip(choosing, words, strict=True)
        ]

    def _ids(self, slots: Sequence[Slot]) -> Tensor:
        """Token ids of the blocks, int64 [slots, block], padded with token 0."""
        size = self._decoding.block
        rows = [self._texts[slot.case][slot.block * size : (slot.block + 1) * size] for slot in slots]
        rows += [[]] * (self._decoding.slots - len(slots))
        return torch.tensor(
            [row + [0] * (size - len(row)) for row in rows], dtype=torch.int64, device=self._group.device
        )


def _choosing(slots: Sequence[Slot]) -> list[int]:
    """Which of the slots have the last row of their text."""
    return [at for at, slot in enumerate(slots) if slot.last is not None]


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
