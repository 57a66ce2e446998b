"""The decoder for CPUs with the C kernels: rows share blocks of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.arrays import IntArray
from brorl.model.chunks import padded_ranges
from brorl.model.kernels import KEYS_PER_BLOCK, Kernels, padded_to_blocks
from brorl.model.shared_prefill import shared_prefill
from brorl.model.tree_attention import (
    PREFILL_TOKENS,
    AttentionContext,
    KVShape,
    ModelPass,
    PromptCache,
    tree_attention,
)
from brorl.rollout.native.decoder import Decoder, RowMemory, Rows

_FIRST_SLOTS = 64


class PagedCache:
    """Keys and values of rows for the C kernels, in blocks of `KEYS_PER_BLOCK` tokens.

    A block has a slot for each row that was alive when the block was written. All rows that grow from that row share
    its slot. So a prefix is stored once per tree, and only the last block is copied when a row forks.

    Here, a slot is the memory for `KEYS_PER_BLOCK` tokens; in `slot_attention`, a slot is the memory for a whole row.
    """

    def __init__(self, kernels: Kernels, shapes: Sequence[KVShape], memory: RowMemory) -> None:
        self.kernels = kernels
        self.memory = memory
        self._shapes = shapes
        self._blocks: list[list[Tensor]] = []  # per block: keys, values of layer 0, keys, values of layer 1, ...
        self.pages: list[Tensor] = []  # per layer, the addresses of its blocks; see `Kernels.attend_rows`
        self.slot_BR = torch.empty(0, 0, dtype=torch.int64)  # slot of each row in each block

    def rows_that_fit(self, num_tokens: int, other_bytes: int = 0) -> int:
        """Return how many rows of `num_tokens` fit next to the prompts. Raise an error if not even one fits."""
        fits = self.memory.rows(padded_to_blocks(num_tokens), other_bytes)
        if not fits:
            raise self.memory.too_small_error(num_tokens, padded_to_blocks(num_tokens), other_bytes)
        return fits

    def rearrange(self, source_R: IntArray, num_tokens: int, capacity: int, other_bytes: int) -> None:
        """Move rows of `num_tokens` tokens so that slot r continues slot source_R[r], with room for `capacity` tokens.

        A slot that continues itself does not move.
        """
        num_rows = source_R.size
        num_complete = num_tokens // KEYS_PER_BLOCK
        if not num_tokens:
            self._blocks = []
            self.slot_BR = torch.empty(0, num_rows, dtype=torch.int64)
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
            elif index < num_complete and wanted < slots_B[index]:  # memory is tight: keep only the slots in use
                kept, shared[index] = shared[index].unique(return_inverse=True)
                for part, x in enumerate(self._blocks[index]):
                    self._blocks[index][part] = x[kept]
            elif index == num_complete:
                self._move(self._blocks[index], wanted, source, moved_R)
        own = torch.arange(num_rows).expand(len(wanted_B) - num_complete, -1)
        self.slot_BR = torch.cat([shared, own])
        addresses = torch.tensor([[x.data_ptr() for x in block] for block in self._blocks])
        self.pages = list(addresses.T.unflatten(0, (-1, 2)).contiguous())

    def _slots(self, slots_B: list[int], num_rows: int, num_tokens: int, capacity: int, other_bytes: int) -> list[int]:
        """Return how many slots each block needs, including future blocks. Complete blocks never grow."""
        num_complete = num_tokens // KEYS_PER_BLOCK
        num_blocks = padded_to_blocks(capacity) // KEYS_PER_BLOCK
        complete_B = slots_B[:num_complete]
        last = slots_B[num_complete] if len(slots_B) > num_complete else 0
        if num_rows > last:
            last = max(num_rows, min(max(2 * last, _FIRST_SLOTS), self.memory.max_rows))
        wanted_B = complete_B + [last] * (num_blocks - num_complete)
        room = self.memory.limit - other_bytes - num_rows * self.memory.bytes_per_row
        if sum(wanted_B) * KEYS_PER_BLOCK * self.memory.bytes_per_token > room:
            return [min(slots, num_rows) for slots in complete_B] + [num_rows] * (num_blocks - num_complete)
        return wanted_B

    def _move(self, block: list[Tensor], slots: int, source: Tensor, moved_R: IntArray) -> None:
        """Make slot r of a block continue slot source[r], in place or with a new number of slots."""
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
            for widths in ((shape.key_dim, KEYS_PER_BLOCK), (KEYS_PER_BLOCK, shape.value_dim))
        ]


class PagedDecoder(Decoder, AttentionContext):
    """Tree attention with the C kernels: a row attends to its prompt's keys and its own.

    The decoder is also the attention context of its own steps.
    """

    def __init__(self, model: PreTrainedModel, model_pass: ModelPass, cache: PagedCache) -> None:
        self._model = model
        self._model_pass = model_pass
        self._cache = cache
        self._prompts: PromptCache
        self._prompt_R: IntArray
        self._position = self.longest = 0  # position of the tokens being fed, and length of the longest context

    def attention(self) -> AbstractContextManager[None]:
        """Hook the model's attention to use contexts; see `Decoder.attention`."""
        return tree_attention(self._model)

    def split(self, prompts: Sequence[tuple[int, ...]]) -> list[IntArray]:
        """Split prompts into waves that leave memory for rows; see `Decoder.split`."""
        return padded_ranges([len(prompt) for prompt in prompts], min(PREFILL_TOKENS, self._cache.memory.prompt_tokens))

    def start(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Prefill the prompts of a wave; see `Decoder.start`."""
        prompt_cache, logits_PV = shared_prefill(self._model_pass, prompts)
        self._prompts = prompt_cache.for_kernels()
        return logits_PV

    def rows_that_fit(self, num_tokens: int) -> int:
        """Return how many rows fit; see `Decoder.rows_that_fit`."""
        return self._cache.rows_that_fit(num_tokens, self._prompts.num_bytes)

    def keep_prompts(self, prompts: IntArray) -> None:
        """Keep only these prompts; see `Decoder.keep_prompts`."""
        self._prompts = self._prompts.select(prompts)

    def place(self, rows: Rows, prompt_R: IntArray) -> Rows:
        """Move the last block of each row. A row's first child keeps its slot. See `Decoder.place`."""
        source_R = rows.slot_R
        stored_tokens = rows.depth - 1
        slot_R = np.arange(rows.size)
        if stored_tokens:
            stays_R = np.append(True, source_R[1:] != source_R[:-1]) & (source_R < rows.size)
            free = np.ones(rows.size, np.bool_)
            free[source_R[stays_R]] = False
            slot_R = source_R.copy()
            slot_R[~stays_R] = np.flatnonzero(free)
        order = np.argsort(slot_R)
        self._cache.rearrange(source_R[order], stored_tokens, rows.depth, self._prompts.num_bytes)
        self._prompt_R = prompt_R[order]
        return replace(rows.take(order), slot_R=np.arange(rows.size))

    def feed(self, rows: Rows) -> Tensor:
        """Feed one token per row; see `Decoder.feed`."""
        self._position = rows.depth - 1
        self.longest = int(self._prompts.value[0].shape[2]) + rows.depth
        position_R = torch.from_numpy(self._prompts.length[self._prompt_R] + self._position)
        return self._model_pass.row_logits(torch.from_numpy(rows.token_R), position_R, self, None).whole()

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, _window: int | None = None, /
    ) -> Tensor:
        """Store the new keys and values, then attend to the prompt and the row with one softmax."""
        return self._cache.kernels.attend_rows(
            query_THD, key_TKD, value_TKD, self._prompts.key[layer], self._prompts.value[layer],
            torch.from_numpy(self._prompt_R), torch.from_numpy(self._prompts.length), self._cache.pages[layer],
            self._cache.slot_BR, self._position,
        )  # fmt: skip
