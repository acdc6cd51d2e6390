"""Shapes of the decoder and who owns which tensor: pure arithmetic, for processes that must never build a model.

Names are those of the public Llama checkpoints (``model.layers.0.self_attn.q_proj.weight``), so an export is a standard
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType

from ckptstore.errors import UsageError

Shape = tuple[int, ...]
Table = tuple[tuple[str, Shape], ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
UNTIED_HEAD = "lm_head.weight"

MOST_LAYERS = 10_000  # each has a table of its tensors, and a plan that somebody made says how many there are
MOST_POSITIONS = 8_192  # of a text that is continued: what is ahead of each has a table, and a plan says how many
MOST_ROWS = 8_192  # of a pass in decoding
STORED_BYTES = 12  # a parameter in a checkpoint: FP32 weight and the two moments of Adam
TRAINING_BYTES = 16  # the same in a worker's memory: the FP32 gradient as well


@dataclass(frozen=True, slots=True)
class Config:
    """A decoder of the Llama family without biases. ``hidden`` is split evenly over ``heads``.

    Raises:
        UsageError: the numbers do not fit together.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise UsageError("model configuration", f"{name} is {getattr(self, name)}, but has to be at least 1")
        if self.layers > MOST_LAYERS:
            raise UsageError("model configuration", f"{self.layers} layers, more than {MOST_LAYERS}")
        if self.hidden % self.heads or self.head_dim % 2:
            raise UsageError(
                "model configuration", f"hidden {self.hidden} over {self.heads} heads is no even head size"
            )
        if self.heads % self.kv_heads:
            raise UsageError("model configuration", f"{self.heads} heads cannot share {self.kv_heads} key/value heads")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "demo": Config(vocab=260, hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2),
        "smollm2-135m": Config(
            vocab=49_152, hidden=576, intermediate=1_536, layers=30, heads=9, kv_heads=3, rope_theta=100_000.0
        ),
        "smollm2-1.7b": Config(
            vocab=49_152, hidden=2_048, intermediate=8_192, layers=24, heads=32, kv_heads=32, rope_theta=130_000.0
        ),
    }
)

DEFAULT_CUTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"demo": (2,), "smollm2-135m": (14,), "smollm2-1.7b": (11,)}
)


