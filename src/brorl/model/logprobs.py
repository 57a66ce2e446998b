"""Log-probabilities of every tree node under a model: exact, differentiable, chunked.

`tree_logprobs` returns them as tensors that can be differentiated. `chunk_logprobs` yields them chunk by chunk; the
caller back-propagates each chunk before the next, which keeps the learner's memory independent of N. In both, a prompt
is computed once, and its keys and values collect the gradient of all chunks before it flows through the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from brorl.model.device import to_device
from brorl.model.lean import LeanPass
from brorl.model.logits import LOGITS_PER_BLOCK, MAX_LOGITS, PLAIN, NextToken, RowLogits, softmax_lse
from brorl.model.tree_attention import HookedPass, PackedPass, PromptCache, prefill, tree_attention
from brorl.model.tree_batch import AttentionChoice, TreeBatch, TreeSlice, split_into_chunks
from brorl.tree import IntArray, RolloutTree

_DEFAULT_NODES = 1024
_DEFAULT_NODES_ON_CUDA = 8192  # a chunk starts hundreds of kernels per layer, whatever its size


@dataclass(frozen=True)
class ModelPass:
    """How chunks go through the model."""

    attention: AttentionChoice = "auto"  # how nodes attend to their prompts and paths; see `TreeContext`
    whole_logits: bool = False  # whether the model needs whole logits; see `brorl.model.logits`
    lean: bool = False  # whether the layers are computed by `LeanPass` instead of the model's modules

    def packed(self, model: PreTrainedModel) -> PackedPass:
        """Return a forward pass from the parameters of a model, to be used until they change."""
        if self.lean and not torch.is_autocast_enabled(model.device.type):
            return LeanPass(model)
        return HookedPass(model, whole_logits=self.whole_logits)


DEFAULT_PASS = ModelPass()


@dataclass(frozen=True)
class ChunkLogprobs:
    """Log-probs of the nodes of one chunk."""

    index: Tensor  # their numbers among the nodes of all trees, in the trees' order, shape [K]
    logprob: Tensor  # their log-probs in nats, shape [K]
    # entropy (nats) of the distribution that each was drawn from, shape [K]; None if not requested
    entropy: Tensor | None = None


def default_max_nodes(model: PreTrainedModel, *, whole_logits: bool = False, device: str | None = None) -> int:
    """Return the nodes of a chunk: 1024, on CUDA 8192; fewer if whole logits of a large vocabulary are large."""
    nodes = _DEFAULT_NODES_ON_CUDA if (device or model.device.type) == "cuda" else _DEFAULT_NODES
    vocabulary: int = model.config.get_text_config().vocab_size
    return max(128, min(nodes, MAX_LOGITS // vocabulary)) if whole_logits else nodes


def tree_logprobs(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    *,
    next_token: NextToken = PLAIN,
    max_nodes: int | None = None,
    model_pass: ModelPass = DEFAULT_PASS,
) -> list[Tensor]:
    """Compute the log-prob of every node of every tree.

    Args:
        model: A causal LM whose attention can be hooked.
        trees: P trees.
        next_token: From logits to the distribution that the rollouts were drawn from.
        max_nodes: Nodes per forward pass; sets peak memory, not the result. None for the default. With gradients,
            chunks are computed again in the backward pass.
        model_pass: How chunks go through the model.

    Returns:
        For each tree the log-probs in nats, shape [M], differentiable where gradients are enabled.
    """
    if not trees:
        return []
    offsets = node_offsets(trees)
    chunks: list[ChunkLogprobs] = []
    with tree_attention(model):
        cache, logits_PV = prefill(model_pass.packed(model), [t.prompt_ids for t in trees])
    outputs = NodeOutputs(next_token, entropy=False)
    chunks.append(_first_level(trees, offsets, logits_PV, outputs))
    max_nodes = max_nodes or default_max_nodes(model, whole_logits=model_pass.whole_logits)
    for slices in split_into_chunks(trees, max_nodes):
        run = partial(_compute_chunk, model, trees, offsets, slices, cache, outputs, model_pass)
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
    model_pass: ModelPass = DEFAULT_PASS,
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
        model_pass: How chunks go through the model.

    Yields:
        Chunks that together hold every node once. Parameter gradients are complete when the iterator is exhausted.
    """
    if not trees:
        return
    max_nodes = max_nodes or default_max_nodes(model, whole_logits=model_pass.whole_logits)
    offsets, outputs = node_offsets(trees), NodeOutputs(next_token, entropy)
    for start, stop in prompt_groups(trees, max_nodes):
        group, group_offsets = trees[start:stop], offsets[start:stop]
        with tree_attention(model):
            prompts = [t.prompt_ids for t in group]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not recompute_prompts):
                cache, logits_PV = prefill(model_pass.packed(model), prompts)
            computed = [logits_PV, *cache.key, *cache.value]
            held = [x.detach().requires_grad_(recompute_prompts or x.requires_grad) for x in computed]
            num_layers = len(cache.key)
            held_cache = PromptCache(held[1 : 1 + num_layers], held[1 + num_layers :], cache.bias, cache.length)
            yield _first_level(group, group_offsets, held[0], outputs)
            for slices in split_into_chunks(group, max_nodes):
                chunk = _compute_chunk(model, group, group_offsets, slices, held_cache, outputs, model_pass)
                if chunk is not None:
                    yield chunk
            if recompute_prompts:
                again, logits_PV = prefill(model_pass.packed(model), prompts)
                computed = [logits_PV, *again.key, *again.value]
            received = [
                (x, h.grad) for x, h in zip(computed, held, strict=True) if x.requires_grad and h.grad is not None
            ]
            if received:
                torch.autograd.backward([x for x, _ in received], [g for _, g in received])


