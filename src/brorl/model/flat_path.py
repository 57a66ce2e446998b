"""The flat path, for models whose attention cannot be hooked: each distinct response is a row with its prompt.

Rows are padded on the right, which a causal model never reads. Each node takes its log-prob from the first response
that contains it. Rows are sampled with the model's own cache. Dimensions: B rows, S tokens of the longest row, K owned
nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
from torch import Tensor
from transformers import Cache, PreTrainedModel

from brorl.arrays import FloatArray, IntArray
from brorl.errors import UserError
from brorl.model.chunks import default_max_nodes, num_tree_tokens, padded_ranges
from brorl.model.device import to_device
from brorl.model.logits import row_logits
from brorl.model.logprobs import PLAIN, ChunkLogprobs, LogprobHead, NextToken, node_offsets
from brorl.tree import RolloutTree

ResponseRow = tuple[int, int]  # (index of a tree, index of one of its distinct responses)


def split_into_rows(trees: Sequence[RolloutTree], max_tokens: int) -> list[list[ResponseRow]]:
    """Split the distinct responses of trees into chunks of at most `max_tokens` tokens, including padding.

    A row is a prompt and its response without the last token, which predicts nothing. A longer row gets its own chunk.
    """
    rows = [(index, leaf) for index, tree in enumerate(trees) for leaf in range(tree.num_responses)]
    lengths = [len(tree.prompt_ids) + length - 1 for tree in trees for length in tree.total_length.tolist()]
    return [[rows[index] for index in chunk] for chunk in padded_ranges(lengths, max_tokens) if chunk.size]


def flat_chunk_logprobs(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    *,
    next_token: NextToken = PLAIN,
    max_nodes: int | None = None,
    entropy: bool = False,
    recompute_prompts: bool = False,
    whole_logits: bool = False,
) -> Iterator[ChunkLogprobs]:
    """Yield the log-probs of all nodes in chunks, as `tree_path.chunk_logprobs` does, with any causal LM.

    `max_nodes` limits the tokens per pass, including prompts and padding. `recompute_prompts` has no effect, because
    each row contains its prompt.
    """
    del recompute_prompts
    offsets = node_offsets(trees)
    head = LogprobHead(next_token, entropy)
    for rows in split_into_rows(trees, max_nodes or default_max_nodes(model, whole_logits=whole_logits)):
        yield _chunk(model, trees, offsets, rows, head, whole_logits)


def _chunk(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    offsets: IntArray,
    rows: Sequence[ResponseRow],
    head: LogprobHead,
    whole_logits: bool,
) -> ChunkLogprobs:
    """Compute the log-probs of the nodes whose first response is in a chunk of rows."""
    inputs = [_input_tokens(trees[index], leaf) for index, leaf in rows]
    input_BS = np.zeros((len(rows), max(row.size for row in inputs)), np.int64)
    for row, tokens in enumerate(inputs):
        input_BS[row, : tokens.size] = tokens

    owned = [_owned(trees[index], leaf) for index, leaf in rows]
    sizes = [nodes.size for nodes in owned]
    tree_nodes = [(trees[index], nodes) for (index, _), nodes in zip(rows, owned, strict=True)]
    depth_K = np.concatenate([tree.depth[nodes] for tree, nodes in tree_nodes])
    token_K = np.concatenate([tree.token[nodes] for tree, nodes in tree_nodes])
    index_K = np.repeat([offsets[index] for index, _ in rows], sizes) + np.concatenate(owned)
    before_K = np.repeat([len(tree.prompt_ids) - 1 for tree, _ in tree_nodes], sizes)
    first_needed = int((before_K + depth_K).min())  # earlier positions predict no owned node

    def tensor(array: IntArray) -> Tensor:
        return to_device(array, model.device)

    positions = input_BS.shape[1] - first_needed
    last = last_logits(model, positions)

    def forward() -> Tensor:
        logits: Tensor = model(input_ids=tensor(input_BS), use_cache=False, **last).logits
        return logits

    num_rows = len(rows) * (positions if last else input_BS.shape[1])
    logits = row_logits(model, forward, num_rows, whole_logits=whole_logits)
    first_computed = input_BS.shape[1] - logits.row.shape[1]  # 0 if the model cannot limit its logits
    row_K = np.repeat(np.arange(len(rows)), sizes)
    logits = replace(logits, row=logits.row[tensor(row_K), tensor(before_K + depth_K - first_computed)])
    return head.logprobs(logits, depth_K, np.arange(depth_K.size), token_K, index_K)


def _input_tokens(tree: RolloutTree, leaf: int) -> IntArray:
    """Return a prompt and its response without the last token."""
    response = tree.token[tree.path(int(tree.leaf[leaf]))]
    return np.array([*tree.prompt_ids, *response[:-1]])


def _owned(tree: RolloutTree, leaf: int) -> IntArray:
    """Return a response's sampled nodes that no earlier response contains: those after the previous leaf."""
    node_K = np.arange(int(tree.leaf[leaf - 1]) + 1 if leaf else 0, int(tree.leaf[leaf]) + 1)
    return node_K[~tree.given[node_K]]


