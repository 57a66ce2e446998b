"""Live prefixes of one length, and what a row of a decoding batch takes of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedModel

from brorl.arrays import IntArray
from brorl.errors import OutOfMemoryError
from brorl.model.model_shape import KVShape


@dataclass(frozen=True)
class Rows:
    """Live prefixes, all of one length, and their rollouts."""

    depth: int  # number of tokens after the prompt; with 0 each prompt is one row
    prompt_R: IntArray  # prompt of each row, shape [R]
    node_R: IntArray  # forest node of each row's last token, shape [R]; -1 at depth 0
    token_R: IntArray  # each row's last token, shape [R]; -1 at depth 0
    slot_R: IntArray  # where the tokens before it were fed, shape [R]; at depth 1 the prompt's place in its wave
    row_K: IntArray  # row of each rollout, ascending, shape [K]
    rollout_K: IntArray  # index of each rollout within its prompt, shape [K]

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.node_R.size

    def take(self, rows: IntArray) -> Rows:
        """Return some rows, renumbered in the given order, with their rollouts."""
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
        """Return these rows and then others of the same depth."""
        assert self.depth == other.depth
        if not other.size:
            return self
        names = ("prompt_R", "node_R", "token_R", "slot_R", "rollout_K")
        joined = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names}
        return Rows(self.depth, row_K=np.concatenate([self.row_K, self.size + other.row_K]), **joined)


@dataclass(frozen=True)
class RowMemory:
    """What rows take of a memory limit."""

    limit: int  # bytes of the rows' and prompts' keys and values, and of the rows' logits, together
    max_rows: int  # most rows there can be
    max_tokens: int  # most tokens per row
    bytes_per_token: int  # of keys and values in all layers
    largest_layer: int  # bytes of a token's keys and values in the largest layer
    bytes_per_row: int  # of a row's logits, their softmax, and one temporary of the same size

    @classmethod
    def of(
        cls, model: PreTrainedModel, shapes: Sequence[KVShape], limit: int, max_rows: int, max_tokens: int
    ) -> RowMemory:
        """Return the memory of a model's rows, from the shape of keys and values in each layer."""
        itemsize, vocabulary = model.dtype.itemsize, model.config.get_text_config().vocab_size
        sizes = [shape.size * itemsize for shape in shapes]
        return cls(limit, max_rows, max_tokens, sum(sizes), max(sizes), 3 * vocabulary * max(4, itemsize))

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that may be cached together: those that fill half of the memory."""
        return self.limit // (2 * self.bytes_per_token)

    def rows(self, tokens_reserved: int, other_bytes: int) -> int:
        """Return how many rows with so many reserved tokens fit beside the prompts' keys and values; 0 if none does."""
        row_bytes = tokens_reserved * self.bytes_per_token + self.bytes_per_row
        return max(0, self.limit - other_bytes) // row_bytes

    def too_small(self, num_tokens: int, tokens_reserved: int, other_bytes: int) -> OutOfMemoryError:
        """Return the error for a limit that does not hold a single row."""
        row_bytes = tokens_reserved * self.bytes_per_token + self.bytes_per_row
        return OutOfMemoryError(
            f"one row of {num_tokens} tokens needs {row_bytes / 2**20:.3g} MiB, the prompts beside it need "
            f"{other_bytes / 2**20:.3g} MiB, and the engine may use {self.limit / 2**20:.3g} MiB; raise "
            "engine.memory_gib or lower sampling.max_new_tokens"
        )
