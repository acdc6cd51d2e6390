"""The decoder, one shard at a time: a module that has only the tensors that its shard owns.

Weights are FP32 and cast where they are used; norms, rotary embedding, softmax and cross-entropy are FP32. There is no
autocast, because its cache of casts would be hidden state. State dict keys are the names of the whole model, whatever
the shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ckptstore.errors import UsageError
from trainer.compute.config import Config, owned_tensors
from trainer.compute.dropout import Drop

Cast = Callable[[Tensor], Tensor]
Dropping = Callable[[int], Drop]

Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Keeps new keys and values [B, kv_heads, T, D]; returns those that the queries see, [B, kv_heads, L, D]."""


class Places(NamedTuple):
    """Positions as attention needs them, for T queries and L keys.

    Rotary cosines and sines, FP32 [..., T, head_dim]; which keys are ahead of a query, bool [..., T, L].
    """

    cos: Tensor
    sin: Tensor
    future: Tensor


COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Weight(nn.Module):
    """A named place for one FP32 tensor. It holds NaN until something is loaded, so a forgotten tensor is loud."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, torch.nan, dtype=torch.float32))


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key/value head."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        kv = cfg.kv_heads * cfg.head_dim
        self.heads, self.kv_heads, self.head_dim = cfg.heads, cfg.kv_heads, cfg.head_dim
        self.q_proj = Weight(cfg.hidden, cfg.hidden)
        self.k_proj = Weight(kv, cfg.hidden)
        self.v_proj = Weight(kv, cfg.hidden)
        self.o_proj = Weight(cfg.hidden, cfg.hidden)

    def forward(self, x: Tensor, places: Places, cast: Cast, keep: Keep | None = None) -> Tensor:
        b, t, _ = x.shape
        q = F.linear(x, cast(self.q_proj.weight)).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = F.linear(x, cast(self.k_proj.weight)).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        v = F.linear(x, cast(self.v_proj.weight)).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = _rotate(q, places), _rotate(k, places)
        if keep is not None:
            k, v = keep(k, v)
        scores = (q @ self._spread(k).transpose(-1, -2)).float() * self.head_dim**-0.5
        shares = scores.masked_fill(places.future, -torch.inf).softmax(-1).to(x.dtype)
        mixed = (shares @ self._spread(v)).transpose(1, 2).reshape(b, t, -1)
        return F.linear(mixed, cast(self.o_proj.weight))

    def _spread(self, x: Tensor) -> Tensor:
        """[B, kv_heads, T, D] -> [B, heads, T, D]. Not repeat_interleave: its backward is not deterministic on CUDA."""
        b, _, t, d = x.shape
        groups = self.heads // self.kv_heads
        return x[:, :, None].expand(b, self.kv_heads, groups, t, d).reshape(b, self.heads, t, d)


class FeedForward(nn.Module):
    """The gated feed-forward block (SwiGLU)."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.gate_proj = Weight(cfg.intermediate, cfg.hidden)
        self.up_proj = Weight(cfg.intermediate, cfg.hidden)
        self.down_proj = Weight(cfg.hidden, cfg.intermediate)

    def forward(self, x: Tensor, cast: Cast) -> Tensor:
        gated = F.silu(F.linear(x, cast(self.gate_proj.weight))) * F.linear(x, cast(self.up_proj.weight))
        return F.linear(gated, cast(self.down_proj.weight))


