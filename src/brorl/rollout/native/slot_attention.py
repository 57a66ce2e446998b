"""Keys and values of slots and their prompts, and the attention of slots to both. A slot is the memory for one row.

Dimensions: P prompts of length S, R slots that reserve T tokens each, U of them with a row, at most W slots per prompt,
C = P * W grid cells, K key-value heads, G query heads per key-value head, Q = W * G queries per prompt, D head
dimension. In `slot_decoder`, S counts slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.arrays import IntArray
from brorl.model.device import to_device
from brorl.model.kernels import suits_triton
from brorl.model.tree_attention import AttentionContext, KVShape, PromptCache
from brorl.rollout.native.decoder import RowMemory
from brorl.rollout.native.draw import POSITIONS_AT_ONCE

_COPIED_AT_ONCE = 1 << 26  # bytes


def rounded_up(number: int) -> int:
    """Round a number of tokens or slots up to the next of 16, 32, 48, 64, 96, 128, 192, ..."""
    power = POSITIONS_AT_ONCE
    while power < number:
        power *= 2
    less = power * 3 // 4
    return less if less >= max(number, 3 * POSITIONS_AT_ONCE) else power


class SlotCache:
    """Keys and values of slots, all with the same number of reserved tokens.

    Slots reserve as many tokens as rows currently need: there are many short slots at first, and fewer, longer slots
    later. Reservations grow in a few steps. At each step, the rows that continue are copied layer by layer.
    """

    def __init__(self, model: PreTrainedModel, shapes: Sequence[KVShape], memory: RowMemory) -> None:
        self.memory = memory
        self._empty = torch.empty(0, dtype=model.dtype, device=model.device)
        self._shapes = shapes
        self._layers_of = {shape: [i for i, s in enumerate(shapes) if s == shape] for shape in dict.fromkeys(shapes)}
        self._stores: list[Tensor] = []  # keys and values of each shape in turn, [layers, numbers]
        self._capacity = 0  # tokens that the stores can hold, over all slots
        self._slot_tokens = self._prompt_bytes = 0
        self.max_slots = 0  # maximum number of slots since `start`, at any length
        self.num_tokens = 0  # tokens reserved per slot
        self._views: list[Tensor] = []  # the stores, divided into slots
        self.key: list[Tensor] = []  # per layer, shape [slots, K, tokens, D]
        self.value: list[Tensor] = []  # per layer, like the keys

    @property
    def addresses(self) -> list[int]:
        """Addresses of the keys and values, and the distance between layers."""
        return [value for x in self._stores for value in (x.data_ptr(), x.shape[1])]

    def start(self, prompt_bytes: int) -> None:
        """Begin a wave with no rows yet, whose prompts' keys and values take `prompt_bytes`."""
        self._prompt_bytes = prompt_bytes
        self.max_slots, self._slot_tokens = self._sizes(prompt_bytes)
        self.num_tokens = 0
        room = self.memory.limit - prompt_bytes - self.max_slots * self.memory.bytes_per_row
        # How much room logits leave depends on the number of rows. Keep stores that hold 3/4 of the tokens that fit.
        enough = max(self._reserved(self.memory.max_tokens), 3 * self._slot_tokens // 4)
        if enough <= self._capacity and self._capacity * self.memory.bytes_per_token <= room:
            self._slot_tokens = min(self._slot_tokens, self._capacity)
        else:
            self._stores, self._views, self.key, self.value = [], [], [], []  # free memory before allocating more
            self._capacity = self._slot_tokens
            # Entries that no row has written get an attention weight of 0, but must be finite, so they start as zeros.
            self._stores = [
                self._empty.new_zeros(len(layers), self._capacity * shape.num_heads * dim)
                for shape, layers in self._layers_of.items()
                for dim in (shape.key_dim, shape.value_dim)
            ]

    def rows_that_fit(self, num_tokens: int) -> int:
        """Return how many rows of `num_tokens` fit. Raise an error if not even one fits."""
        fits = min(self.max_slots, self._slot_tokens // self._reserved(num_tokens))
        if not fits:
            raise self.memory.too_small_error(num_tokens, self._reserved(num_tokens), self._prompt_bytes)
        return fits

    def grows(self, num_tokens: int) -> bool:
        """Return whether rows of this length need more reserved tokens than slots currently have."""
        return self._reserved(num_tokens) > self.num_tokens

    def place(self, source_R: IntArray, slot_R: IntArray, stored_tokens: int, num_tokens: int) -> None:
        """Move each row's first `stored_tokens` tokens from slot source_R to slot_R, with room for `num_tokens`.

        If the reservation must grow, the new slots must be 0 to R - 1.
        """
        before = self._views
        grows = self.grows(num_tokens)
        if grows:
            self._lay_out(self._reserved(num_tokens))
        moved = np.arange(slot_R.size) if grows else np.flatnonzero(source_R != slot_R)
        if not stored_tokens or not moved.size:
            return
        source, target = to_device(np.stack([source_R[moved], slot_R[moved]]), self._empty.device)
        layer_bytes = moved.size * stored_tokens * self.memory.largest_layer
        step = 1 if grows else max(1, _COPIED_AT_ONCE // layer_bytes)  # a layer may be read after being written
        for views in zip(before, self._views, strict=True):
            old, new = (view.narrow(3, 0, stored_tokens) for view in views)
            for layers in map(slice, range(0, new.shape[0], step), range(step, new.shape[0] + step, step)):
                new[layers][:, target] = old[layers][:, source]

    def _reserved(self, num_tokens: int) -> int:
        """Return how many tokens to reserve for rows of this length; constant within a block of 16 positions."""
        return min(
            rounded_up(num_tokens // POSITIONS_AT_ONCE * POSITIONS_AT_ONCE + POSITIONS_AT_ONCE - 1),
            self.memory.max_tokens,
        )

    def _sizes(self, prompt_bytes: int) -> tuple[int, int]:
        """Return the maximum number of slots, and the total number of tokens in them.

        More short rows fit than full-length rows: their logits may take up to a quarter of the memory.
        """
        memory = self.memory
        longest = self._reserved(self.memory.max_tokens)
        left = max(0, memory.limit - prompt_bytes)
        beside_one = (left - longest * memory.bytes_per_token) // memory.bytes_per_row
        slots = max(1, memory.rows(longest, prompt_bytes), min(left // (4 * memory.bytes_per_row), beside_one))
        slots = min(slots, memory.max_rows)
        tokens = max(0, left - slots * memory.bytes_per_row) // memory.bytes_per_token
        return slots, min(tokens, slots * longest)

    def _lay_out(self, tokens: int) -> None:
        """Divide the stores into slots of `tokens` tokens."""
        self.num_tokens = tokens
        slots = min(self.max_slots, self._slot_tokens // tokens)
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


def power_of_two(number: int) -> int:
    """Return the smallest power of two not less than a positive number."""
    return 1 << (number - 1).bit_length()


class SlotPrompts:
    """Keys and values of P prompts, heads first, padded on the right.

    With `keeps`, memory is reused from wave to wave, and P and S are rounded up so they take few distinct values.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._stores: list[Tensor] = []  # keys and values of each layer in turn
        self._bias, self._length = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self.key: list[Tensor] = []  # per layer, shape [K, P, S, D]
        self.value: list[Tensor] = []  # like the keys
        self.bias: Tensor | None = None  # -inf for padding, else 0, shape [P, 1, S]; None without padding
        self.length = np.empty(0, np.int64)  # tokens of each prompt
        self.length_P = self._length  # `length` on the device

    @property
    def num_bytes(self) -> int:
        """Memory for the keys and values, in bytes."""
        return sum(x.numel() * x.element_size() for x in self._stores)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of prompts P and tokens S, including padding."""
        return self.value[0].shape[1], self.value[0].shape[2]

    @property
    def addresses(self) -> list[int]:
        """Addresses of the keys, values, bias and lengths."""
        return [x.data_ptr() for x in (*self._stores, self._bias, self._length)]

    def fill(self, cache: PromptCache) -> None:
        """Take over a wave's prompts, and empty the cache's lists."""
        tokens = rounded_up(cache.value[0].shape[2]) if self._keeps else cache.value[0].shape[2]
        layers = [(cache.key.pop(0), cache.value.pop(0)) for _ in range(len(cache.key))]
        self.length = cache.length
        self._put([x.transpose(0, 1) for pair in layers for x in pair], tokens)

    def keep(self, prompts: IntArray) -> None:
        """Keep only these prompts, in the given order."""
        chosen = to_device(prompts, self.value[0].device)
        self.length = self.length[prompts]
        pairs = zip(self.key, self.value, strict=True)
        self._put([x for pair in pairs for x in pair], self.shape[1], chosen)

    def _put(self, tensors: list[Tensor], tokens: int, chosen: Tensor | None = None) -> None:
        """Write the keys and values of all layers, each [K, P, S, D], padded to `tokens` tokens."""
        num_prompts = power_of_two(self.length.size) if self._keeps else self.length.size
        stores = self._stores
        views = []
        self._stores = []
        for index, tensor in enumerate(tensors):
            tensor = tensor if chosen is None else tensor[:, chosen]
            sizes = tensor.shape[0], num_prompts, tokens, tensor.shape[3]
            store = stores[index] if stores and self._keeps else tensor.new_empty(0)
            size = prod(sizes)
            if store.numel() < size:
                store = tensor.new_zeros(size)  # padding has an attention weight of 0, but must be finite
            view = store[:size].view(sizes)
            view[:, : tensor.shape[1], : tensor.shape[2]] = tensor
            self._stores.append(store)
            views.append(view)
        self.key, self.value = views[::2], views[1::2]
        self._set_bias(num_prompts, tokens)

    def _set_bias(self, num_prompts: int, tokens: int) -> None:
        """Write the prompts' lengths, and a bias that hides padding tokens. A padding prompt has full length."""
        length_P = np.append(self.length, [tokens] * (num_prompts - self.length.size))
        like = self.value[0]
        if self._length.device != like.device or self._length.numel() < num_prompts:
            self._length = torch.empty(num_prompts, dtype=torch.int64, device=like.device)
        self.length_P = self._length[:num_prompts]
        self.length_P.copy_(to_device(length_P, like.device))
        self.bias = None
        if self._keeps or (length_P < tokens).any():
            if self._bias.device != like.device or self._bias.numel() < num_prompts * tokens:
                self._bias = like.new_empty(num_prompts * tokens)
            padding_PS = torch.arange(tokens, device=like.device) >= self.length_P[:, None]
            self.bias = self._bias[: padding_PS.numel()].view(num_prompts, 1, tokens)
            self.bias.zero_().masked_fill_(padding_PS[:, None], float("-inf"))


class Grid(NamedTuple):
    """Arranges R slots in a padded grid of prompts by slots, so a single matrix product serves all prompts.

    Slots 0, 1, 2 of prompts 0, 1, 0 form the grid [[0, 2], [1, -]]: cell_R is [0, 2, 1].
    """

    shape: tuple[int, int]  # number of prompts P, and slots per prompt W
    slot_C: Tensor | None  # slot of each of the P * W cells; None if cells and slots are the same
    cell_R: Tensor | None  # cell of each slot

    def spread(self, x_RKGD: Tensor) -> Tensor:
        """[R, K, G, D] -> [K, P, W * G, D]."""
        x_KRGD = x_RKGD.transpose(0, 1)
        if self.slot_C is not None:
            x_KRGD = x_KRGD.index_select(1, self.slot_C)
        return x_KRGD.reshape(x_KRGD.shape[0], self.shape[0], -1, x_KRGD.shape[3])

    def gather(self, x_KPQD: Tensor, num_groups: int) -> Tensor:
        """[K, P, W * G, D] -> [R, K, G, D]."""
        x_KCGD: Tensor = x_KPQD.unflatten(2, (self.shape[1], num_groups)).flatten(1, 2)
        if self.cell_R is not None:
            x_KCGD = x_KCGD.index_select(1, self.cell_R)
        return x_KCGD.transpose(0, 1)


def cells_of(prompt_U: IntArray, num_prompts: int) -> tuple[IntArray, int]:
    """Return each slot's index within its prompt, and the most slots per prompt: [0, 1, 0] -> [0, 0, 1], 2."""
    count_P = np.bincount(prompt_U, minlength=num_prompts)
    order = np.argsort(prompt_U, kind="stable")
    rank_U = np.empty_like(order)
    rank_U[order] = np.arange(order.size) - (count_P.cumsum() - count_P)[prompt_U[order]]
    return rank_U, int(count_P.max())


class SlotContext(AttentionContext):
    """Attention of one new token in each of the first slots, to its prompt and its slot with one softmax.

    `position`, shape [1], is the new tokens' index in their slots. The longest context has `longest` tokens.
    """

    has_windows = True

    def __init__(
        self, cache: SlotCache, prompts: SlotPrompts, grid: Grid, position: Tensor, num_slots: int, longest: int
    ) -> None:
        self.longest = longest
        self._cache = cache
        self._prompts = prompts
        self._grid = grid
        self._position = position
        self._num_slots = num_slots
        self._biases: dict[int | None, tuple[Tensor, Tensor | None]] = {}  # window -> biases of `_hidden`

    def _hidden(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        """Return biases, -inf for hidden tokens and 0 for others: [T] for every slot, and [P, 1, S] for prompts."""
        if window in self._biases:
            return self._biases[window]
        position = self._position
        prompts = self._prompts
        token_T = torch.arange(self._cache.num_tokens, device=position.device)
        hidden_T = token_T > position
        prompt_bias = prompts.bias
        if window is not None:
            hidden_T |= token_T <= position - window
            token_S = torch.arange(prompts.shape[1], device=position.device)
            hidden_PS = token_S <= prompts.length_P[:, None] + position - window
            prompt_bias = prompts.value[0].new_zeros(1) if prompt_bias is None else prompt_bias
            prompt_bias = prompt_bias.masked_fill(hidden_PS[:, None], float("-inf"))
        bias_T = self._cache.value[0].new_zeros(hidden_T.shape).masked_fill_(hidden_T, float("-inf"))
        self._biases[window] = bias_T, prompt_bias
        return self._biases[window]

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, window: int | None = None, /
    ) -> Tensor:
        """Store the new keys and values, then attend; see `AttentionContext`."""
        key, value = (x[layer][: self._num_slots] for x in (self._cache.key, self._cache.value))
        if suits_triton(query_THD) and key.shape == value.shape:
            from brorl.model.triton_kernels import PromptLevel, attend

            prompts = self._prompts
            stored = prompts.key[layer], prompts.value[layer], prompts.length_P
            level = PromptLevel(*stored, self._grid.shape[1], self._grid.slot_C, self._grid.cell_R)
            return attend(query_THD, key_TKD, value_TKD, key, value, level, self._position, window)
        key.index_copy_(2, self._position, key_TKD[:, :, None])
        value.index_copy_(2, self._position, value_TKD[:, :, None])
        query = query_THD.unflatten(1, (key.shape[1], -1))  # [R, K, G, D]
        num_groups = query.shape[2]
        # This also reads reserved tokens not yet in use, so memory is read in one stream and shapes stay fixed.
        bias_T, bias_P1S = self._hidden(window)
        row_score = torch.baddbmm(bias_T, query.flatten(0, 1), key.flatten(0, 1).mT).unflatten(0, key.shape[:2])
        prompt_score = self._grid.spread(query) @ self._prompts.key[layer].mT  # [K, P, W * G, S]
        if bias_P1S is not None:
            prompt_score += bias_P1S
        weight = torch.cat([self._grid.gather(prompt_score, num_groups), row_score], 3).softmax(3)
        for_prompt, for_row = weight.split([prompt_score.shape[3], row_score.shape[3]], 3)
        output: Tensor = for_row @ value
        prompt_output = self._grid.spread(for_prompt) @ self._prompts.value[layer]
        output += self._grid.gather(prompt_output, num_groups)
        merged: Tensor = output.flatten(1, 2)
        return merged
