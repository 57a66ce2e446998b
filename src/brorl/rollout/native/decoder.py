"""Feeding tokens of rows to a model: with tree attention, or with the model's own cache.

A decoder keeps the keys, values or states of the rows, and computes how many fit into its memory. Both decoders feed
each distinct prefix once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.errors import OutOfMemoryError
from brorl.model.device import at_least_float32, to_device
from brorl.model.own_cache import OwnCache
from brorl.model.tree_attention import PREFILL_TOKENS, Grouping, PackedPass, PromptCache, prefill, tree_attention
from brorl.rollout.native.row_cache import PagedRowCache, RowCache
from brorl.tree import IntArray


class DecodeContext:
    """One new token per row: it attends to its prompt and to its own row."""

    def __init__(self, rows: RowCache, position: int, prompts: PromptCache, prompt_R: IntArray) -> None:
        self._rows = rows
        self._position = position
        self._prompts = prompts
        self._prompt_R = prompt_R
        self.longest = int(prompts.value[0].shape[2]) + position + 1

    @cached_property
    def _grouping(self) -> Grouping:
        return Grouping(self._prompt_R, self._prompts.length.size, self._prompts.device)

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        """Store the new keys and values, then attend to the prompt and to the row with one softmax."""
        if isinstance(self._rows, PagedRowCache):
            prompts = self._prompts
            prompt_R, length_P = torch.from_numpy(self._prompt_R), torch.from_numpy(prompts.length)
            return self._rows.kernels.attend_rows(
                query_THD, key_TKD, value_TKD, prompts.key[layer], prompts.value[layer], prompt_R, length_P,
                self._rows.pages(layer), self._rows.slot_BR, self._position,
            )  # fmt: skip
        num_rows, prompt_key = query_THD.shape[0], self._prompts.key[layer]
        num_kv_heads, num_prompt = prompt_key.shape[1:3]
        key, value = self._rows.key[layer], self._rows.value[layer]
        key[:num_rows, ..., self._position] = key_TKD
        value[:num_rows, :, self._position] = value_TKD
        query = query_THD.unflatten(1, (num_kv_heads, -1))  # [R, K, G, D]
        # All reserved tokens, not only those in use: memory is read in one stream, which is twice as fast as with gaps.
        of_row = query @ key[:num_rows]  # [R, K, G, T]
        of_prompt = self._grouping.spread(query.transpose(0, 1)) @ prompt_key.permute(1, 0, 3, 2)
        if self._prompts.bias is not None:
            of_prompt += self._prompts.bias
        score = of_row.new_empty(*of_row.shape[:3], num_prompt + of_row.shape[3], dtype=at_least_float32(of_row.dtype))
        score[..., :num_prompt] = self._grouping.gather(of_prompt).transpose(0, 1)
        score[..., num_prompt:] = of_row
        score[..., num_prompt + self._position + 1 :].fill_(float("-inf"))
        weight = score.softmax(3).to(value.dtype)
        output: Tensor = weight[..., num_prompt:] @ value[:num_rows]
        of_prompt = self._grouping.spread(weight[..., :num_prompt].transpose(0, 1))
        of_prompt = self._grouping.gather(of_prompt @ self._prompts.value[layer].transpose(0, 1))
        return output.add_(of_prompt.transpose(0, 1)).flatten(1, 2)


@dataclass(frozen=True)
class Rows:
    """Live prefixes, all of one length, and their rollouts."""

    depth: int  # number of tokens after the prompt; with 0 each prompt is one row
    prompt_R: IntArray  # prompt of each row, shape [R]
    node_R: IntArray  # forest node of each row's last token, shape [R]; -1 at depth 0
    token_R: IntArray  # each row's last token, shape [R]; -1 at depth 0
    row_K: IntArray  # row of each rollout, ascending, shape [K]
    rollout_K: IntArray  # index of each rollout within its prompt, shape [K]

    def take(self, rows: IntArray) -> Rows:
        """Return some rows, renumbered in the given order, with their rollouts."""
        if np.array_equal(rows, np.arange(self.node_R.size)):
            return self
        renumber = np.full(self.node_R.size, -1)
        renumber[rows] = np.arange(rows.size)
        row_K = renumber[self.row_K]
        order = np.flatnonzero(row_K >= 0)
        order = order[np.argsort(row_K[order], kind="stable")]
        return Rows(
            self.depth,
            self.prompt_R[rows],
            self.node_R[rows],
            self.token_R[rows],
            row_K[order],
            self.rollout_K[order],
        )


class TreeDecoder:
    """Tree attention: a row attends to the keys of its prompt and to its own."""

    def __init__(self, model: PreTrainedModel, packed: PackedPass, cache: RowCache) -> None:
        self._model = model
        self._packed = packed
        self._cache = cache
        self._prompts: PromptCache

    def attention(self) -> AbstractContextManager[None]:
        """Return the context in which all other methods are called: the model's attention is hooked."""
        return tree_attention(self._model)

    def split(self, prompts: Sequence[tuple[int, ...]]) -> list[IntArray]:
        """Split prompts into runs that can be prefilled and decoded together; each is an ascending array of indices."""
        limit = min(PREFILL_TOKENS, self._cache.prompt_tokens_that_fit())
        starts, longest = [0], 0
        for index, prompt in enumerate(prompts):
            longest = max(longest, len(prompt))
            if (index + 1 - starts[-1]) * longest > limit and index > starts[-1]:
                starts.append(index)
                longest = len(prompt)
        return [np.arange(a, b) for a, b in pairwise([*starts, len(prompts)])]

    def start(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Begin a wave: compute its prompts, and return the logits after each, shape [P, V]."""
        prompt_cache, logits_PV = prefill(self._packed, list(prompts))
        self._prompts = prompt_cache.for_kernels() if isinstance(self._cache, PagedRowCache) else prompt_cache
        return logits_PV

    def rows_that_fit(self, num_tokens: int) -> int:
        """Return how many rows of so many tokens fit beside the prompts; see `RowCache.rows_that_fit`."""
        return self._cache.rows_that_fit(num_tokens, self._prompts.num_bytes)

    def rearrange(self, rows: Rows, source_R: IntArray) -> Rows:
        """Let each row continue the row that was fed at its source; return the rows in the order of the next feed.

        The first child of a row keeps the slot of its parent, and the others are copied into free ones.
        """
        num_rows, stored_tokens = rows.node_R.size, rows.depth - 1
        slot_R = np.arange(num_rows)
        if stored_tokens:
            stays_R = np.append(True, source_R[1:] != source_R[:-1]) & (source_R < num_rows)
            free = np.ones(num_rows, np.bool_)
            free[source_R[stays_R]] = False
            slot_R = source_R.copy()
            slot_R[~stays_R] = np.flatnonzero(free)
        order = np.argsort(slot_R)
        self._cache.rearrange(source_R[order], stored_tokens, rows.depth, self._prompts.num_bytes)
        return rows.take(order)

    def restart(self, prompt_R: IntArray, num_tokens: int) -> None:
        """Begin with rows of an earlier wave, which are fed again: the prompt of each among the wave's, shape [R]."""
        self._cache.rearrange(np.arange(prompt_R.size), 0, num_tokens, self._prompts.num_bytes)

    def keep_prompts(self, prompts: IntArray) -> None:
        """Drop the prompts of the wave that have no rows any more."""
        self._prompts = self._prompts.select(prompts)

    def feed(self, token_R: IntArray, position: int, prompt_R: IntArray) -> Tensor:
        """Feed one token per row, at a position after its prompt; return logits, shape [R, V]."""
        context = DecodeContext(self._cache, position, self._prompts, prompt_R)
        position_R = to_device(self._prompts.length[prompt_R] + position, self._packed.device)
        return self._packed.row_logits(to_device(token_R, self._packed.device), position_R, context, None).whole()


class ModelCacheDecoder:
    """The model's own cache: each row has its own copy of its prompt and its tokens, or the state after them."""

    def __init__(self, model: PreTrainedModel, memory_bytes: int) -> None:
        self._model = model
        self._memory_bytes = memory_bytes
        vocabulary: int = model.config.get_text_config().vocab_size
        self._logit_bytes: int = 3 * vocabulary * max(4, model.dtype.itemsize)
        self._cache: OwnCache
        self._num_rows = self._num_tokens = 0  # in the cache, and of each

    def attention(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def split(self, prompts: Sequence[tuple[int, ...]]) -> list[IntArray]:
        """Split prompts into runs of one length, because a state cannot skip padding; see `TreeDecoder.split`."""
        length_P = np.array([len(prompt) for prompt in prompts])
        runs: list[IntArray] = []
        for length in np.unique(length_P).tolist():
            same = np.flatnonzero(length_P == length)
            size = max(1, PREFILL_TOKENS // length)
            runs += np.split(same, range(size, same.size, size))
        return runs

    def start(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Compute the prompts of a wave, all of one length; see `TreeDecoder.start`."""
        self._cache = OwnCache(self._model, self._tensor(np.array(prompts)))
        self._num_rows, self._num_tokens = len(prompts), len(prompts[0])
        return self._cache.logits_RV

    def rows_that_fit(self, num_tokens: int) -> int:
        """Return how many rows fit after one more token; see `TreeDecoder.rows_that_fit`."""
        row_bytes = self._cache.num_bytes * (self._num_tokens + 1) // (self._num_rows * self._num_tokens)
        needed = row_bytes + self._logit_bytes
        if needed > self._memory_bytes:
            raise OutOfMemoryError(
                f"one row of {num_tokens} tokens and its prompt need {needed / 2**20:.3g} MiB, and the engine may use "
                f"{self._memory_bytes / 2**20:.3g} MiB; raise engine.memory_gib or lower sampling.max_new_tokens"
            )
        return self._memory_bytes // needed

    def rearrange(self, rows: Rows, source_R: IntArray) -> Rows:
        """Choose and repeat the rows of the cache; see `TreeDecoder.rearrange`."""
        if not np.array_equal(source_R, np.arange(self._num_rows)):
            self._cache.take(self._tensor(source_R))
            self._num_rows = source_R.size
        return rows

    def restart(self, prompt_R: IntArray, num_tokens: int) -> None:  # noqa: ARG002
        """Repeat the prompts for rows that are fed again; see `TreeDecoder.restart`."""
        self._cache.take(self._tensor(prompt_R))
        self._num_rows = prompt_R.size

    def keep_prompts(self, prompts: IntArray) -> None:
        """Do nothing: the prompts are in the rows."""

    def feed(self, token_R: IntArray, position: int, prompt_R: IntArray) -> Tensor:  # noqa: ARG002
        """Feed one token per row; see `TreeDecoder.feed`."""
        self._num_tokens += 1
        return self._cache.feed(self._tensor(token_R))

    def _tensor(self, array: IntArray) -> Tensor:
        return to_device(array, self._model.device)


Decoder = TreeDecoder | ModelCacheDecoder
