"""Keys and values of the rows of a decoding batch, within a memory limit: for PyTorch, or for the compiled kernels.

A cache predicts its own memory, and computes how many rows fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.errors import OutOfMemoryError
from brorl.model.device import to_device
from brorl.model.kernels import BLOCK, Kernels, kernels_of, padded
from brorl.model.kv_shape import KVShape
from brorl.tree import IntArray

_TOKENS_AT_ONCE = 16
_FIRST_SLOTS = 64


class RowCache:
    """Preallocated keys and values of rows, grown within a memory limit.

    Args:
        model: The model that decodes.
        shapes: For each of its layers the shape of keys and values.
        memory_bytes: Limit of this cache, the prompts' keys and values, and the rows' logits together.
        max_rows: Most rows there can be.
        max_tokens: Most tokens per row.
    """

    def __init__(
        self, model: PreTrainedModel, shapes: Sequence[KVShape], memory_bytes: int, max_rows: int, max_tokens: int
    ) -> None:
        self._memory_bytes = memory_bytes
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._bytes_per_token = sum(shape.size for shape in shapes) * model.dtype.itemsize
        self._largest_layer: int = max(shape.size for shape in shapes) * model.dtype.itemsize  # bytes per token
        # The logits of a row, their softmax, and one temporary of the same size.
        vocabulary: int = model.config.get_text_config().vocab_size
        self._bytes_per_row: int = 3 * vocabulary * max(4, model.dtype.itemsize)
        empty = torch.empty(0, dtype=model.dtype, device=model.device)
        # Keys are stored dimension by dimension: a product with few queries reads them twice as fast.
        self.key = [empty.new_empty(0, shape.num_heads, shape.key_dim, 0) for shape in shapes]
        self.value = [empty.new_empty(0, shape.num_heads, 0, shape.value_dim) for shape in shapes]

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(x.numel() * x.element_size() for x in (*self.key, *self.value))

    def prompt_tokens_that_fit(self) -> int:
        """Return how many prompt tokens may be cached together: those that fill half of the memory."""
        fit: int = self._memory_bytes // (2 * self._bytes_per_token)
        return fit

    def rows_that_fit(self, num_tokens: int, other_bytes: int = 0) -> int:
        """Return how many rows of `num_tokens` the memory limit allows beside the prompts' keys and values.

        Raises:
            OutOfMemoryError: If not even one does.
        """
        row_bytes = self._tokens_reserved(num_tokens) * self._bytes_per_token + self._bytes_per_row
        left = self._memory_bytes - other_bytes
        if row_bytes > left:
            raise OutOfMemoryError(
                f"one row of {num_tokens} tokens needs {row_bytes / 2**20:.3g} MiB, the prompts beside it need "
                f"{other_bytes / 2**20:.3g} MiB, and the engine may use {self._memory_bytes / 2**20:.3g} MiB; raise "
                "engine.memory_gib or lower sampling.max_new_tokens"
            )
        fits: int = left // row_bytes
        return fits

    def rearrange(self, source_R: IntArray, num_tokens: int, capacity: int, other_bytes: int) -> None:
        """Move rows so that slot r continues the row of slot source_R[r]; grow the cache if needed.

        Args:
            source_R: Old slot of each row, shape [R]; a slot that is its own source must stay where it is.
            num_tokens: Number of tokens stored so far in each slot.
            capacity: Number of tokens that each slot must be able to hold.
            other_bytes: As in `rows_that_fit`.
        """
        slots, tokens = self.value[0].shape[0], self.value[0].shape[2]
        num_rows = source_R.size
        grows = num_rows > slots or capacity > tokens
        if grows:
            slots, tokens = self._grown(slots, num_rows, capacity, other_bytes)
        moved_R = np.flatnonzero(source_R != np.arange(num_rows)) if num_tokens else source_R[:0]
        if not grows and not moved_R.size:
            return
        source, target = (to_device(r, self.key[0].device) for r in (source_R[moved_R], moved_R))
        for store, axis in ((self.key, 3), (self.value, 2)):
            for layer, old in enumerate(store):
                used = old.narrow(axis, 0, num_tokens)
                if grows:  # layer by layer: at most one layer exists twice
                    shape = [slots, *old.shape[1:]]
                    shape[axis] = tokens
                    kept = min(num_rows, old.shape[0])
                    store[layer] = old.new_empty(shape)
                    store[layer][kept:] = 0  # unused entries get a weight of 0, so they must be finite
                    store[layer][:kept].narrow(axis, num_tokens, tokens - num_tokens).zero_()
                    store[layer][:kept].narrow(axis, 0, num_tokens).copy_(used[:kept])
                if moved_R.size:
                    store[layer].narrow(axis, 0, num_tokens)[target] = used[source]

    def bytes_for(self, rows_D: IntArray, prompt_tokens: int) -> int:
        """Return the bytes of prompts, rows and logits at the peak of a decoding; nothing is reserved.

        Args:
            rows_D: Rows that are fed at each depth, d + 1 tokens each, shape [D].
            prompt_tokens: Tokens of the prompts' keys and values, padding included.

        Raises:
            OutOfMemoryError: As in `rows_that_fit`.
        """
        prompt_bytes = prompt_tokens * self._bytes_per_token
        slots, tokens, maximum = 0, 0, 0
        for depth, wanted in enumerate(rows_D.tolist(), 1):
            num_rows = min(wanted, self.rows_that_fit(depth, prompt_bytes))
            copied = 0
            if num_rows > slots or depth > tokens:
                copied = slots * tokens
                slots, tokens = self._grown(slots, num_rows, depth, prompt_bytes)
            kept = slots * tokens * self._bytes_per_token + copied * self._largest_layer
            maximum = max(maximum, prompt_bytes + kept + num_rows * self._bytes_per_row)
        return maximum

    def _grown(self, slots: int, num_rows: int, new_tokens: int, other_bytes: int) -> tuple[int, int]:
        """Return how many slots, and tokens in each, to reserve for rows that do not fit in `slots` or their tokens."""
        tokens = self._tokens_reserved(new_tokens)
        wanted = slots if num_rows <= slots else max(2 * slots, _FIRST_SLOTS)
        return max(num_rows, min(wanted, self._max_rows, self.rows_that_fit(tokens, other_bytes))), tokens

    def _tokens_reserved(self, num_tokens: int) -> int:
        reserved = _TOKENS_AT_ONCE
        while reserved < num_tokens:
            reserved += max(_TOKENS_AT_ONCE, reserved // 8)
        return min(reserved, self._max_tokens)


class PagedRowCache(RowCache):
    """Keys and values of rows for the compiled kernels, in blocks of `BLOCK` tokens.

    A block has a slot for each row that was alive when it was written, and the rows that grow out of one share it: a
    prefix is stored once per tree, to the precision of a block. Only the last block is copied where a row forks.

    Args:
        kernels: The compiled kernels.
        model: The model that decodes.
        shapes: For each of its layers the shape of keys and values.
        limits: See `RowCache`.
    """

    def __init__(self, kernels: Kernels, model: PreTrainedModel, shapes: Sequence[KVShape], *limits: int) -> None:
        super().__init__(model, shapes, *limits)
        self.kernels = kernels
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

    def rearrange(self, source_R: IntArray, num_tokens: int, capacity: int, other_bytes: int) -> None:
        """Move rows, and make room for tokens; see `RowCache.rearrange`."""
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
        """Return the most bytes of prompts, rows and logits; see `RowCache.bytes_for`."""
        prompt_bytes = prompt_tokens * self._bytes_per_token
        slots_B: list[int] = []
        maximum = 0
        for depth, wanted in enumerate(rows_D.tolist(), 1):
            num_rows = min(wanted, self.rows_that_fit(depth, prompt_bytes))
            before = slots_B
            slots_B = self._slots(before, num_rows, depth - 1, depth, prompt_bytes)
            changed = [old for old, new in zip(before, slots_B, strict=False) if old != new]
            kept = BLOCK * (sum(slots_B) * self._bytes_per_token + max(changed, default=0) * self._largest_layer)
            maximum = max(maximum, prompt_bytes + kept + num_rows * self._bytes_per_row)
        return maximum

    def _slots(self, slots_B: list[int], num_rows: int, num_tokens: int, capacity: int, other_bytes: int) -> list[int]:
        """Return how many slots the blocks must have, those to come included; complete ones never get more."""
        num_complete, num_blocks = num_tokens // BLOCK, padded(capacity) // BLOCK
        complete_B, last = slots_B[:num_complete], slots_B[num_complete] if len(slots_B) > num_complete else 0
        if num_rows > last:
            last = max(num_rows, min(max(2 * last, _FIRST_SLOTS), self._max_rows))
        wanted_B = complete_B + [last] * (num_blocks - num_complete)
        room = self._memory_bytes - other_bytes - num_rows * self._bytes_per_row
        if sum(wanted_B) * BLOCK * self._bytes_per_token > room:
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

    def _tokens_reserved(self, num_tokens: int) -> int:
        return padded(num_tokens)


def row_cache(
    model: PreTrainedModel, shapes: Sequence[KVShape], memory_bytes: int, max_rows: int, max_tokens: int
) -> RowCache:
    """Return an empty cache for the compiled kernels, where they can decode a model, or for PyTorch."""
    of_model = torch.empty(0, dtype=model.dtype, device=model.device)
    kernels = kernels_of(of_model) if all(shape.key_dim == shape.value_dim for shape in shapes) else None
    if kernels is None:
        return RowCache(model, shapes, memory_bytes, max_rows, max_tokens)
    return PagedRowCache(kernels, model, shapes, memory_bytes, max_rows, max_tokens)
