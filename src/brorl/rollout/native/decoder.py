"""Rows of equal length, their memory, and the decoder that feeds their tokens to a model.

`PagedDecoder` uses the C kernels on a CPU; `SlotDecoder` runs everywhere else. `ModelCacheDecoder` is for models whose
attention cannot be hooked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from brorl.arrays import IntArray
from brorl.errors import OutOfMemoryError
from brorl.model.device import to_device
from brorl.model.flat_path import ModelCache
from brorl.model.logits import logit_bytes_per_row
from brorl.model.tree_attention import (
    PREFILL_TOKENS,
    KVShape,
)


@dataclass(frozen=True)
class Rows:
    """Live prefixes of equal length, and their rollouts.

    Rollouts 7 8, 7 8 and 7 9 of one prompt are 2 rows of depth 2: token_R [8, 9], row_K [0, 0, 1], rollout_K [0, 1, 2].
    """

    depth: int  # tokens after the prompt; at depth 0 each prompt is one row
    prompt_R: IntArray  # prompt of each row, shape [R]
    node_R: IntArray  # node of each row's last token, shape [R]; -1 at depth 0
    token_R: IntArray  # each row's last token, shape [R]; -1 at depth 0
    slot_R: IntArray  # slot with each row's earlier tokens, shape [R]; at depth 1, the prompt's index in the wave
    row_K: IntArray  # row of each of K rollouts, ascending, shape [K]
    rollout_K: IntArray  # index of each rollout within its prompt, shape [K]

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.node_R.size

    def take(self, rows: IntArray) -> Rows:
        """Return the given rows, renumbered in that order, with their rollouts."""
        if np.array_equal(rows, np.arange(self.size)):
            return self
        renumber = np.full(self.size, -1)
        renumber[rows] = np.arange(rows.size)
        row_K = renumber[self.row_K]
        order = np.flatnonzero(row_K >= 0)
        order = order[np.argsort(row_K[order], kind="stable")]
        return replace(
            self,
            prompt_R=self.prompt_R[rows],
            node_R=self.node_R[rows],
            token_R=self.token_R[rows],
            slot_R=self.slot_R[rows],
            row_K=row_K[order],
            rollout_K=self.rollout_K[order],
        )

    def join(self, other: Rows) -> Rows:
        """Append other rows of the same depth."""
        assert self.depth == other.depth
        if not other.size:
            return self
        names = ("prompt_R", "node_R", "token_R", "slot_R", "rollout_K")
        joined = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names}
        return Rows(self.depth, row_K=np.concatenate([self.row_K, self.size + other.row_K]), **joined)


@dataclass(frozen=True)
class RowMemory:
    """How much memory rows use, and how many fit under a limit."""

    limit: int  # bytes for the keys and values of rows and prompts, and for the logits of rows
    max_rows: int  # maximum number of rows at a time
    max_tokens: int  # maximum tokens per row
    bytes_per_token: int  # keys and values of one token, in all layers
    largest_layer: int  # bytes for a token's keys and values in the largest layer
    bytes_per_row: int  # logits of one row, their softmax, and one temporary of the same size

    @classmethod
    def of(
        cls, model: PreTrainedModel, shapes: Sequence[KVShape], limit: int, max_rows: int, max_tokens: int
    ) -> RowMemory:
        """Return the memory use of a model's rows, computed from the shape of keys and values in each layer."""
        itemsize = model.dtype.itemsize
        vocabulary = model.config.get_text_config().vocab_size
        sizes = [shape.size * itemsize for shape in shapes]
        logit_bytes = logit_bytes_per_row(vocabulary, itemsize)
        return cls(limit, max_rows, max_tokens, sum(sizes), max(sizes), logit_bytes)

    @property
    def prompt_tokens(self) -> int:
        """Maximum number of prompt tokens to cache together: as many as fill half of the limit."""
        return self.limit // (2 * self.bytes_per_token)

    def rows(self, tokens_reserved: int, other_bytes: int) -> int:
        """Return how many rows of `tokens_reserved` tokens fit next to prompts that take `other_bytes`."""
        row_bytes = tokens_reserved * self.bytes_per_token + self.bytes_per_row
        return max(0, self.limit - other_bytes) // row_bytes

    def too_small_error(self, num_tokens: int, tokens_reserved: int, other_bytes: int) -> OutOfMemoryError:
        """Return the error for a limit too small for a single row."""
        row_bytes = tokens_reserved * self.bytes_per_token + self.bytes_per_row
        return OutOfMemoryError(
            f"one row of {num_tokens} tokens needs {row_bytes / 2**20:.3g} MiB and the prompts need "
            f"{other_bytes / 2**20:.3g} MiB, but the engine may use only {self.limit / 2**20:.3g} MiB; raise "
            "engine.memory_gib or lower sampling.max_new_tokens"
        )


