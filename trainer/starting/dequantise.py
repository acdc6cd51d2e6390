"""Values of stored blocks as FP32. Formulas: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptstore.errors import CorruptError
from trainer.compute.config import Shape

Values = NDArray[np.float32]


def dequantise(name: str, encoding: str, data: bytes, shape: Shape) -> Values:
    """The values of a tensor as FP32 in its shape.

    Args:
        name: of the tensor, for errors.
        encoding: ``F32``, ``F16``, ``BF16``, ``Q8_0`` (blocks of 32: an FP16 scale d and 32 int8 q; d·q) or ``Q4_1``
            (blocks of 32: FP16 d and m and 32 numbers q of four bits, first the low halves of 16 bytes, then the high
            ones; d·q + m). Products and sums are rounded to FP32.
        data: all of its bytes.
        shape: of the tensor; rows are a multiple of the block.

    Raises:
        CorruptError: a value is infinite or NaN.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        values = _DECODERS[encoding](np.frombuffer(data, np.uint8)).reshape(shape)
    if not np.isfinite(values).all():
        raise CorruptError(f"tensor {name}", "a value is infinite or no number", "fetch the weights again")
    return values


def _f32(data: NDArray[np.uint8]) -> Values:
    return data.view("<f4").astype(np.float32, copy=False)


def _f16(data: NDArray[np.uint8]) -> Values:
    return data.view("<f2").astype(np.float32)


def _bf16(data: NDArray[np.uint8]) -> Values:
    return (data.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float32, copy=False)


def _q8_0(data: NDArray[np.uint8]) -> Values:
    blocks = data.reshape(-1, 34)
    scale = _half(blocks, 0)
    return scale * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_1(data: NDArray[np.uint8]) -> Values:
    blocks = data.reshape(-1, 20)
    scale, least, packed = _half(blocks, 0), _half(blocks, 2), blocks[:, 4:]
    return scale * np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32) + least


def _half(blocks: NDArray[np.uint8], start: int) -> Values:
    """The FP16 number at byte ``start`` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


_DECODERS: dict[str, Callable[[NDArray[Any]], Values]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_1": _q4_1,
}