def last_logits(model: PreTrainedModel, positions: int) -> dict[str, int]:
    """Return the argument that limits the logits to the last positions, if the model accepts it."""
    has = "logits_to_keep" in signature(model.forward).parameters
    return {"logits_to_keep": positions} if has else {}


def flat_costs(tree: RolloutTree, cost_per_position: float) -> FloatArray:
    """Return the cost of each distinct response on the flat path, in tokens, shape [L]: prompt plus response."""
    length_L = len(tree.prompt_ids) + tree.total_length
    return length_L + cost_per_position * length_L * (length_L - 1) / 2


@dataclass(frozen=True)
class FlatForward:
    """The model's own forward pass."""

    reason: str  # why the tree path is not used
    whole_logits: bool = False  # whether the model needs whole logits; see `brorl.model.logits`
    response_costs = staticmethod(flat_costs)

    def default_max_nodes(self, model: PreTrainedModel) -> int:
        """Return the default maximum number of tokens per forward pass."""
        return default_max_nodes(model, whole_logits=self.whole_logits)

    @property
    def chunk_logprobs(self) -> partial[Iterator[ChunkLogprobs]]:
        """`flat_chunk_logprobs` with this `whole_logits`."""
        return partial(flat_chunk_logprobs, whole_logits=self.whole_logits)

    def cost_line(self, trees: Sequence[RolloutTree]) -> str:
        """Return a line that compares the tokens of a pass with those that tree attention would need."""
        tokens, distinct = num_flat_tokens(trees), num_tree_tokens(trees)
        return (
            f"flat path: a pass over the responses of this step has {tokens:,} tokens; with tree attention it would "
            f"have {distinct:,} ({tokens / distinct:.1f} times fewer)"
        )


def num_flat_tokens(trees: Sequence[RolloutTree]) -> int:
    """Return the number of tokens in a flat pass over trees: a row per distinct response, excluding padding."""
    return sum(int((len(tree.prompt_ids) + tree.total_length - 1).sum()) for tree in trees)


_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # `cache` since transformers 5.24


class CacheError(UserError):
    """A model cannot decode with its own cache."""

    @classmethod
    def of(cls, model: PreTrainedModel, reason: str) -> CacheError:
        """Return the error for an architecture, with the reason."""
        return cls(f"{type(model).__name__} cannot take the flat path: {reason}; choose another model")


class ModelCache:
    """A model's own cache, initialized with P prompts of equal length: token ids, shape [P, S].

    Initially each prompt is a row. `logits_RV` holds the logits after the last token of each row.
    """

    def __init__(self, model: PreTrainedModel, prompt_PS: Tensor) -> None:
        parameters = signature(model.forward).parameters
        self._model = model
        self._argument = next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
        self._last = last_logits(model, 1)
        self._cache: Cache | None = None
        self.logits_RV = self._forward(prompt_PS)

    def take(self, row_R: Tensor) -> None:
        """Keep only the given rows, in this order. A row can be repeated."""
        assert self._cache is not None
        self._cache.reorder_cache(row_R.long())  # type: ignore[arg-type]

    def feed(self, token_R: Tensor) -> Tensor:
        """Feed one token per row and return the logits after it, shape [R, V]."""
        self.logits_RV = self._forward(token_R[:, None])
        return self.logits_RV

    @property
    def num_bytes(self) -> int:
        """Memory of the cache in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self._cache))

    def _forward(self, token_RT: Tensor) -> Tensor:
        if self._argument is None:
            raise CacheError.of(self._model, "its forward pass takes no cache")
        cache = {} if self._cache is None else {self._argument: self._cache}
        output = self._model(input_ids=token_RT, use_cache=True, **cache, **self._last)
        self._cache = getattr(output, self._argument, None)
        if not isinstance(self._cache, Cache):
            raise CacheError.of(self._model, "its forward pass returns no cache")
        logits: Tensor = output.logits[:, -1]
        return logits


def _tensors(container: Any) -> list[Tensor]:
    """Return the tensors of a cache and of its layers."""
    if isinstance(container, Tensor):
        return [container]
    if isinstance(container, dict):
        return [tensor for value in container.values() for tensor in _tensors(value)]
    if isinstance(container, list | tuple):
        return [tensor for value in container for tensor in _tensors(value)]
    return _tensors(vars(container)) if type(container).__module__.startswith("transformers.cache") else []