class Decoder:
    """Feeds the rows of growing trees to a model, in waves. A wave is a group of prompts, with rows of equal length."""

    def attention(self) -> AbstractContextManager[None]:
        """Return the context manager inside which all other methods are called."""
        return nullcontext()

    def split(self, prompts: Sequence[tuple[int, ...]]) -> list[IntArray]:
        """Split prompts into waves that are prefilled and decoded together, each an ascending array of indices."""
        raise NotImplementedError

    def start(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Begin a wave: prefill its prompts and return the logits after each, shape [P, V]."""
        raise NotImplementedError

    def rows_that_fit(self, num_tokens: int) -> int:
        """Return how many rows of `num_tokens` fit in addition to the prompts. Raise `OutOfMemoryError` if none."""
        raise NotImplementedError

    def keep_prompts(self, prompts: IntArray) -> None:
        """Keep only these prompts from the wave. The others no longer have rows."""

    def place(self, rows: Rows, prompt_R: IntArray) -> Rows:
        """Assign each row a slot that continues its `slot_R` and return the rows in the order of their new slots.

        `prompt_R` is the index of each row's prompt in the wave.
        """
        raise NotImplementedError

    def feed(self, rows: Rows) -> Tensor:
        """Feed the last token of each placed row and return the logits, shape [R, V]."""
        raise NotImplementedError


class ModelCacheDecoder(Decoder):
    """Decodes with the model's own cache, which stores each row's prompt and tokens, or the state after them."""

    def __init__(self, model: PreTrainedModel, memory_bytes: int) -> None:
        self._model = model
        self._memory_bytes = memory_bytes
        vocabulary: int = model.config.get_text_config().vocab_size
        self._logit_bytes = logit_bytes_per_row(vocabulary, model.dtype.itemsize)
        self._cache: ModelCache
        self._num_rows = self._num_tokens = 0  # rows in the cache, and tokens of each row

    def split(self, prompts: Sequence[tuple[int, ...]]) -> list[IntArray]:
        """Split prompts into waves of equal-length prompts, since a state cannot skip padding; see `Decoder.split`."""
        length_P = np.array([len(prompt) for prompt in prompts])
        waves: list[IntArray] = []
        for length in np.unique(length_P).tolist():
            same = np.flatnonzero(length_P == length)
            size = max(1, PREFILL_TOKENS // length)
            waves += np.split(same, range(size, same.size, size))
        return waves

    def start(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Prefill the prompts of a wave, all of equal length; see `Decoder.start`."""
        self._cache = ModelCache(self._model, self._tensor(np.array(prompts)))
        self._num_rows, self._num_tokens = len(prompts), len(prompts[0])
        return self._cache.logits_RV

    def rows_that_fit(self, num_tokens: int) -> int:
        """Return how many rows fit after one more token; see `Decoder.rows_that_fit`."""
        row_bytes = self._cache.num_bytes * (self._num_tokens + 1) // (self._num_rows * self._num_tokens)
        needed = row_bytes + self._logit_bytes
        if needed > self._memory_bytes:
            raise OutOfMemoryError(
                f"one row of {num_tokens} tokens and its prompt need {needed / 2**20:.3g} MiB, but the engine may use "
                f"only {self._memory_bytes / 2**20:.3g} MiB; raise engine.memory_gib or lower sampling.max_new_tokens"
            )
        return self._memory_bytes // needed

    def place(self, rows: Rows, prompt_R: IntArray) -> Rows:  # noqa: ARG002
        """Select and repeat the rows of the cache; see `Decoder.place`."""
        if not np.array_equal(rows.slot_R, np.arange(self._num_rows)):
            self._cache.take(self._tensor(rows.slot_R))
            self._num_rows = rows.size
        return replace(rows, slot_R=np.arange(rows.size))

    def feed(self, rows: Rows) -> Tensor:
        """Feed one token per row; see `Decoder.feed`."""
        self._num_tokens += 1
        return self._cache.feed(self._tensor(rows.token_R))

    def _tensor(self, array: IntArray) -> Tensor:
        return to_device(array, self._model.device)