@dataclass(frozen=True, slots=True)
class Ownership:
    """What a logical shard owns: layers ``[first, last)``, with ``head`` also embedding, final norm and output head."""

    index: int
    count: int
    first: int
    last: int
    head: bool
    tensors: Table

    @property
    def parameters(self) -> int:
        """Trainable parameters, each counted once."""
        return sum(prod(shape) for _, shape in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tensors of one checkpoint: weight and two moments in FP32."""
        return STORED_BYTES * self.parameters

    @property
    def training_bytes(self) -> int:
        """Bytes of weights, gradients and moments in a worker, before any activation."""
        return TRAINING_BYTES * self.parameters


def param_table(cfg: Config) -> Table:
    """Every tensor of the whole model as (name, shape), in network order; a tied head has no tensor of its own."""
    return owned_tensors(cfg, 0, cfg.layers, head=True)


def partition(cfg: Config, cuts: Sequence[int]) -> tuple[Ownership, ...]:
    """Split the layers in front of each of ``cuts`` (ascending layer numbers) and return ``len(cuts) + 1`` ownerships.

    Shard 0 has embedding, final norm and output head beside its layers. Every tensor is owned exactly once.

    Raises:
        UsageError: a cut would leave a shard without layers.
    """
    edges = (0, *cuts, cfg.layers)
    if any(a >= b for a, b in pairwise(edges)):
        raise UsageError(
            "partition",
            f"cuts {tuple(cuts)} leave a shard without layers",
            f"give ascending cuts in 1..{cfg.layers - 1}",
        )
    count = len(edges) - 1
    return tuple(
        Ownership(i, count, first, last, i == 0, owned_tensors(cfg, first, last, head=i == 0))
        for i, (first, last) in enumerate(pairwise(edges))
    )


def parse_cuts(text: str) -> tuple[int, ...]:
    """Cuts as people write them: layer numbers with commas between them (``1,3``), or ``none`` for one shard.

    Raises:
        UsageError: it is neither.
    """
    if text in ("", "none"):
        return ()
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) <= len(str(MOST_LAYERS)) for part in parts):
        raise UsageError(f"cuts {text!r:.40}", "no layer numbers with commas between them", "as in 1,3; or none")
    return tuple(map(int, parts))


def show_cuts(cuts: Sequence[int]) -> str:
    """Cuts as :func:`parse_cuts` reads them."""
    return ",".join(map(str, cuts)) or "none"


def owned_tensors(cfg: Config, first: int, last: int, *, head: bool) -> Table:
    """The tensors of layers ``[first, last)`` and with ``head`` of both ends of the network, as (name, shape)."""
    kv = cfg.kv_heads * cfg.head_dim
    parts: tuple[tuple[str, Shape], ...] = (
        ("input_layernorm", (cfg.hidden,)),
        ("self_attn.q_proj", (cfg.hidden, cfg.hidden)),
        ("self_attn.k_proj", (kv, cfg.hidden)),
        ("self_attn.v_proj", (kv, cfg.hidden)),
        ("self_attn.o_proj", (cfg.hidden, cfg.hidden)),
        ("post_attention_layernorm", (cfg.hidden,)),
        ("mlp.gate_proj", (cfg.intermediate, cfg.hidden)),
        ("mlp.up_proj", (cfg.intermediate, cfg.hidden)),
        ("mlp.down_proj", (cfg.hidden, cfg.intermediate)),
    )
    table = [(f"model.layers.{n}.{part}.weight", shape) for n in range(first, last) for part, shape in parts]
    if head:
        table.insert(0, (EMBEDDING, (cfg.vocab, cfg.hidden)))
        table.append((FINAL_NORM, (cfg.hidden,)))
        if not cfg.tied:
            table.append((UNTIED_HEAD, (cfg.vocab, cfg.hidden)))
    return tuple(table)


def halves(cfg: Config) -> tuple[int, ...]:
    """The cut that divides a model's parameters most evenly between two shards.

    Raises:
        UsageError: it has one layer only.
    """
    if cfg.layers < 2:
        raise UsageError("partition", "a model of one layer cannot be shared by two shards")

    def larger(cut: int) -> int:
        return max(owner.parameters for owner in partition(cfg, (cut,)))

    return (min(range(1, cfg.layers), key=larger),)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the optimizer is driven: AdamW with decay on matrices only, one clipping norm, a rate set by the update.

    ``rate`` is reached after ``warmup`` updates of linear growth and kept: a pure function of the update, in plain
    arithmetic, because the cosine of one C library is not that of the next.
    """

    rate: float = 1e-3
    warmup: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (self.rate > 0 and self.max_norm > 0 and self.eps > 0 and self.weight_decay >= 0 and self.warmup >= 0):
            raise UsageError(
                "training recipe", "rate, max_norm and eps have to be positive, decay and warmup not negative"
            )

    def rate_at(self, update: int) -> float:
        """Learning rate of ``update``, counted from 1."""
        return self.rate * min(update, self.warmup) / self.warmup if self.warmup else self.rate


@dataclass(frozen=True, slots=True)
class Decoding:
    """The shapes in which answers are decoded. A kernel is chosen by its shape, so they decide bits and are fixed.

    A forward pass computes ``slots`` blocks of ``block`` positions each, against keys and values for ``positions``
    positions, whatever of these is needed; what is not is padded or masked.
    """

    block: int
    slots: int
    positions: int

    def __post_init__(self) -> None:
        shapes = f"{self.slots} blocks of {self.block} in a pass, {self.positions} positions"
        if min(self.block, self.slots, self.positions) < 1 or self.positions % self.block:
            raise UsageError("decoding", f"{shapes}: each has to be at least 1, and positions a multiple of the block")
        if self.positions > MOST_POSITIONS or self.slots * self.block > MOST_ROWS:
            raise UsageError("decoding", f"{shapes}: more than {MOST_POSITIONS} positions or {MOST_ROWS} rows")

    @staticmethod
    def fitting(longest: int, cap: int, *, block: int, slots: int) -> Decoding:
        """For prompts of at most ``longest`` tokens and answers of at most ``cap``."""
        return Decoding(block, slots, -(-(longest + cap) // block) * block)
