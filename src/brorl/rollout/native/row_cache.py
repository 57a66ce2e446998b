"""Keys and values of the rows of a decoding batch for the compiled kernels, within a memory limit.

A cache predicts its own memory, and computes how many rows fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from brorl.arrays import IntArray
from brorl.model.kernels import BLOCK, Kernels, padded
from brorl.model.model_shape import KVShape
from brorl.rollout.native.rows import RowMemory

_FIRST_SLOTS = 64


class PagedRowCache:
    """Keys and values of rows for the compiled kernels, in blocks of `BLOCK` tokens.

    A block has a slot for each row that was alive when it was written, and the rows that grow out of one share it: a
    prefix is stored once per tree, to the precision of a block. Only the last block is copied where a row forks.

    Args:
        kernels: The compiled kernels.
        shapes: For each layer the shape of keys and values.
        memory: What rows take of the memory limit.
    """

    def __init__(self, kernels: Kernels, shapes: Sequence[KVShape], memory: RowMemory) -> None:
        self.kernels = kernels
        self.memory = memory
        self._shapes = shapes
        self._blocks: list[list[Tensor]] = []  # for each block the keys and the values of each layer in turn
        self._pages: list[Tensor] = []
        self.slot_BR = torch.empty(0, 0, dtype=torch.int64)  # slot of each row in each block

    def pages(self, layer: int) -> Tensor:
        """Return the addresses of the blocks of a layer; see `Kernels.attend_rows`."""
        return self._pages[layer]

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(x.numel() * x.element_size() for block in self._blocks for x in block)

    def rows_that_fit(self, num_tokens: int, other_bytes: int = 0) -> int:
        """Return how many rows of `num_tokens` the memory limit allows beside the prompts' keys and values.

        Raises:
            OutOfMemoryError: If not even one does.
        """
        fits = self.memory.rows(padded(num_tokens), other_bytes)
        if not fits:
            raise self.memory.too_small(num_tokens, padded(num_tokens), other_bytes)
        return fits

    def rearrange(self, source_R: IntArray, num_tokens: int, capacity: int, other_bytes: int) -> None:
        """Move rows so that slot r continues the row of slot source_R[r]; grow the cache if needed.

        Args:
            source_R: Old slot of each row, shape [R]; a slot that is its own source must stay where it is.
            num_tokens: Number of tokens stored so far in each slot.
            capacity: Number of tokens that each slot must be able to hold.
            other_bytes: As in `rows_that_fit`.
        """
        num_rows, num_complete = source_R.size, num_tokens // BLOCK
        if not num_tokens:
            self._blocks, self.slot_BR = [], torch.empty(0, num_rows, dtype=torch.int64)
        source = torch.from_numpy(source_R)
        slots_B = [block[0].shape[0] for block in self._blocks]
        wanted_B = self._slots(slots_B, num_rows, num_tokens, capacity, other_bytes)
        moved_R = np.flatnonzero(source_R != np.arange(num_rows)) if num_tokens else source_R[:0]
        if wanted_B == slots_B and not moved_R.size and num_rows == self.slot_BR.shape[1]:
            return
        shared = self.slot_BR[:num_complete, source]
        for index, wanted in enumerate(wanted_B):
            if index >= len(self._blocks):
                self._blocks.append(self._new_block(wanted))
            elif index < num_complete and wanted < slots_B[index]:  # memory is scarce: keep the slots in use
                kept, shared[index] = shared[index].unique(return_inverse=True)
                for number, x in enumerate(self._blocks[index]):
                    self._blocks[index][number] = x[kept]
            elif index == num_complete:
                self._move(self._blocks[index], wanted, source, moved_R)
        own = torch.arange(num_rows).expand(len(wanted_B) - num_complete, -1)
        self.slot_BR = torch.cat([shared, own])
        addresses = torch.tensor([[x.data_ptr() for x in block] for block in self._blocks])
        self._pages = list(addresses.T.unflatten(0, (-1, 2)).contiguous())

    def bytes_for(self, rows_D: IntArray, prompt_tokens: int) -> int:
        """Return the bytes at the peak of a decoding; see `Arena.bytes_for`."""
        prompt_bytes = prompt_tokens * self.memory.bytes_per_token
        slots_B: list[int] = []
        maximum = 0
        for depth, wanted in enumerate(rows_D.tolist(), 1):
            num_rows = min(wanted, self.rows_that_fit(depth, prompt_bytes))
            before = slots_B
            slots_B = self._slots(before, num_rows, depth - 1, depth, prompt_bytes)
            changed = [old for old, new in zip(before, slots_B, strict=False) if old != new]
            kept = BLOCK * (
                sum(slots_B) * self.memory.bytes_per_token + max(changed, default=0) * self.memory.largest_layer
            )
            maximum = max(maximum, prompt_bytes + kept + num_rows * self.memory.bytes_per_row)
        return maximum

    def _slots(self, slots_B: list[int], num_rows: int, num_tokens: int, capacity: int, other_bytes: int) -> list[int]:
        """Return how many slots the blocks must have, those to come included; complete ones never get more."""
        num_complete, num_blocks = num_tokens // BLOCK, padded(capacity) // BLOCK
        complete_B, last = slots_B[:num_complete], slots_B[num_complete] if len(slots_B) > num_complete else 0
        if num_rows > last:
            last = max(num_rows, min(max(2 * last, _FIRST_SLOTS), self.memory.max_rows))
        wanted_B = complete_B + [last] * (num_blocks - num_complete)
        room = self.memory.limit - other_bytes - num_rows * self.memory.bytes_per_row
        if sum(wanted_B) * BLOCK * self.memory.bytes_per_token > room:
            return [min(slots, num_rows) for slots in complete_B] + [num_rows] * (num_blocks - num_complete)
        return wanted_B

    def _move(self, block: list[Tensor], slots: int, source: Tensor, moved_R: IntArray) -> None:
        """Let slot r of a block continue slot source[r], in place or in a new number of slots."""
        target = torch.from_numpy(moved_R)
        for number, old in enumerate(block):
            if slots != old.shape[0]:
                kept = min(slots, old.shape[0])
                block[number] = old.new_empty(slots, *old.shape[1:])
                block[number][:kept] = old[:kept]
            if moved_R.size:
                block[number][target] = old[source[target]]

    def _new_block(self, slots: int) -> list[Tensor]:
        return [
            torch.empty(slots, shape.num_heads, *widths)
            for shape in self._shapes
            for widths in ((shape.key_dim, BLOCK), (BLOCK, shape.value_dim))
        ]
