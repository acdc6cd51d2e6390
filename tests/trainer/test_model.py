"""The decoder and its shards."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ckptstore.errors import UsageError
from trainer.compute.config import DEFAULT_CUTS, PRESETS, Config, param_table, partition
from trainer.compute.model import Places, Shard, initialise

CFG = Config(vocab=50, hidden=32, intermediate=48, layers=3, heads=4, kv_heads=2)

pytestmark = pytest.mark.usefixtures("exact_arithmetic")


def built(cfg: Config = CFG, compute: str = "float32", std: float = 0.2) -> Shard:
    model = Shard(cfg, 0, cfg.layers, True, compute)
    initialise(model, seed=5, std=std)
    return model


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, CFG.vocab, (rows, length), generator=torch.Generator().manual_seed(9))


def test_the_large_shards_on_the_meta_device_have_the_counts_of_the_table() -> None:
    cfg = PRESETS["smollm2-1.7b"]
    with torch.device("meta"):
        shards = [Shard(cfg, o.first, o.last, o.head) for o in partition(cfg, DEFAULT_CUTS["smollm2-1.7b"])]
    counts = [sum(p.numel() for p in shard.parameters()) for shard in shards]
    assert counts == [838_907_904, 872_468_480]
    assert [12 * count for count in counts] == [10_066_894_848, 10_469_621_760]
    assert {p.device.type for shard in shards for p in shard.parameters()} == {"meta"}
    assert {p.dtype for shard in shards for p in shard.parameters()} == {torch.float32}


def test_a_shard_has_its_own_tensors_under_the_names_of_the_whole_model_and_no_others() -> None:
    for own in partition(CFG, (1, 2)):
        shard = Shard(CFG, own.first, own.last, own.head)
        assert [(n, tuple(p.shape)) for n, p in shard.named_parameters()] == list(own.tensors)
        assert list(shard.state_dict()) == [name for name, _ in own.tensors]


def test_initial_weights_do_not_depend_on_the_partition_and_draw_from_no_global_generator() -> None:
    before = torch.get_rng_state()
    whole = built().state_dict()
    for own in partition(CFG, (1, 2)):
        shard = Shard(CFG, own.first, own.last, own.head)
        initialise(shard, seed=5, std=0.2)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in shard.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_forgotten_tensor_is_loud() -> None:
    shard = Shard(CFG, 0, 3, True)
    assert all(tensor.isnan().all() for tensor in shard.state_dict().values())


def test_shards_in_a_row_are_the_whole_model_bit_for_bit(compute: str) -> None:
    model, ids = built(compute=compute), ids_of(2, 11)
    hidden = model.embed(ids)
    for own in partition(CFG, (1, 2)):
        shard = Shard(CFG, own.first, own.last, own.head, compute)
        initialise(shard, seed=5, std=0.2)
        hidden = shard.body(hidden)
    assert torch.equal(hidden, model.body(model.embed(ids)))


def test_nothing_looks_into_the_future() -> None:
    model, ids = built(), ids_of(1, 12)
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % CFG.vocab
    a, b = (model.logits(model.body(model.embed(x))) for x in (ids, changed))
    assert torch.equal(a[:, :8], b[:, :8])
    assert not torch.equal(a[:, 8:], b[:, 8:])


def test_attention_agrees_with_the_attention_of_torch() -> None:
    model, x = built(), torch.randn(2, 9, CFG.hidden, generator=torch.Generator().manual_seed(2))
    attention = model.model.layers["1"].self_attn
    b, t, d = 2, 9, CFG.head_dim
    q, k, v = (
        F.linear(x, p.weight).view(b, t, -1, d).transpose(1, 2)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    # The rotary embedding as a complex rotation of pairs (i, i + d/2).
    angles = torch.outer(torch.arange(t), CFG.rope_theta ** -(torch.arange(0, d, 2) / d))
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.view_as_complex(torch.stack(z.chunk(2, -1), -1)) * turn for z in (q, k))
    q, k = (torch.cat((z.real, z.imag), -1) for z in (q, k))
    expected = (
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(b, t, -1)
    )
    both = torch.cat((angles, angles), -1)
    places = Places(both.cos(), both.sin(), torch.ones(t, t, dtype=torch.bool).triu(1))
    got = attention(x, places, lambda weight: weight)
    assert torch.allclose(got, F.linear(expected, attention.o_proj.weight), atol=1e-5)


def test_token_losses_are_the_cross_entropy_of_torch() -> None:
    model, ids = built(), ids_of(3, 7)
    hidden = model.body(model.embed(ids))
    expected = F.cross_entropy(model.logits(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    assert torch.allclose(model.token_losses(hidden, ids).flatten(), expected, atol=1e-5)
    assert model.token_losses(hidden, ids).shape == (3, 6)


def test_logits_and_losses_are_float32_whatever_is_computed_in(compute: str) -> None:
    model, ids = built(compute=compute), ids_of(1, 5)
    hidden = model.body(model.embed(ids))
    assert hidden.dtype == model.dtype == getattr(torch, compute)
    assert model.logits(hidden).dtype == model.token_losses(hidden, ids).dtype == torch.float32


def test_casts_that_are_held_change_no_bit_and_are_let_go(compute: str) -> None:
    model, ids = built(compute=compute), ids_of(1, 6)
    with torch.no_grad():
        plain = model.logits(model.body(model.embed(ids)))
    with model.holding_casts():
        held = model.logits(model.body(model.embed(ids)))
    assert torch.equal(plain, held)
    initialise(model, seed=6)
    assert not torch.equal(model.logits(model.body(model.embed(ids))), held)
    assert not held.requires_grad
    assert model.logits(model.body(model.embed(ids))).requires_grad


def test_the_whole_table_is_the_whole_module() -> None:
    for cfg in (CFG, Config(vocab=50, hidden=32, intermediate=48, layers=2, heads=2, kv_heads=2, tied=False)):
        with torch.device("meta"):
            shard = Shard(cfg, 0, cfg.layers, True)
        assert tuple((n, tuple(p.shape)) for n, p in shard.named_parameters()) == param_table(cfg)


@pytest.mark.parametrize(("lo", "hi", "head"), [(0, 0, True), (0, 4, True), (1, 2, True), (0, 2, False), (2, 1, False)])
def test_layers_that_are_no_shard_are_refused(lo: int, hi: int, head: bool) -> None:
    with pytest.raises(UsageError, match="no such shard"):
        Shard(CFG, lo, hi, head)


def test_an_unknown_compute_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="float16"):
        Shard(CFG, 0, 1, True, "float16")
