"""Keys and values of the rows that are being decoded, and the attention of one decoding step.

A row is a distinct live prefix. Its keys and values are in one slot of preallocated memory; slots 0 .. R-1 are in
use. When a prefix splits, its first child keeps the slot and only the others are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.errors import OutOfMemoryError
from brorl.model.kv_shape import KVShape
from brorl.model.device import to_device
from brorl.model.tree_attention import Grouping, PartialAttention, PromptCache, attend_prompt

IntArray = NDArray[np.int64]

_TOKENS_AT_ONCE = 16
_FIRST_SLOTS = 64


class RowCache:
    """Preallocated keys and values: per layer [slots, K, tokens, D], grown within a memory limit.

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
        self.key = [empty.new_empty(0, shape.num_heads, 0, shape.key_dim) for shape in shapes]
        self.value = [empty.new_empty(0, shape.num_heads, 0, shape.value_dim) for shape in shapes]

    def prompt_tokens_that_fit(self) -> int:
        """Return how many prompt tokens may be cached together: those that fill half of the memory."""
        fit: int = self._memory_bytes // (2 * self._bytes_per_token)
        return fit

    def rows_that_fit(self, num_tokens: int, other_bytes: int = 0) -> int:
        """Return how many rows the memory limit allows.

        Args:
            num_tokens: Tokens per row.
            other_bytes: Bytes of the prompts' keys and values.

        Raises:
            OutOfMemoryError: If not even one does.
        """
        row_bytes = self._tokens_reserved(num_tokens) * self._bytes_per_token + self._bytes_per_row
        left = self._memory_bytes - other_bytes
        if row_bytes > left:
            raise OutOfMemoryError(
                f"one row of {num_tokens} tokens needs {row_bytes / 2**20:.3g} MiB, its prompt needs "
                f"{other_bytes / 2**20:.3g} MiB, and the engine may use {self._memory_bytes / 2**20:.3g} MiB; raise "
                "engine.memory_gib or lower sampling.max_new_tokens"
            )
        fits: int = left // row_bytes
        return fits

    def place(self, source_R: IntArray, num_tokens: int, new_tokens: int, other_bytes: int) -> None:
        """Let slot r continue the row in slot source_R[r], and make room for one set of new tokens.

        Args:
            source_R: Old slot of each row, shape [R]; a slot that is its own source must stay where it is.
            num_tokens: Number of tokens stored so far in each slot.
            new_tokens: Number of tokens that each slot must be able to hold.
            other_bytes: As in `rows_that_fit`.
        """
        slots, tokens = self.key[0].shape[0], self.key[0].shape[2]
        num_rows = source_R.size
        grows = num_rows > slots or new_tokens > tokens
        if grows:
            slots, tokens = self._grown(slots, num_rows, new_tokens, other_bytes)
        moved_R = np.flatnonzero(source_R != np.arange(num_rows)) if num_tokens else source_R[:0]
        if not grows and not moved_R.size:
            return
        source, target = (to_device(r, self.key[0].device) for r in (source_R[moved_R], moved_R))
        for store in (self.key, self.value):
            for layer, old in enumerate(store):
                if grows:  # layer by layer: at most one layer exists twice
                    store[layer] = old.new_empty(slots, old.shape[1], tokens, old.shape[3])
                    kept = min(num_rows, old.shape[0])
                    store[layer][kept:] = 0  # unused entries get a weight of 0, so they must be finite
                    store[layer][:kept, :, num_tokens:] = 0
                    store[layer][:kept, :, :num_tokens] = old[:kept, :, :num_tokens]
                if moved_R.size:
                    store[layer][target, :, :num_tokens] = old[source, :, :num_tokens]

    def bytes_for(self, rows_D: IntArray, prompt_tokens: int) -> int:
        """Return the memory at the peak of a decoding, before it is done; nothing is reserved.

        Args:
            rows_D: Rows that are fed at each depth, d + 1 tokens each, shape [D].
            prompt_tokens: Tokens of the prompts' keys and values, padding included.

        Returns:
            Bytes of the prompts, the rows and their logits, once a layer is copied into more room.

        Raises:
            OutOfMemoryError: As in `rows_that_fit`.
        """
        prompt_bytes = prompt_tokens * self._bytes_per_token
        slots, tokens, most = 0, 0, 0
        for depth, wanted in enumerate(rows_D.tolist(), 1):
            num_rows = min(wanted, self.rows_that_fit(depth, prompt_bytes))
            copied = 0
            if num_rows > slots or depth > tokens:
                copied = slots * tokens
                slots, tokens = self._grown(slots, num_rows, depth, prompt_bytes)
            kept = slots * tokens * self._bytes_per_token + copied * self._largest_layer
            most = max(most, prompt_bytes + kept + num_rows * self._bytes_per_row)
        return most

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


class DecodeContext:
    """One new token per row: it attends to its prompt and to its own row."""

    def __init__(self, rows: RowCache, position: int, prompts: PromptCache, prompt_R: IntArray) -> None:
        self._rows = rows
        self._position = position
        self._prompts = prompts
        self._grouping = Grouping(prompt_R, prompts.length.size, prompts.device)
        self.longest = int(prompts.key[0].shape[2]) + position + 1

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        """Store the new keys and values, then attend to the row and to the prompt."""
        num_rows = query_THD.shape[0]
        key, value = self._rows.key[layer], self._rows.value[layer]
        key[:num_rows, :, self._position] = key_TKD
        value[:num_rows, :, self._position] = value_TKD
        # All reserved tokens, not only those in use: memory is read in one stream, which is twice as fast as with gaps.
        key, value = key[:num_rows], value[:num_rows]
        query = query_THD.unflatten(1, (key.shape[1], -1))  # [R, K, G, D]
        score = query @ key.transpose(2, 3)
        score[..., self._position + 1 :] = float("-inf")
        own = PartialAttention.over(score, value)
        own = PartialAttention(own.output.flatten(1, 2), own.lse.flatten(1, 2))
        return own.merged(attend_prompt(query_THD, self._prompts, layer, self._grouping))
