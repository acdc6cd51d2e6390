"""A run is frozen before it starts: plan, inputs and sources become trees of the operator's store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore import Digest, Store
from trainer.preparation import staged
from trainer.preparation.plan import KILL, Plan
from trainer.preparation.planning import Profile
from trainer.preparation.prepare import prepare


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen run: its plan, the digests of its trees by the name of their folder, and the prepared identity."""

    plan: Plan
    trees: Mapping[str, Digest]
    identity: Digest


def freeze(
    profile: Profile,
    folder: Path,
    operator: Store,
    *,
    compute: str,
    kernels: str = "native",
    mode: str = KILL,
    start: Path | None = None,
) -> Frozen:
    """Prepare a run below ``folder`` and store what was prepared.

    Arguments and errors beside those of the store are those of :func:`trainer.preparation.prepare.prepare`.
    """
    prepared = prepare(profile, folder, compute=compute, kernels=kernels, mode=mode, start=start)
    directories = {
        staged.PLAN: prepared.plan_dir,
        staged.INPUTS: prepared.inputs_dir,
        staged.SOURCES: prepared.sources_dir,
    }
    trees = {name: operator.put_tree(directory) for name, directory in directories.items()}
    return Frozen(prepared.plan, trees, operator.put_preparation(*trees.values()))


def free_ref(store: Store, wanted: str) -> str:
    """A ref that the store does not have yet, so that the first checkpoint of a run never has a parent."""
    number, name = 1, wanted
    while store.refs.head(name) is not None:
        number += 1
        name = f"{wanted}-{number}"
    return name
