"""Log-probabilities of every tree node under a model: exact, differentiable, chunked.

In: a causal LM and trees. Out: one log-prob (nats) per node, given its prompt and prefix. `tree_logprobs` returns
them as tensors that can be differentiated. `chunk_logprobs` yields them chunk by chunk. The caller back-propagates each
chunk before the next, which keeps the learner's memory independent of N. In both, a prompt is computed once, and its
keys and values collect the gradient of all chunks before it flows through the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from brorl.model.next_token import PLAIN, NextToken
from brorl.model.softmax import softmax_lse
from brorl.model.tree_attention import PromptCache, packed_logits, prefill, tree_attention
from brorl.model.tree_batch import ChunkSlice, TreeBatch, split_into_chunks
from brorl.tree import RolloutTree

_LOGITS_PER_CHUNK = 1 << 27


@dataclass(frozen=True)
class ChunkLogprobs:
    """Log-probs of the nodes of one chunk.

    Attributes:
        index: Their numbers among the nodes of all trees, in the trees' order, shape [K].
        logprob: Their log-probs in nats, shape [K].
        entropy: Entropy (nats) of the distribution that each was drawn from, shape [K]; None if not requested.
    """

    index: Tensor
    logprob: Tensor
    entropy: Tensor | None = None


def default_max_nodes(model: PreTrainedModel) -> int:
    """Return the number of nodes of a chunk: 1024, or fewer if a large vocabulary makes the logits large."""
    vocabulary: int = model.config.get_text_config().vocab_size
    return max(128, min(1024, _LOGITS_PER_CHUNK // vocabulary))


def tree_logprobs(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    *,
    next_token: NextToken = PLAIN,
    max_nodes: int | None = None,
) -> list[Tensor]:
    """Compute the log-prob of every node of every tree.

    Args:
        model: A causal LM whose attention can be hooked.
        trees: P trees.
        next_token: From logits to the distribution that the rollouts were drawn from.
        max_nodes: Nodes per forward pass, 1 or more; sets peak memory, not the result. None for the default. With
            gradients, chunks are computed again in the backward pass.

    Returns:
        For each tree the log-probs in nats, shape [M], differentiable where gradients are enabled.
    """
    if not trees:
        return []
    offsets = node_offsets(trees)
    chunks: list[ChunkLogprobs] = []
    with tree_attention(model):
        cache, logits_PV = prefill(model, [t.prompt_ids for t in trees])
    outputs = NodeOutputs(next_token, entropy=False)
    chunks.append(_first_level(trees, offsets, logits_PV, outputs))
    for slices in split_into_chunks(trees, max_nodes or default_max_nodes(model)):
        run = partial(_compute_chunk, model, trees, offsets, slices, cache, outputs)
        chunk = checkpoint(run, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else run()
        if chunk is not None:
            chunks.append(chunk)
    return by_tree(chunks, trees)


def chunk_logprobs(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    *,
    next_token: NextToken = PLAIN,
    max_nodes: int | None = None,
    entropy: bool = False,
    recompute_prompts: bool = False,
) -> Iterator[ChunkLogprobs]:
    """Yield the log-probs of all nodes in chunks; back-propagate each chunk's loss before the next chunk.

    Args:
        model: A causal LM whose attention can be hooked.
        trees: P trees.
        next_token: From logits to the distribution that the rollouts were drawn from.
        max_nodes: Nodes (and prompt tokens) per forward pass, 1 or more; None for the default.
        entropy: Whether to compute the entropy of these distributions too, with a gradient.
        recompute_prompts: Compute the prompts again for their backward pass. A backward pass then always follows its
            forward pass, which a sharded model needs.

    Yields:
        Chunks that together hold every node once. Parameter gradients are complete when the iterator is exhausted.
    """
    if not trees:
        return
    max_nodes = max_nodes or default_max_nodes(model)
    offsets, outputs = node_offsets(trees), NodeOutputs(next_token, entropy)
    for start, stop in prompt_groups(trees, max_nodes):
        group, group_offsets = trees[start:stop], offsets[start:stop]
        with tree_attention(model):
            prompts = [t.prompt_ids for t in group]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not recompute_prompts):
                cache, logits_PV = prefill(model, prompts)
            computed = [logits_PV, *cache.key, *cache.value]
            held = [x.detach().requires_grad_(recompute_prompts or x.requires_grad) for x in computed]
            num_layers = len(cache.key)
            held_cache = PromptCache(held[1 : 1 + num_layers], held[1 + num_layers :], cache.bias, cache.length)
            yield _first_level(group, group_offsets, held[0], outputs)
            for slices in split_into_chunks(group, max_nodes):
                chunk = _compute_chunk(model, group, group_offsets, slices, held_cache, outputs)
                if chunk is not None:
                    yield chunk
            if recompute_prompts:
                again, logits_PV = prefill(model, prompts)
                computed = [logits_PV, *again.key, *again.value]
            received = [
                (x, h.grad) for x, h in zip(computed, held, strict=True) if x.requires_grad and h.grad is not None
            ]
            if received:
                torch.autograd.backward([x for x, _ in received], [g for _, g in received])


def _compute_chunk(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    offsets: NDArray[np.int64],
    slices: list[ChunkSlice],
    cache: PromptCache,
    outputs: NodeOutputs,
) -> ChunkLogprobs | None:
    """Compute the log-probs of the nodes that a chunk owns below the first level; None if it owns none."""
    batch = TreeBatch(trees, offsets, slices, cache)
    if not batch.target_index.numel():
        return None
    with tree_attention(model):
        logits_RV = packed_logits(model, batch.token_F, batch.position_F, batch.context(cache), batch.logit_rows)
    return outputs.of(logits_RV, batch.length_R, batch.target_row, batch.target_token, batch.target_index)


def _first_level(
    trees: Sequence[RolloutTree], offsets: NDArray[np.int64], logits_PV: Tensor, outputs: NodeOutputs
) -> ChunkLogprobs:
    """Compute the log-probs of the first tokens after the prompts."""
    roots = [np.flatnonzero(t.parent < 0) for t in trees]
    row = np.repeat(np.arange(len(trees)), [r.size for r in roots])
    token = np.concatenate([t.token[r] for t, r in zip(trees, roots, strict=True)])
    index = np.concatenate([o + r for o, r in zip(offsets, roots, strict=True)])
    device = logits_PV.device
    row_K, token_K, index_K = (torch.from_numpy(a).to(device) for a in (row, token, index))
    return outputs.of(logits_PV, torch.zeros(len(trees), device=device), row_K, token_K, index_K)


@dataclass(frozen=True)
class NodeOutputs:
    """Computes log-probs, and entropies if requested, from logits."""

    next_token: NextToken
    entropy: bool

    def of(self, logits_RV: Tensor, length_R: Tensor, row_K: Tensor, token_K: Tensor, index_K: Tensor) -> ChunkLogprobs:
        """Return the log-probs of K nodes.

        Args:
            logits_RV: The model's logits, shape [R, V].
            length_R: Tokens that the response of each row has so far, shape [R].
            row_K: The row that predicts each node, shape [K].
            token_K: Token id of each node, shape [K].
            index_K: Number of each node among the nodes of all trees, shape [K].
        """
        logits_RV = self.next_token.logits(logits_RV, length_R)
        weight_RV, lse_R = softmax_lse(logits_RV)
        logprob_K = logits_RV[row_K, token_K] - lse_R[row_K]
        if not self.entropy:
            return ChunkLogprobs(index_K, logprob_K)
        finite_RV = logits_RV.masked_fill(weight_RV == 0, 0.0)  # 0 times -inf is not 0
        entropy_R = lse_R - (weight_RV * finite_RV).sum(1)
        return ChunkLogprobs(index_K, logprob_K, entropy_R[row_K])


def by_tree(chunks: Sequence[ChunkLogprobs], trees: Sequence[RolloutTree]) -> list[Tensor]:
    """Return the log-probs of chunks that together hold every node once, for each tree in its order, shape [M]."""
    index = torch.cat([c.index for c in chunks])
    logprob = torch.cat([c.logprob for c in chunks])
    return list(logprob[torch.argsort(index)].split([t.num_unique_tokens for t in trees]))


def node_offsets(trees: Sequence[RolloutTree]) -> NDArray[np.int64]:
    """Return the number of nodes in the trees before each tree, shape [P]."""
    sizes = [t.num_unique_tokens for t in trees]
    return np.cumsum([0, *sizes])[:-1]


def prompt_groups(trees: Sequence[RolloutTree], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, stop) of trees whose prompts together have at most about `max_tokens` tokens."""
    start, tokens = 0, 0
    for i, tree in enumerate(trees):
        tokens += len(tree.prompt_ids)
        if tokens > max_tokens and i > start:
            yield start, i
            start, tokens = i, len(tree.prompt_ids)
    yield start, len(trees)
