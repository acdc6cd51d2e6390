"""Who owns what: arithmetic that the controller does without torch."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from trainer.compute.config import DEFAULT_CUTS, PRESETS, Config, Recipe, param_table, partition


@pytest.mark.parametrize(
    ("preset", "parameters", "tensors"),
    [("demo", 820_864, 38), ("smollm2-135m", 134_515_008, 272), ("smollm2-1.7b", 1_711_376_384, 218)],
)
def test_each_preset_has_its_published_size(preset: str, parameters: int, tensors: int) -> None:
    (only,) = partition(PRESETS[preset], ())
    assert (only.parameters, len(only.tensors)) == (parameters, tensors)
    assert only.tensors == param_table(PRESETS[preset])


@pytest.mark.parametrize(
    ("preset", "first", "second"),
    [
        ("demo", 427_136, 393_728),
        ("smollm2-135m", 77_873_472, 56_641_536),
        ("smollm2-1.7b", 838_907_904, 872_468_480),
    ],
)
def test_the_default_cut_splits_each_preset_in_two(preset: str, first: int, second: int) -> None:
    shards = partition(PRESETS[preset], DEFAULT_CUTS[preset])
    assert [shard.parameters for shard in shards] == [first, second]
    assert [shard.head for shard in shards] == [True, False]


def test_a_parameter_is_twelve_bytes_stored_and_sixteen_in_training() -> None:
    zero, one = partition(PRESETS["smollm2-1.7b"], DEFAULT_CUTS["smollm2-1.7b"])
    assert (zero.stored_bytes, one.stored_bytes) == (10_066_894_848, 10_469_621_760)
    assert zero.stored_bytes + one.stored_bytes == 20_536_516_608
    assert zero.training_bytes + one.training_bytes == 27_382_022_144


def test_tensors_have_the_names_of_public_checkpoints() -> None:
    names = [name for name, _ in param_table(PRESETS["demo"])]
    assert names[0] == "model.embed_tokens.weight"
    assert names[1:10] == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]
    assert names[-1] == "model.norm.weight"


def test_an_untied_head_is_a_tensor_of_shard_0() -> None:
    cfg = Config(vocab=10, hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, tied=False)
    zero, one = partition(cfg, (1,))
    assert ("lm_head.weight", (10, 8)) in zero.tensors
    assert all(not name.startswith("lm_head") for name, _ in one.tensors)


@given(st.sets(st.integers(1, 23)))
def test_every_partition_owns_every_tensor_exactly_once(cuts: set[int]) -> None:
    cfg = PRESETS["smollm2-1.7b"]
    shards = partition(cfg, sorted(cuts))
    owned = [entry for shard in shards for entry in shard.tensors]
    assert len(owned) == len(set(owned)) == 218
    assert set(owned) == set(param_table(cfg))
    assert [shard.index for shard in shards] == list(range(len(cuts) + 1))
    assert all(a.last == b.first for a, b in pairwise(shards))


@pytest.mark.parametrize("cuts", [(0,), (4,), (2, 2), (3, 1), (-1,), (9,)])
def test_cuts_that_leave_a_shard_empty_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="without layers"):
        partition(PRESETS["demo"], cuts)


@pytest.mark.parametrize(
    "wrong", [{"heads": 3}, {"kv_heads": 3}, {"layers": 0}, {"hidden": 4, "heads": 4}, {"vocab": -1}]
)
def test_shapes_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    fits = {"vocab": 10, "hidden": 32, "intermediate": 16, "layers": 2, "heads": 4, "kv_heads": 2}
    Config(**fits)
    with pytest.raises(UsageError):
        Config(**{**fits, **wrong})


def test_the_rate_grows_over_the_warmup_and_then_stays() -> None:
    assert [Recipe(rate=0.5, warmup=4).rate_at(u) for u in (1, 2, 3, 4, 5, 64)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    assert Recipe(rate=0.5).rate_at(1) == 0.5


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"max_norm": -1.0}, {"weight_decay": -0.1}, {"rate": float("nan")}])
def test_recipes_that_cannot_be_followed_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Recipe(**wrong)  # type: ignore[arg-type]


def test_the_controllers_modules_never_import_torch() -> None:
    names = ("config", "batch", "schedule", "numerics")
    modules = ", ".join(["trainer.errors", *(f"trainer.compute.{name}" for name in names)])
    code = f"import sys, {modules}; trainer.compute.numerics.env_for('native'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
