"""What workers must have in common, or share without overlap, before any of them makes an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore import Checkpoint, Deviation
from ckptstore.format.canonical import Json
from trainer.compute import numerics
from trainer.compute.config import Ownership, param_table
from trainer.compute.numerics import Plain
from trainer.lifecycle.expect import require, unexpected
from trainer.preparation.plan import Plan
from trainer.workers.events import Event


def check_ownership(
    plan: Plan, joined: Sequence[Event], owners: Sequence[Ownership] | None = None
) -> list[dict[str, Any]]:
    """Every tensor of the model is on exactly one worker, and all run the frozen sources, each behind its fence.

    Args:
        plan: says what the model is.
        joined: the ``joined`` event of each worker, by shard.
        owners: who owns what of it; None: as the plan says.

    Returns:
        What each owns, as plain values.

    Raises:
        NotAsPlannedError: a tensor is missing, or held twice, or by another worker than planned; or a worker runs other
            sources, or could reach other hosts' folders.
    """
    owners = plan.owners if owners is None else owners
    require("tensors that workers hold", sorted(n for n, _ in param_table(plan.config)), sorted(_held(joined)))
    for owner, event in zip(owners, joined, strict=True):
        require(f"tensors of shard {owner.index}", [name for name, _ in owner.tensors], event["tensors"])
        require(f"parameters of shard {owner.index}", owner.parameters, event["parameters"])
        require(f"shard {owner.index} runs the sources that were staged on its host", True, event["staged_sources"])
        require(f"the fence of shard {owner.index} around other hosts' folders is up", True, event["fenced"])
    return [
        {
            "shard": owner.index,
            "first_layer": owner.first,
            "last_layer": owner.last - 1,
            "head": owner.head,
            "tensors": len(owner.tensors),
            "parameters": owner.parameters,
            "stored_bytes": owner.stored_bytes,
            "training_bytes": owner.training_bytes,
        }
        for owner in owners
    ]


def check_bindings(joined: Sequence[Event], stored: Checkpoint | None) -> Mapping[str, Plain]:
    """The numerical binding that all workers measured.

    Args:
        joined: the ``joined`` event of each worker, by shard.
        stored: the checkpoint that they are going to restore, if there is one; they must compute as it was made.

    Raises:
        NotAsPlannedError: a worker computes otherwise; names what differs.
    """
    bindings: list[Mapping[str, Plain]] = [event["binding"] for event in joined]
    checks = [("shard 0", bindings[0], shard) for shard in range(1, len(bindings))]
    if stored is not None:
        made = numerics.stored_binding(stored.binding)
        checks += [(f"the checkpoint at step {stored.step}", made, shard) for shard in range(len(bindings))]
    for name, expected, shard in checks:
        wrong = [one for one in numerics.compare(expected, bindings[shard]) if one.refuse]
        if wrong:
            texts = "; ".join(map(str, wrong))
            raise unexpected(f"numerical binding of shard {shard}", f"that of {name}", texts)
    return bindings[0]


def canary(binding: Mapping[str, Plain]) -> dict[str, Plain]:
    """The measured part of a binding: digests by name."""
    return {name: value for name, value in binding.items() if name.startswith("canary.")}


def drift(parent: Checkpoint | None, binding: Json) -> tuple[Deviation, ...]:
    """What of a numerical binding is not as in the parent of the checkpoint that it is for."""
    if parent is None:
        return ()
    found = numerics.compare(numerics.stored_binding(parent.binding), numerics.stored_binding(binding))
    return tuple(Deviation(f"binding.{one.field}", repr(one.expected), repr(one.actual)) for one in found)


def _held(joined: Sequence[Event]) -> list[str]:
    return [name for event in joined for name in event["tensors"]]
