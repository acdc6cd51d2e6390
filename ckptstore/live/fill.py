"""Fill: verified chunks into tensors, in place, whatever their layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ckptstore.chunks import ChunkSource
from ckptstore.closure import ShardView
from ckptstore.errors import MismatchError
from ckptstore.format.page import TensorEntry, show_role
from ckptstore.format.tensors import CHUNK
from ckptstore.live.tensors import bits
from ckptstore.objects import Objects
from ckptstore.threads import in_threads


@dataclass(frozen=True, slots=True)
class Target:
    """The tensor that takes an entry; ``live`` if it is live state and not new."""

    entry: TensorEntry
    tensor: Tensor
    live: bool


def fill_tensors(objects: Objects, view: ShardView, targets: list[Target], overwritten: list[str]) -> int:
    """Read the chunks of ``targets`` (entries in order), verify each, and put them into the tensors one by one.

    Args:
        objects: the store.
        view: the shard that the entries belong to.
        targets: which tensor takes which entry.
        overwritten: gets the name of each live tensor before its first byte changes, also if this fails later.

    Returns:
        The bytes read.

    Raises:
        MismatchError: a live tensor has elements that share memory and are stored with different bits; nothing was
            changed.
    """
    source = ChunkSource(objects, view)
    wrong = [t for t in targets if t.live and _overlaps(t.tensor) and not _can_hold(t.tensor, source.read_all(t.entry))]
    if wrong:
        listed = ", ".join(f"{show_role(target.entry.role)} {target.entry.path!r:.160}" for target in wrong)
        why = f"elements that share memory live are stored with different values: {listed}"
        raise MismatchError("live tensors", why, "nothing was changed; give each element memory of its own (.clone())")

    def load(item: tuple[int, int]) -> bytes:
        return source.read(targets[item[0]].entry, item[1])

    order = [(index, number) for index, t in enumerate(targets) for number in range(max(1, len(t.entry.chunks)))]
    filler: _Filler | None = None
    read = 0
    for (index, number), data in zip(order, in_threads(load, order, objects.threads), strict=True):
        entry = targets[index].entry
        if number == 0:
            filler = _Filler(targets[index].tensor)
        assert filler is not None
        if number == 0 and targets[index].live:
            overwritten.append(f"{show_role(entry.role)} {entry.path}")
        filler.put(number * CHUNK, data)
        read += len(data)
        if number == max(1, len(entry.chunks)) - 1:
            filler.finish()
    return read


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements of ``tensor`` may share memory; False only if none do."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 1
        reach += (size - 1) * stride
    return False


def _can_hold(tensor: Tensor, pieces: Iterable[bytes]) -> bool:
    """Whether all elements that share memory in ``tensor`` have the same bits in its row-major bytes ``pieces``."""
    width = tensor.element_size()
    data = np.frombuffer(b"".join(pieces), dtype=np.uint8).reshape(*tensor.shape, width)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = np.zeros((int(last) + 1) * width, dtype=np.uint8)
    strides = (*(stride * width for stride in tensor.stride()), 1)
    held = np.lib.stride_tricks.as_strided(memory, data.shape, strides)
    held[...] = data
    return bool(np.array_equal(held, data))


class _Filler:
    """Puts row-major bytes into a tensor: straight into contiguous memory, else by way of a contiguous copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor = tensor.detach()
        self._direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        whole = tensor if self._direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._whole = whole
        self._bytes = whole.reshape(-1).view(torch.uint8)

    def put(self, offset: int, data: bytes) -> None:
        """Bytes at ``offset`` from the tensor's start."""
        part = self._bytes[offset : offset + len(data)]
        if part.device.type == "cpu":
            part.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        else:
            part.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def finish(self) -> None:
        """All bytes are there."""
        if self._direct:
            if not self._tensor.is_inference():  # a backward pass over the old values must fail
                torch.autograd.graph.increment_version(self._tensor)
            return
        target, whole = self._tensor, self._whole
        for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if size > 1 and stride == 0:  # an expanded dimension: one element stands for all
                target, whole = target.narrow(dim, 0, 1), whole.narrow(dim, 0, 1)
        with torch.inference_mode(target.is_inference()):
            if target.is_conj() or target.is_neg():
                target.copy_(whole)
            else:
                bits(target).copy_(bits(whole))