def _compute_chunk(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    offsets: IntArray,
    slices: list[TreeSlice],
    cache: PromptCache,
    outputs: NodeOutputs,
    model_pass: ModelPass,
) -> ChunkLogprobs | None:
    """Compute the log-probs of the nodes that a chunk owns below the first level; None if it owns none."""
    batch = TreeBatch(trees, offsets, slices, cache)
    if not batch.target_index.numel():
        return None
    with tree_attention(model):
        context = batch.context(cache, model_pass.attention)
        rows = model_pass.packed(model).row_logits(batch.token_F, batch.position_F, context, batch.logit_rows)
    return outputs.of(rows, batch.length_R, batch.target_row, batch.target_token, batch.target_index)


def _first_level(
    trees: Sequence[RolloutTree], offsets: IntArray, logits_PV: Tensor, outputs: NodeOutputs
) -> ChunkLogprobs:
    """Compute the log-probs of the first tokens after the prompts."""
    roots = [np.flatnonzero(t.parent < 0) for t in trees]
    row = np.repeat(np.arange(len(trees)), [r.size for r in roots])
    token = np.concatenate([t.token[r] for t, r in zip(trees, roots, strict=True)])
    index = np.concatenate([o + r for o, r in zip(offsets, roots, strict=True)])
    device = logits_PV.device
    row_K, token_K, index_K = (to_device(array, device) for array in (row, token, index))
    return outputs.of(RowLogits(logits_PV), torch.zeros(len(trees), device=device), row_K, token_K, index_K)


@dataclass(frozen=True)
class NodeOutputs:
    """Computes log-probs, and entropies if requested, from logits."""

    next_token: NextToken  # from logits to the distribution that the rollouts were drawn from
    entropy: bool  # whether to compute entropies

    def of(self, rows: RowLogits, length_R: Tensor, row_K: Tensor, token_K: Tensor, index_K: Tensor) -> ChunkLogprobs:
        """Return the log-probs of K nodes, in any order.

        Args:
            rows: The model's logits of R rows.
            length_R: Tokens that the response of each row has so far, shape [R].
            row_K: The row that predicts each node, shape [K].
            token_K: Token id of each node, shape [K].
            index_K: Number of each node among the nodes of all trees, shape [K].
        """
        if rows.embedding is None:
            logprob_K, entropy_K = self._of_logits(rows.row, length_R, row_K, token_K)
            return ChunkLogprobs(index_K, logprob_K, entropy_K)
        order_K = torch.argsort(row_K, stable=True)
        index_K, row_K, token_K = index_K[order_K], row_K[order_K], token_K[order_K]
        size = max(1, LOGITS_PER_BLOCK // rows.vocabulary)
        starts = torch.arange(0, rows.row.shape[0] + size, size, device=row_K.device)
        edges = torch.searchsorted(row_K, starts).tolist()
        blocks = []
        for number, (hidden_Bh, length_B) in enumerate(zip(rows.row.split(size), length_R.split(size), strict=True)):
            nodes = slice(edges[number], edges[number + 1])
            run = partial(self._of_block, rows.embedding, hidden_Bh, length_B)
            place_K, of_block = row_K[nodes] - number * size, token_K[nodes]
            if torch.is_grad_enabled():
                blocks.append(checkpoint(run, place_K, of_block, use_reentrant=False, preserve_rng_state=False))
            else:
                blocks.append(run(place_K, of_block))
        logprobs, entropies = zip(*blocks, strict=True)
        return ChunkLogprobs(index_K, torch.cat(logprobs), torch.cat(entropies) if self.entropy else None)

    def _of_block(
        self, embedding: nn.Module, hidden_Bh: Tensor, length_B: Tensor, row_K: Tensor, token_K: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self._of_logits(embedding(hidden_Bh), length_B, row_K, token_K)

    def _of_logits(
        self, logits_RV: Tensor, length_R: Tensor, row_K: Tensor, token_K: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of K nodes, and their entropies if requested."""
        logits_RV = self.next_token.logits(logits_RV, length_R)
        weight_RV, lse_R = softmax_lse(logits_RV)
        logprob_K = logits_RV[row_K, token_K] - lse_R[row_K]
        if not self.entropy:
            return logprob_K, None
        finite_RV = logits_RV.masked_fill(weight_RV == 0, 0.0)  # 0 times -inf is not 0
        entropy_R = lse_R - (weight_RV * finite_RV).sum(1)
        return logprob_K, entropy_R[row_K]


def by_tree(chunks: Sequence[ChunkLogprobs], trees: Sequence[RolloutTree]) -> list[Tensor]:
    """Return the log-probs of chunks that together hold every node once, for each tree in its order, shape [M]."""
    if not trees:
        return []
    index = torch.cat([c.index for c in chunks])
    logprob = torch.cat([c.logprob for c in chunks])
    return list(logprob[torch.argsort(index)].split([t.num_unique_tokens for t in trees]))


def node_offsets(trees: Sequence[RolloutTree]) -> IntArray:
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
