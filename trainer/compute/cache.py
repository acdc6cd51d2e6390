"""Keys and values of the positions of texts that are continued, for the layers of one shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.compute.config import Decoding
from trainer.compute.decoding import Slot
from trainer.compute.model import Keep, Places, Shard, make_places


class Cache:
    """``rooms`` places for one text each, every one of ``decoding.positions`` positions.

    Keys (rotated) and values are in the compute dtype, [rooms + 1, kv_heads, blocks, block, head_dim] a layer. What was
    not computed for the present text is zero, so that a result cannot depend on the text that was there before. The
    additional room takes what slots compute that nobody needs.
    """

    def __init__(self, shard: Shard, decoding: Decoding, rooms: int, device: torch.device) -> None:
        cfg, self.decoding = shard.cfg, decoding
        self._device, self._spare, self._blocks = device, rooms, decoding.positions // decoding.block
        shape = (rooms + 1, cfg.kv_heads, self._blocks, decoding.block, cfg.head_dim)
        self._layers = [
            (torch.zeros(shape, dtype=shard.dtype, device=device), torch.zeros(shape, dtype=shard.dtype, device=device))
            for _ in range(shard.lo, shard.hi)
        ]
        self._places = make_places(cfg, decoding.positions, device)

    def at(self, slots: Sequence[Slot]) -> tuple[Places, list[Keep]]:
        """Where the blocks of a pass stand, and what keeps their keys and values, as :meth:`Shard.blocks` wants them.

        A room whose first block is among them is cleared: another text begins there, or the same one again.
        """
        empty = self.decoding.slots - len(slots)
        rooms = torch.tensor([slot.room for slot in slots] + [self._spare] * empty, device=self._device)
        blocks = torch.tensor([slot.block for slot in slots] + [0] * empty, device=self._device)
        begun = rooms[blocks == 0]
        for keys, values in self._layers:
            keys[begun] = 0
            values[begun] = 0
        places = Places(*(self._by_block(one)[blocks][:, None] for one in self._places))
        return places, [partial(self._keep, layer, rooms, blocks) for layer in range(len(self._layers))]

    def _by_block(self, table: Tensor) -> Tensor:
        """[positions, n] -> [blocks, block, n]."""
        return table.view(self._blocks, self.decoding.block, -1)

    def _keep(self, layer: int, rooms: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        whole = self._layers[layer]
        for kept, new in zip(whole, (keys, values), strict=True):
            kept[rooms, :, blocks] = new
        # All of a pass are kept before any is looked at, so a block sees those before it in the same pass.
        seen_keys, seen_values = (kept[rooms].flatten(2, 3) for kept in whole)
        return seen_keys, seen_values
