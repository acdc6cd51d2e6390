"""One worker's part of a run: its shard, optimizer and generators, and how each order is carried out. Uses torch."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import ckptstore
from ckptstore import Attempt, Checkpoint, Cursor, Digest, TrainingState
from ckptstore.errors import RefusedError, UsageError
from trainer.compute import fingerprint, generate, numerics, recomputation, weights
from trainer.compute.config import partition
from trainer.compute.model import Shard
from trainer.compute.step import Step, build_optimizer
from trainer.compute.transport import Group
from trainer.errors import CursorError, NumericsError
from trainer.preparation import inputs as prepared
from trainer.preparation import prepare, staged
from trainer.scoring.evaluation import asked_documents, make_result, recomputed_answers, scored_documents
from trainer.workers.behind import Behind
from trainer.workers.events import Emitter
from trainer.workers.exits import HOLD_EXPIRED
from trainer.workers.orders import Arm, Evaluate, Flip, Hold, Order, Restore, Save, SaveBehind, Start, Train

OPTIMIZER = "adamw"
CURSOR = "data"
SIGN = 31  # the bit of an FP32 number that sabotage flips


class Session:
    """The state of a worker from joining its group to leaving it.

    Args:
        host: the host's folder, with the staged ``plan/`` and ``inputs/``; paths of stores are relative to it.
        identity: the prepared identity, which goes into every checkpoint.
        events: where everything that happens is reported.
        join: called with the plan's timeout in seconds once this process is set up; returns this worker's end of the
            group.
        fenced: whether this process can only reach its host's folder of the run, for the report.
        cuts: the layers at which the group's second and each further shard begins; None: those of the plan.

    Raises:
        NumericsError: the process was not started with the environment that the plan needs.
        PeerLostError: the others did not come.
    """

    def __init__(
        self,
        host: Path,
        identity: Digest,
        events: Emitter,
        join: Callable[[float], Group],
        *,
        fenced: bool = False,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.host, self.identity, self.events = host, identity, events
        plan = self.plan = prepare.read_plan(host / staged.PLAN)
        numerics.apply(threads=plan.numerics.threads, profile=plan.numerics.kernels)
        self.binding = numerics.binding(plan.numerics.compute, recompute=plan.numerics.recompute)
        self.inputs = prepared.load(plan, host / staged.INPUTS)
        self.group = join(plan.timeouts.group)
        owners = self.owners = plan.owners if cuts is None else partition(plan.config, cuts)
        if self.group.world != len(owners):
            raise UsageError("worker", f"a group of {self.group.world} for {len(owners)} shards", "set WORLD_SIZE")
        own = self.own = owners[self.group.rank]
        self.shard = Shard(plan.config, own.first, own.last, own.head, plan.numerics.compute)
        self.optimizer = build_optimizer(self.shard, plan.recipe)
        self.state = TrainingState(model=self.shard, optimizer={OPTIMIZER: self.optimizer})
        self.step = Step(
            self.shard,
            self.optimizer,
            self.group,
            owners,
            plan.recipe,
            recompute=plan.numerics.recompute,
            dropout=plan.dropout,
            on_op=self._on_op,
        )
        self._hold: Hold | None = None
        self._restored: ckptstore.Restored | None = None
        self._behind = Behind("save")
        held = [(name, tuple(p.shape)) for name, p in self.shard.named_parameters()]
        self.events.emit(
            "joined",
            shard=self.group.rank,
            world=self.group.world,
            binding=self.binding,
            parameters=sum(prod(shape) for _, shape in held),
            tensors=[name for name, _ in held],
            fenced=fenced,
            staged_sources=all(
                Path(module.__file__ or "").resolve().is_relative_to((host / staged.SOURCES).resolve())
                for module in (ckptstore, staged)
            ),
        )

    def carry_out(self, order: Order) -> None:
        """Do what an order says; the event that says it is done comes last. Errors of all kinds end the worker."""
        match order:
            case Start():
                self._start()
            case Restore():
                self._restore(order)
            case Arm():
                self._arm()
            case Train():
                self._train(order)
            case Save():
                self._write(order, self.state, time.perf_counter())
            case SaveBehind():
                self._save_behind(order)
            case Flip():
                self._flip(order)
            case Evaluate():
                self._evaluate(order)
            case _:
                raise UsageError(f"order {type(order).__name__.lower()}", "it has no meaning after joining")

    def close(self) -> None:
        """Leave the group in an orderly way, once everything is saved."""
        self._behind.wait()
        self.group.close()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        traffic = self.group.traffic
        self.events.emit(
            "closed",
            peak_rss=peak if sys.platform == "darwin" else 1024 * peak,
            sent_bytes=traffic.sent,
            received_bytes=traffic.received,
        )

    def _start(self) -> None:
        """AdamW begins anew: the starting weights come alone. The generators get seeds of their own."""
        if self.owners != self.plan.owners:
            raise UsageError(
                "start",
                f"the starting weights are staged for {len(self.plan.owners)} shards, this group has other ones",
                "start with the plan's shards, and repartition a checkpoint",
            )
        path = self.host / staged.INPUTS / staged.weights_path(self.own.index)
        read = weights.load(self.shard, path, self.own.tensors)
        seed = hashlib.sha256(f"{self.plan.seed}/generators/{self.own.index}".encode()).digest()
        random.seed(int.from_bytes(seed[:8], "little"))
        np.random.seed(int.from_bytes(seed[8:12], "little"))
        torch.manual_seed(int.from_bytes(seed[16:23], "little"))
        self.events.emit("started", bytes_read=read)

    def _restore(self, order: Restore) -> None:
        began = time.perf_counter()
        store = ckptstore.open(self.host / order.store)
        checkpoint = store.checkpoint(order.root)
        if checkpoint.run != self.identity:
            raise RefusedError(
                f"checkpoint {order.root.short}",
                f"it is of the run {checkpoint.run}, this one was prepared as {self.identity}",
                "restore a checkpoint of this run, or stage what that one was prepared with",
            )
        if not order.drift:
            self._check_binding(order.root, checkpoint)
        self._restored = store.restore(order.root, self.state, shard=self.own.index)
        self.events.emit(
            "restored",
            root=str(order.root),
            step=checkpoint.step,
            bytes_read=self._restored.bytes_read,
            ms=1000 * (time.perf_counter() - began),
        )

    def _check_binding(self, root: Digest, checkpoint: Checkpoint) -> None:
        """NumericsError if this process computes otherwise than the one that made the checkpoint; names all fields."""
        found = numerics.compare(numerics.stored_binding(checkpoint.binding), self.binding)
        if any(one.refuse for one in found):
            raise NumericsError(
                f"checkpoint {root.short}",
                f"it was made with another numerical binding: {'; '.join(map(str, found))}",
                "go on where it was made, or allow for it with --allow-numerics-drift, which the next checkpoint tells",
            )

    def _arm(self) -> None:
        if self._restored is None:
            raise UsageError("arm check", "nothing was restored that the live state could be compared with")
        ckptstore.arm(self.state, self._restored)
        self.events.emit("armed", root=str(self._restored.root))

    def _train(self, order: Train) -> None:
        self._hold = order.hold
        for update, batch in self.inputs.batches(order.first, order.last):
            result = self.step.run(update, batch)
            taken = self.plan.fingerprinted(update)
            state = fingerprint.live_state(self.shard, self.optimizer) if taken else {}
            self.events.emit("update", **result.to_plain(), state={name: str(one) for name, one in state.items()})
            self._behind.check()
        self._hold = None
        self.events.emit("trained", first=order.first, last=order.last)

    def _save_behind(self, order: SaveBehind) -> None:
        """Copy the state, and save the copy behind what comes next. At most one copy exists at a time."""
        self._behind.wait()
        began = time.perf_counter()
        snapshot = ckptstore.Snapshot.of(self.state)
        self.step.check_cursors(order.step + 1)
        ms = 1000 * (time.perf_counter() - began)
        # Taken out of the closure as soon as it is saved, so that its memory is there for the next one.
        held = [snapshot]
        self._behind.do(lambda: self._write(order, held.pop(), time.perf_counter()))
        self.events.emit("snapshot", step=order.step, bytes=snapshot.nbytes, ms=ms)

    def _write(self, order: Save | SaveBehind, state: TrainingState | ckptstore.Snapshot, began: float) -> None:
        if isinstance(order, Save):
            self.step.check_cursors(order.step + 1)
        samples = sum(len(self.plan.update(number).documents) for number in range(1, order.step + 1))
        if samples % order.step:
            raise CursorError(f"step {order.step}", f"{samples} samples are no equal number an update")
        receipt = ckptstore.open(self.host / order.store).save_shard(
            state,
            Attempt.parse(order.attempt),
            step=order.step,
            index=self.own.index,
            count=self.group.world,
            run=self.identity,
            binding=self.binding,
            cursors={CURSOR: Cursor("samples", samples, per_step=samples // order.step)},
            files=order.files,
        )
        self.events.emit(
            "saved",
            step=order.step,
            shard_digest=str(receipt.shard),
            receipt=receipt.encode().decode(),
            ms=1000 * (time.perf_counter() - began),
        )

    def _flip(self, order: Flip) -> None:
        """Flip the sign of the largest first moment of the last matrix, if this is the shard that was named."""
        place = None
        if order.shard == self.own.index:
            name, parameter = [(n, p) for n, p in self.shard.named_parameters() if p.dim() > 1][-1]
            moment: torch.Tensor = self.optimizer.state[parameter]["exp_avg"]
            element = int(moment.abs().argmax())
            moment.view(torch.int32).view(-1)[element].bitwise_xor_(-(1 << SIGN))
            place = {"tensor": name, "role": "exp_avg", "element": element, "bit": SIGN}
        self.events.emit("flipped", place=place)

    def _evaluate(self, order: Evaluate) -> None:
        began = time.perf_counter()
        documents = [generate.Document(*self.inputs.scored(name)) for name in scored_documents(self.plan)]
        losses = generate.response_losses(self.shard, self.group, documents, order.update)
        scored = time.perf_counter()
        prompts = [self.inputs.prompt(name) for name in asked_documents(self.plan)]
        asked = self.plan.evaluation
        answers, again = recomputation.answer(
            self.shard,
            self.group,
            prompts,
            recomputed_answers(self.plan),
            decoding=asked.decoding,
            cap=asked.token_cap,
            end=self.inputs.tokenizer.end,
            step=order.update,
        )
        answered = time.perf_counter() - again.seconds
        result = make_result(self.inputs, order.update, losses, [(answer.ids, answer.ended) for answer in answers])
        self.events.emit(
            "evaluated",
            update=order.update,
            digest=str(result.digest),
            result=result.encode().decode(),
            margin=min(answer.margin for answer in answers),
            tokens=sum(len(answer.ids) for answer in answers),
            losses_ms=1000 * (scored - began),
            answers_ms=1000 * (answered - scored),
            recomputed={
                "cases": again.cases,
                "tokens": again.tokens,
                "steps": again.steps,
                "differs": again.differs,
                "ms": 1000 * again.seconds,
            },
        )

    def _on_op(self, update: int, microbatch: int, kind: str) -> None:
        """In the update of a drill, say what was done; at the fault point, wait for what is to happen."""
        hold = self._hold
        if hold is None or update != hold.update:
            return
        self.events.emit("op", update=update, microbatch=microbatch, kind=kind)
        if (microbatch, kind, self.own.index) != (hold.microbatch, "forward", hold.shard):
            return
        self.events.emit("fault_point", update=update, microbatch=microbatch, after=kind, seconds=hold.seconds)
        time.sleep(hold.seconds)
        self.events.emit("error", type="HoldExpired", message=f"held for {hold.seconds} s and nothing happened")
        os._exit(HOLD_EXPIRED)


def host_rendezvous(address: str, world: int, timeout: float) -> dist.Store:  # type: ignore[name-defined]
    """A store for the group to meet at, on a free port that the system chose; it has to live as long as the group."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, 0, world, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