class Layer(nn.Module):
    """Norm, attention, norm, feed-forward, each pair around a residual stream in the compute dtype."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.eps = cfg.rms_eps
        self.input_layernorm = Weight(cfg.hidden)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = Weight(cfg.hidden)
        self.mlp = FeedForward(cfg)

    def forward(
        self, x: Tensor, places: Places, cast: Cast, keep: Keep | None = None, drop: Drop | None = None
    ) -> Tensor:
        attended: Tensor = self.self_attn(_rms_norm(x, self.input_layernorm.weight, self.eps), places, cast, keep)
        x = x + (attended if drop is None else drop(attended))
        fed: Tensor = self.mlp(_rms_norm(x, self.post_attention_layernorm.weight, self.eps), cast)
        return x + (fed if drop is None else drop(fed))


class Trunk(nn.Module):
    """The part called ``model`` in tensor names."""

    def __init__(self, cfg: Config, first: int, last: int, head: bool) -> None:
        super().__init__()
        if head:
            self.embed_tokens = Weight(cfg.vocab, cfg.hidden)
        self.layers = nn.ModuleDict({str(n): Layer(cfg) for n in range(first, last)})
        if head:
            self.norm = Weight(cfg.hidden)


class Shard(nn.Module):
    """Layers ``[lo, hi)`` and, with ``head``, embedding, final norm and output head.

    The whole model is ``Shard(cfg, 0, cfg.layers, True)``.

    Args:
        cfg: shape of the whole model.
        lo, hi: the layers owned.
        head: owns both ends of the network; true exactly for the shard that starts at layer 0.
        compute: dtype of matrix products and of the residual stream, ``"bfloat16"`` or ``"float32"``.

    Under ``torch.device("meta")`` it has shapes and no memory.

    Raises:
        UsageError: the arguments name no shard.
    """

    def __init__(self, cfg: Config, lo: int, hi: int, head: bool, compute: str = "float32") -> None:
        super().__init__()
        if not 0 <= lo < hi <= cfg.layers or head != (lo == 0):
            raise UsageError(
                f"shard of layers {lo} to {hi}, head={head}", f"a model of {cfg.layers} layers has no such shard"
            )
        if compute not in COMPUTE_DTYPES:
            raise UsageError(f"compute dtype {compute!r}", f"it has to be one of {', '.join(COMPUTE_DTYPES)}")
        self.cfg, self.lo, self.hi, self.head, self.compute = cfg, lo, hi, head, compute
        self.dtype = COMPUTE_DTYPES[compute]
        self._held: dict[int, Tensor] | None = None
        self.model = Trunk(cfg, lo, hi, head)
        if head and not cfg.tied:
            self.lm_head = Weight(cfg.vocab, cfg.hidden)
        has = tuple((name, tuple(p.shape)) for name, p in self.named_parameters())
        assert has == owned_tensors(cfg, lo, hi, head=head), "the module and the parameter table disagree"

    @property
    def head_weight(self) -> nn.Parameter:
        """The output head [vocab, hidden]; the embedding itself if tied."""
        return self.model.embed_tokens.weight if self.cfg.tied else self.lm_head.weight

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [B, T] -> hidden states [B, T, hidden] in the compute dtype."""
        # The rows are looked up in FP32 and cast then, so the gradient of the table is summed in FP32.
        return F.embedding(ids, self.model.embed_tokens.weight).to(self.dtype)

    def body(self, x: Tensor, *, recompute: bool = False, dropping: Dropping | None = None) -> Tensor:
        """Hidden states [B, T, hidden] through the owned layers.

        Args:
            recompute: keep only the layers' inputs for backward.
            dropping: gives for the number of a layer what drops elements in one pass through it; None: nothing does.
        """
        places = make_places(self.cfg, x.shape[1], x.device)
        for number, layer in self.model.layers.items():
            given = (layer, x, places, *(() if dropping is None else (partial(dropping, int(number)),)))
            if recompute:
                x = checkpoint(self.layer, *given, use_reentrant=False, preserve_rng_state=True)
            else:
                x = self.layer(*given)
        return x

    def blocks(self, x: Tensor, places: Places, keeps: Sequence[Keep]) -> Tensor:
        """As :meth:`body`, for rows that also see keys and values of rows that came before them.

        Args:
            x: hidden states [B, T, hidden] of B pieces of texts, of T positions each.
            places: where these stand: shapes [B, 1, T, head_dim] and [B, 1, T, L].
            keeps: one for each owned layer, in order.
        """
        for layer, keep in zip(self.model.layers.values(), keeps, strict=True):
            x = layer(x, places, self._cast, keep)
        return x

    def layer(self, layer: nn.Module, x: Tensor, places: Places, begin: Callable[[], Drop] | None = None) -> Tensor:
        """One layer: the unit of recomputation. What drops elements is begun in it, and so again with it."""
        out: Tensor = layer(x, places, self._cast, drop=None if begin is None else begin())
        return out

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [..., hidden] -> FP32 logits [..., vocab]."""
        normed = _rms_norm(x, self.model.norm.weight, self.cfg.rms_eps)
        return F.linear(normed, self._cast(self.head_weight)).float()

    def token_losses(self, x: Tensor, ids: Tensor) -> Tensor:
        """Cross-entropy in nats, FP32 [B, T - 1], of tokens ``ids[:, 1:]`` given hidden states [B, T, hidden]."""
        logits = self.logits(x[:, :-1])
        chosen = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
        # Written out, because the backward of NLLLoss is not deterministic on CUDA.
        return logits.logsumexp(-1) - chosen

    @contextmanager
    def holding_casts(self) -> Iterator[None]:
        """For evaluation: within, each weight is cast once and kept, and gradients are off. Same bits."""
        with torch.no_grad():
            self._held = {}
            try:
                yield
            finally:
                self._held = None

    def _cast(self, weight: Tensor) -> Tensor:
        if self._held is None:
            return weight.to(self.dtype)
        if id(weight) not in self._held:
            self._held[id(weight)] = weight.to(self.dtype)
        return self._held[id(weight)]


@torch.no_grad()
def initialise(shard: Shard, seed: int, std: float = 0.02) -> None:
    """Fill the shard with fresh weights: ones for norms, normal with ``std`` for matrices.

    Each tensor has a generator of its own, seeded by its name, so the values do not depend on the partition, and no
    global generator is drawn from.
    """
    for name, parameter in shard.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * std)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In FP32 and back to the dtype of ``x``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def make_places(cfg: Config, length: int, device: torch.device) -> Places:
    """For positions 0 to ``length``; angles are made in FP64 on the CPU, so they hardly depend on the machine."""
    dim = cfg.head_dim
    rates = cfg.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), rates).repeat(1, 2)
    future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    return Places(angles.cos().float().to(device), angles.sin().float().to(device), future)


def _rotate(x: Tensor, places: Places) -> Tensor:
    """Turn pairs (i, i + dim/2) of [B, heads, T, dim] by their position's angles, in FP32."""
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return (wide * places.cos + torch.cat((-high, low), -1) * places.sin).to(x.dtype)
