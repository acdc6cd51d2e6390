"""Snapshot: a training state as it was at one moment, in memory of its own, to be saved while the training goes on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ckptstore.errors import RefusedError
from ckptstore.live.capture import Captured, TrainingState
from ckptstore.live.preflight import check_fits
from ckptstore.live.tensors import TensorSource, chunks


class Snapshot:
    """What a training state held when :meth:`of` was called. Nothing that happens to the live objects changes it.

    ``nbytes`` are those of its tensors, all of them in memory of the CPU: what a snapshot costs beside the training, as
    long as anybody holds it.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self.nbytes = sum(source.tensor.numel() * source.tensor.element_size() for source in captured.tensors)

    @classmethod
    def of(cls, state: TrainingState) -> Snapshot:
        """The snapshot of ``state`` as it is now; it is whole when this returns. Has no side effects.

        Raises:
            RefusedError: something cannot be stored exactly, or another thread changed it meanwhile; named.
        """
        captured = state.capture()
        check_fits(captured)
        copies = [TensorSource.of(source.path, source.role, _copy(source.tensor)) for source in captured.tensors]
        check_unchanged(captured)
        return cls(replace(captured, tensors=copies))

    def capture(self) -> Captured:
        """All of the state as entries."""
        return self._captured


def check_unchanged(captured: Captured) -> None:
    """RefusedError naming the tensors that torch wrote to since they were captured."""
    changed = [source.name for source in captured.tensors if source.is_changed()]
    if changed:
        listed = ", ".join(changed[:10]) + (f" and {len(changed) - 10} more" if len(changed) > 10 else "")
        raise RefusedError("live state", f"changed while it was saved: {listed}", "let no other thread train meanwhile")


def _copy(tensor: Tensor) -> Tensor:
    """The same bits, row by row, in contiguous memory of the CPU. They are those that a save would write."""
    flat = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, device="cpu")
    held, start = memoryview(flat.numpy()), 0  # type: ignore[arg-type]
    for chunk in chunks(tensor):
        held[start : start + len(chunk)] = chunk.cast("B")
        start += len(chunk)
    return flat.view(tensor.dtype).reshape(tensor.shape)
