"""What a group must have in common before any of its workers makes an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckptstore import Checkpoint, Digest
from ckptstore.format import values
from ckptstore.format.progress import Progress
from tests.support.demo import demo_plan
from trainer.lifecycle.admission import canary, check_bindings, check_ownership
from trainer.lifecycle.expect import NotAsPlannedError
from trainer.workers.events import Event, make

BINDING = {
    "threads": 1,
    "compute": "bfloat16",
    "torch": "2.13.0",
    "env.MKL_CBWR": "AUTO,STRICT",
    "canary.bfloat16": "aa",
    "canary.float32": "bb",
}


def joined(shard: int, **changes: Any) -> Event:
    owner = demo_plan().owners[shard]
    fields = {
        "binding": BINDING,
        "parameters": owner.parameters,
        "tensors": [name for name, _ in owner.tensors],
        "staged_sources": True,
        "fenced": True,
    }
    return make("joined", {**fields, **changes})


def test_workers_that_own_the_model_once_are_admitted() -> None:
    owned = check_ownership(demo_plan(), [joined(0), joined(1)])
    assert [(one["shard"], one["parameters"], one["head"]) for one in owned] == [
        (0, 427_136, True),
        (1, 393_728, False),
    ]
    assert sum(one["training_bytes"] for one in owned) == 16 * 820_864


def _without_last(tensors: list[str]) -> list[str]:
    return tensors[:-1]


def _with_head(tensors: list[str]) -> list[str]:
    return [*tensors, "model.norm.weight"]


def _renamed(tensors: list[str]) -> list[str]:
    return [*tensors[:-1], "model.layers.9.mlp.down_proj.weight"]


@pytest.mark.parametrize("change", [_without_last, _with_head, _renamed])
def test_a_tensor_that_nobody_holds_or_two_do_is_refused(change: Callable[[list[str]], list[str]]) -> None:
    one = joined(1, tensors=change(joined(1)["tensors"]))
    with pytest.raises(NotAsPlannedError, match="tensors that workers hold"):
        check_ownership(demo_plan(), [joined(0), one])


def test_workers_that_have_each_others_tensors_are_refused() -> None:
    with pytest.raises(NotAsPlannedError, match="tensors of shard 0"):
        check_ownership(demo_plan(), [joined(1), joined(0)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parameters": 1}, "parameters of shard 1: expected 393728, seen 1"),
        ({"staged_sources": False}, "shard 1 runs the sources that were staged on its host: expected True, seen False"),
        ({"fenced": False}, "fence of shard 1 .*: expected True, seen False"),
    ],
)
def test_a_worker_with_other_sources_or_without_its_fence_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(NotAsPlannedError, match=says):
        check_ownership(demo_plan(), [joined(0), joined(1, **changes)])


@pytest.mark.parametrize(
    ("field", "value"), [("canary.float32", "cc"), ("canary.bfloat16", None), ("threads", 2), ("threads", True)]
)
def test_a_worker_that_computes_otherwise_is_refused_by_what_differs(field: str, value: object) -> None:
    other = joined(1, binding={**BINDING, field: value})
    says = rf"binding of shard 1: expected that of shard 0, seen {field} is {value}, expected {BINDING[field]}"
    with pytest.raises(NotAsPlannedError, match=says):
        check_bindings([joined(0), other], None)


def test_versions_and_switches_alone_refuse_nobody() -> None:
    other = joined(1, binding={**BINDING, "torch": "2.14.0", "env.MKL_CBWR": None})
    assert check_bindings([joined(0), other], None) == BINDING
    assert canary(BINDING) == {"canary.bfloat16": "aa", "canary.float32": "bb"}


def test_workers_that_compute_alike_but_not_as_the_checkpoint_was_made_are_refused() -> None:
    both = [joined(shard, binding={**BINDING, "canary.float32": "cc"}) for shard in range(2)]
    check_bindings(both, None)
    with pytest.raises(NotAsPlannedError, match="binding of shard 0: expected that of the checkpoint at step 16"):
        check_bindings(both, checkpoint(BINDING))
    assert check_bindings([joined(0), joined(1)], checkpoint(BINDING)) == BINDING


def checkpoint(binding: dict[str, Any]) -> Checkpoint:
    some = Digest.of(b"some")
    return Checkpoint(
        step=16,
        parent=None,
        run=some,
        state_root=some,
        rng_root=some,
        shards=(some, some),
        ties=(),
        replicas=(),
        progress=Progress(),
        binding=values.to_json(binding),
        files=None,
        deviations=(),
    )
