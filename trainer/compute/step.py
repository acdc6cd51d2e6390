"""One optimizer update over all shards, with arithmetic that no partition changes.

1. casts are explicit, gradients FP32 (trainer/compute/model.py);
2. gradients are added in the order of the microbatches, once a tensor and microbatch;
3. a tied weight's two gradients are summed first and then added, as autograd does on the whole model;
4. all losses have one denominator: the correctly rounded sum of the update's token weights;
5. the clipping norm is the root of the correctly rounded sum of all tensors' square sums, which are correctly
   rounded over rows;
6. the learning rate is a function of the update; decay is on matrices only;
7. the loss is the correctly rounded sum of the microbatches' FP32 losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum, isfinite, sqrt
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ckptstore.errors import UsageError
from trainer.compute.batch import Batch, Microbatch
from trainer.compute.config import Ownership, Recipe
from trainer.compute.dropout import Dropout
from trainer.compute.model import Shard
from trainer.compute.result import UpdateResult
from trainer.compute.schedule import Kind, Op, schedule
from trainer.compute.transport import Channel, Group
from trainer.errors import CursorError, NotFiniteError, ProtocolError

OnOp = Callable[[int, int, str], None]

_BLOCK = 1 << 22  # elements squared at a time, so that their FP64 copies stay small


def build_optimizer(shard: Shard, recipe: Recipe) -> AdamW:
    """AdamW over the shard: group 0 the matrices with decay, group 1 the vectors without.

    The plain loop over tensors, because it gives the same bits on every CPU build, and the fused kernel others.
    """
    matrices = [p for p in shard.parameters() if p.dim() > 1]
    vectors = [p for p in shard.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=recipe.rate, betas=recipe.betas, eps=recipe.eps, foreach=False, fused=False)


@dataclass(slots=True)
class _Open:
    """A microbatch whose backward is to come: both ends of its graph, and what the head left for it."""

    source: Tensor
    result: Tensor
    head_grad: Tensor | None = None
    result_grad: Tensor | None = None


class Step:
    """Makes updates of one shard, together with the other members of ``group``.

    Args:
        shard: this worker's part, on the device that the group puts tensors on.
        optimizer: of ``build_optimizer``; may have been restored.
        group: one member a shard; its rank is the shard's index.
        owners: the partition, from :func:`trainer.compute.config.partition`.
        recompute: compute the inside of each layer again in backward instead of keeping it. Changes no bit.
        dropout: what is dropped in training; None: nothing.
        on_op: called as ``on_op(update, microbatch, kind)`` after each forward, head and backward, when its message
            is on its way; what it raises ends the update before any weight changes.

    Raises:
        UsageError: shard, group and partition do not belong together.
    """

    def __init__(
        self,
        shard: Shard,
        optimizer: AdamW,
        group: Group,
        owners: Sequence[Ownership],
        recipe: Recipe,
        *,
        recompute: bool = True,
        dropout: Dropout | None = None,
        on_op: OnOp | None = None,
    ) -> None:
        if len(owners) != group.world:
            raise UsageError(
                "training step", f"{len(owners)} shards in the partition, {group.world} workers in the group"
            )
        own = owners[group.rank]
        names = [name for name, _ in shard.named_parameters()]
        if names != [name for name, _ in own.tensors]:
            raise UsageError(
                "training step", f"worker {group.rank} holds layers {shard.lo} to {shard.hi}, not its shard"
            )
        self.shard, self.optimizer, self.group, self.recipe = shard, optimizer, group, recipe
        self.owners, self.recompute, self.dropout, self.on_op = tuple(owners), recompute, dropout, on_op
        self._names = {parameter: name for name, parameter in shard.named_parameters()}
        at_head = {shard.model.norm.weight, shard.head_weight} if shard.head else set()
        self._inner = [p for p in shard.parameters() if p not in at_head]
        self._open: dict[int, _Open] = {}
        self._losses: list[float] = []

    def run(self, update: int, batch: Batch) -> UpdateResult:
        """Make update ``update`` (counted from 1) with ``batch``, which is the same on every worker.

        Raises:
            CursorError: the optimizer has not made exactly the updates before it.
            ProtocolError: another worker has other numbers or another plan.
            NotFiniteError: the gradient is not finite. No weight was changed by any worker, as in all cases above.
            PeerLostError: another worker is gone.
        """
        began, traffic = perf_counter(), self.group.traffic
        self.check_cursors(update)
        self.optimizer.zero_grad(set_to_none=True)
        self._open, self._losses = {}, []
        for op in schedule(self.group.world, len(batch.microbatches))[self.group.rank]:
            self._do(op, update, batch)
        loss, norm = self._agree(update, batch)
        coef = self.clip(norm)
        rate = self.recipe.rate_at(update)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.group.drain()
        now = self.group.traffic
        return UpdateResult(
            update=update,
            loss=loss,
            norm=norm,
            coef=coef,
            denominator=batch.denominator,
            rate=rate,
            sent_bytes=now.sent - traffic.sent,
            received_bytes=now.received - traffic.received,
            ms=1000 * (perf_counter() - began),
        )

    def _do(self, op: Op, update: int, batch: Batch) -> None:
        micro = batch.microbatches[op.micro]
        if op.kind is Kind.FORWARD:
            self.forward(update, op.micro, micro)
        elif op.kind is Kind.HEAD:
            self.head(update, op.micro, micro, self.divisor(batch, op.micro))
        else:
            self.backward(update, op.micro)
        if self.on_op is not None:
            self.on_op(update, op.micro, op.kind.value)

    # The work on one microbatch.

    def forward(self, update: int, index: int, micro: Microbatch) -> None:
        """Through this shard's layers, and on to the next rank; from the last one back to the head."""
        group, shard = self.group, self.shard
        if group.rank == 0:
            source = shard.embed(self._ids(micro))
        else:
            shape = (*micro.shape, shard.cfg.hidden)
            source = group.recv(shape, shard.dtype, group.rank - 1, Channel.ACTIVATION, update, index).requires_grad_()
        dropping = None if self.dropout is None else partial(self.dropout.begin, update, index)
        result = shard.body(source, recompute=self.recompute, dropping=dropping)
        self._open[index] = _Open(source, result)
        if group.world > 1:
            group.send(result, (group.rank + 1) % group.world, Channel.ACTIVATION, update, index)

    def head(self, update: int, index: int, micro: Microbatch, divisor: float) -> None:
        """Loss of the microbatch and the gradients of the head; the gradient of its input goes to the last rank."""
        group, shard, work = self.group, self.shard, self._open[index]
        last = group.world - 1
        if last:
            hidden = group.recv(work.result.shape, shard.dtype, last, Channel.ACTIVATION, update, index)
        else:
            hidden = work.result.detach()
        hidden.requires_grad_()
        weights = torch.tensor([row[1:] for row in micro.weights], dtype=torch.float32, device=hidden.device)
        loss = (shard.token_losses(hidden, self._ids(micro)) * weights).sum() / divisor
        norm_weight, head_weight = shard.model.norm.weight, shard.head_weight
        grad, norm_grad, head_grad = torch.autograd.grad(loss, (hidden, norm_weight, head_weight))
        self._losses.append(float(loss.detach()))
        self.accumulate(norm_weight, norm_grad)
        if shard.cfg.tied:
            work.head_grad = head_grad  # kept until the embedding's own gradient is there
        else:
            self.accumulate(head_weight, head_grad)
        if last:
            group.send(grad, last, Channel.GRADIENT, update, index)
        else:
            work.result_grad = grad

    def backward(self, update: int, index: int) -> None:
        """Gradients of this shard's layers; the gradient of its input goes to the rank before."""
        group, work = self.group, self._open.pop(index)
        grad = work.result_grad
        if grad is None:
            after = (group.rank + 1) % group.world
            grad = group.recv(work.result.shape, self.shard.dtype, after, Channel.GRADIENT, update, index)
        if group.rank:
            source_grad, *grads = torch.autograd.grad(work.result, (work.source, *self._inner), grad)
            group.send(source_grad, group.rank - 1, Channel.GRADIENT, update, index)
            self._add(grads)
        elif not self.shard.cfg.tied:
            self._add(torch.autograd.grad(work.result, self._inner, grad))
        else:
            embedding = self.shard.head_weight
            used, *grads = torch.autograd.grad(work.result, (embedding, *self._inner), grad)
            assert work.head_grad is not None
            self.accumulate_tied(embedding, work.head_grad, used)
            self._add(grads)

    def _add(self, grads: Sequence[Tensor]) -> None:
        for parameter, grad in zip(self._inner, grads, strict=True):
            self.accumulate(parameter, grad)

    def accumulate(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Add one microbatch's gradient of one tensor."""
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)

    def accumulate_tied(self, parameter: nn.Parameter, as_head: Tensor, as_embedding: Tensor) -> None:
        """Add one microbatch's gradient of a weight that is used twice, once: the sum of both uses."""
        self.accumulate(parameter, as_head + as_embedding)

    # What all shards have to agree on.

    def divisor(self, batch: Batch, micro: int) -> float:
        """What the weighted losses of microbatch ``micro`` are divided by: the denominator of the whole update."""
        return batch.denominator

    def norm(self, squares: Sequence[Sequence[float]]) -> float:
        """Norm of the whole gradient from the square sums of all tensors, by rank."""
        return sqrt(fsum(square for own in squares for square in own))

    def clip(self, norm: float) -> float:
        """Scale this shard's gradients so that the whole gradient's norm is at most the recipe's; return the factor."""
        coef = min(1.0, self.recipe.max_norm / (norm + 1e-6))
        for parameter in self._names:
            assert parameter.grad is not None
            parameter.grad.mul_(coef)
        return coef

    def check_cursors(self, update: int) -> None:
        """Raise CursorError unless every tensor's optimizer counter says that ``update - 1`` updates were made."""
        for parameter, name in self._names.items():
            state = self.optimizer.state.get(parameter)
            made = int(state["step"]) if state else 0
            if made != update - 1:
                raise CursorError(
                    f"update {update}, tensor {name}",
                    f"its optimizer counter says {made} updates were made, not {update - 1}",
                    "restore a checkpoint, or go on with the update after its step",
                )

    def _agree(self, update: int, batch: Batch) -> tuple[float, float]:
        """Exchange denominator, rate, loss and square sums in one message; return loss and norm."""
        squares = [square_sum(p.grad) for p in self._names if p.grad is not None]
        shared = (batch.denominator, self.recipe.rate_at(update))
        loss = fsum(self._losses)  # of the rank with the head; nothing elsewhere
        sizes = [3 + len(owner.tensors) for owner in self.owners]
        all_values = self.group.exchange((*shared, loss, *squares), sizes, update)
        for rank, values in enumerate(all_values):
            for what, mine, theirs in zip(("denominator", "learning rate"), shared, values, strict=False):
                if mine.hex() != theirs.hex():
                    raise ProtocolError(
                        f"{what} of update {update}",
                        f"{theirs.hex()} on shard {rank}, {mine.hex()} on shard {self.group.rank}",
                        "the workers follow different plans; abort the group and start a fresh one",
                    )
        sums = [values[3:] for values in all_values]
        bad = [
            name
            for owner, own in zip(self.owners, sums, strict=True)
            for (name, _), square in zip(owner.tensors, own, strict=True)
            if not isfinite(square)
        ]
        if bad or not isfinite(all_values[0][2]):
            raise NotFiniteError(
                f"update {update}", f"loss {all_values[0][2]}; gradients not finite: {', '.join(bad) or 'none'}"
            )
        return all_values[0][2], self.norm(sums)

    def _ids(self, micro: Microbatch) -> Tensor:
        return torch.tensor(micro.ids, dtype=torch.int64, device=self.group.device)


def square_sum(tensor: Tensor) -> float:
    """Sum of squares: each row (last dimension) in FP64, the rows together correctly rounded, in whatever order."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    sums: list[float] = []
    count = max(1, _BLOCK // rows.shape[1])
    for first in range(0, rows.shape[0], count):
        sums += rows[first : first + count].double().square_().sum(-1).tolist()
    return fsum(sums)
