"""A digest of the state that an update left, by tensor: cheap enough to take often, and made again by whoever replays.

The fingerprint of a tensor is the plain BLAKE3 of three digests of 32 bytes one after the other: those of its FP32
weight and of both moments of Adam, as a checkpoint has them (docs/format.md, F-35). So the fingerprints at a checkpoint
follow from its own documents. No torch until a live state is hashed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.format.digest import Digest
from ckptstore.format.tensors import CHUNK, tensor_digest

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import AdamW

    from trainer.compute.model import Shard

MOMENTS = ("exp_avg", "exp_avg_sq")


def combined(weight: Digest, exp_avg: Digest, exp_avg_sq: Digest) -> Digest:
    """The fingerprint of a tensor from the digests of its weight and moments."""
    return Digest.of(weight.raw + exp_avg.raw + exp_avg_sq.raw)


def live_state(shard: Shard, optimizer: AdamW) -> dict[str, Digest]:
    """Fingerprint of each tensor of a live shard and its optimizer, by name, in the shard's order; changes nothing.

    On another device than the CPU, one tensor at a time is copied.
    """
    return {
        name: combined(_digest(parameter), *(_digest(optimizer.state[parameter][moment]) for moment in MOMENTS))
        for name, parameter in shard.named_parameters()
    }


def _digest(tensor: Tensor) -> Digest:
    from trainer.compute.transport import raw_bytes

    data = raw_bytes(tensor.detach().cpu().contiguous())
    chunks = [Digest.of(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK)]
    return tensor_digest("f32", tuple(tensor.shape), chunks)
