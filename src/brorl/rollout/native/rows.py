"""Live prefixes of one length, and the memory for their keys and values: slots of one block, within a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.arrays import IntArray
from brorl.errors import OutOfMemoryError
from brorl.model.device import to_device
from brorl.model.tree_attention import KVShape


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


BLOCK = 16  # tokens between two changes of what is reserved; those that are drawn between two looks of the host
_COPIED_AT_ONCE = 1 << 26  # bytes


def reserved_tokens(num_tokens: int) -> int:
    """Return the least of 16, 32, 48, 64, 96, 128, 192, ... that is no less than a number of tokens."""
    power = BLOCK
    while power < num_tokens:
        power *= 2
    less = power * 3 // 4
    return less if less >= max(num_tokens, 3 * BLOCK) else power


class Arena:
    """Keys and values of slots, all with the same number of reserved tokens.

    A slot holds as many tokens as the rows need now: there are many short slots at first and fewer long ones later. The
    reserved tokens grow in few steps, at each of which the rows that go on are written anew, layer by layer.
    """

    def __init__(self, model: PreTrainedModel, shapes: Sequence[KVShape], memory: RowMemory) -> None:
        self.memory = memory
        self._empty = torch.empty(0, dtype=model.dtype, device=model.device)
        self._shapes = shapes
        self._layers_of = {shape: [i for i, s in enumerate(shapes) if s == shape] for shape in dict.fromkeys(shapes)}
        self._stores: list[Tensor] = []  # keys and values of each shape in turn, [layers, numbers]
        self._capacity = 0  # tokens of all slots together that the stores hold
        self._slot_tokens = self._prompt_bytes = 0
        self.max_slots = self.num_tokens = 0  # with any number of tokens, since `start`; reserved in each slot
        self._views: list[Tensor] = []  # the stores, divided into slots
        self.key: list[Tensor] = []  # of each layer, shape [slots, K, tokens, D]
        self.value: list[Tensor] = []  # the same

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(x.numel() * x.element_size() for x in self._stores)

    @property
    def addresses(self) -> list[int]:
        """Where the keys and values are, and how far apart those of two layers are."""
        return [number for x in self._stores for number in (x.data_ptr(), x.shape[1])]

    def start(self, prompt_bytes: int) -> None:
        """Begin with no rows, beside prompts with so many bytes of keys and values."""
        self._prompt_bytes = prompt_bytes
        self.max_slots, self._slot_tokens = self._sizes(prompt_bytes)
        self.num_tokens = 0
        room = self.memory.limit - prompt_bytes - self.max_slots * self.memory.bytes_per_row
        # Logits of more or fewer rows than before change the rest by a quarter at most. The memory then stays.
        enough = max(self._reserved(self.memory.max_tokens), 3 * self._slot_tokens // 4)
        if enough <= self._capacity and self._capacity * self.memory.bytes_per_token <= room:
            self._slot_tokens = min(self._slot_tokens, self._capacity)
        else:
            self._stores, self._views, self.key, self.value = [], [], [], []  # free before more is allocated
            self._capacity = self._slot_tokens
            # Zeros: entries that no row has written get a weight of 0, so they must be finite.
            self._stores = [
                self._empty.new_zeros(len(layers), self._capacity * shape.num_heads * dim)
                for shape, layers in self._layers_of.items()
                for dim in (shape.key_dim, shape.value_dim)
            ]

    def rows_that_fit(self, num_tokens: int) -> int:
        """Return how many rows of `num_tokens` there can be; an error if not even one fits."""
        fits = min(self.max_slots, self._slot_tokens // self._reserved(num_tokens))
        if not fits:
            raise self.memory.too_small(num_tokens, self._reserved(num_tokens), self._prompt_bytes)
        return fits

    def grows(self, num_tokens: int) -> bool:
        """Return whether more tokens must be reserved than now."""
        return self._reserved(num_tokens) > self.num_tokens

    def place(self, source_R: IntArray, slot_R: IntArray, stored_tokens: int, num_tokens: int) -> None:
        """Let rows with `stored_tokens` go on from slots source_R in slots slot_R, with room for `num_tokens`.

        If more tokens must be reserved, the new slots are the numbers from 0 to R - 1.
        """
        before, grows = self._views, self.grows(num_tokens)
        if grows:
            self._lay_out(self._reserved(num_tokens))
        moved = np.arange(slot_R.size) if grows else np.flatnonzero(source_R != slot_R)
        if not stored_tokens or not moved.size:
            return
        source, target = to_device(np.stack([source_R[moved], slot_R[moved]]), self._empty.device)
        layer_bytes = moved.size * stored_tokens * self.memory.largest_layer
        step = 1 if grows else max(1, _COPIED_AT_ONCE // layer_bytes)  # one layer may be read after it is written
        for views in zip(before, self._views, strict=True):
            old, new = (view.narrow(3, 0, stored_tokens) for view in views)
            for layers in map(slice, range(0, new.shape[0], step), range(step, new.shape[0] + step, step)):
                new[layers][:, target] = old[layers][:, source]

    def _reserved(self, num_tokens: int) -> int:
        """Return the tokens that are reserved for rows of a length, the same for all of a block."""
        return min(reserved_tokens(num_tokens // BLOCK * BLOCK + BLOCK - 1), self.memory.max_tokens)

    def _sizes(self, prompt_bytes: int) -> tuple[int, int]:
        """Return the most slots, and the tokens of all of them together.

        Short rows may be more than those that fit at full length, up to a quarter of the memory for their logits.
        """
        memory, longest = self.memory, self._reserved(self.memory.max_tokens)
        left = max(0, memory.limit - prompt_bytes)
        beside_one = (left - longest * memory.bytes_per_token) // memory.bytes_per_row
        slots = max(1, memory.rows(longest, prompt_bytes), min(left // (4 * memory.bytes_per_row), beside_one))
        slots = min(slots, memory.max_rows)
        tokens = max(0, left - slots * memory.bytes_per_row) // memory.bytes_per_token
        return slots, min(tokens, slots * longest)

    def _lay_out(self, tokens: int) -> None:
        """Divide the stores into slots of so many tokens."""
        self.num_tokens, slots = tokens, min(self.max_slots, self._slot_tokens // tokens)
        stores = iter(self._stores)
        self._views = []
        for shape in self._layers_of:
            for dim in (shape.key_dim, shape.value_dim):
                sizes = slots, shape.num_heads, tokens, dim
                self._views.append(next(stores)[:, : prod(sizes)].unflatten(1, sizes))
        self.key, self.value = ([self._empty] * len(self._shapes) for _ in range(2))
        for index, layers in enumerate(self._layers_of.values()):
            for place, layer in enumerate(layers):
                self.key[layer], self.value[layer] = (view[place] for view in self._views[2 * index : 2 * index + 2])
