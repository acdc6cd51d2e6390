"""Dropout on what each block adds to the residual stream, with masks that can be made again. No torch until one is.

``derived`` masks come from a generator of their own, seeded by update, microbatch, layer and the plan's seed: so they
depend neither on who owns the layer nor on whether it is recomputed, and no state of a generator has to come along.
``generators`` takes them from the worker's global generator, as modules of torch do it: then the states of generators
in a checkpoint decide how training goes on, and another partition draws other masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

DERIVED, GENERATORS = "derived", "generators"
MASKS = (DERIVED, GENERATORS)

Drop = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True)
class Dropout:
    """Each element is dropped with probability ``rate``; ``masks`` says where masks come from, ``seed`` is the plan's.

    Raises:
        UsageError: a rate that is none, or no such kind of masks.
    """

    rate: float
    masks: str
    seed: str

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1 or self.masks not in MASKS:
            raise UsageError(f"dropout of {self.rate} by {self.masks!r:.20}", f"rate in (0, 1), {' or '.join(MASKS)}")

    def begin(self, update: int, microbatch: int, layer: int) -> Drop:
        """What drops elements in one pass through a layer; to be called anew for each pass, also one that recomputes.

        It takes tensors of any dtype and gives the same dtype; what is kept is divided by 1 - rate in FP32.
        """
        import torch

        generator: torch.Generator | None = None
        key = f"{self.seed}/dropout/{update}/{microbatch}/{layer}"
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1

        def drop(x: Tensor) -> Tensor:
            nonlocal generator
            if self.masks == DERIVED and generator is None:
                generator = torch.Generator(x.device).manual_seed(number)
            draws = torch.rand(x.shape, generator=generator, device=x.device)
            return torch.where(draws >= self.rate, x.float() / (1 - self.rate), 0.0).to(x.dtype)

        return drop
