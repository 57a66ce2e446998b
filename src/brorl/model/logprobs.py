"""Log-probabilities of every tree node under a model: exact, differentiable, chunked.

The caller of `chunk_logprobs` back-propagates each chunk before the next, which keeps the learner's memory independent
of N. The prompts of packed chunks are tokens of the chunks. Otherwise chunks are small, and a prompt is computed once:
its keys and values collect the gradient of all chunks before it flows through the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from brorl.arrays import IntArray
from brorl.model.context_limit import smallest_window
from brorl.model.device import to_device
from brorl.model.flex_attention import compiled, compiled_layers
from brorl.model.llama_pass import LlamaPass
from brorl.model.logits import COMPILED_LOGITS_PER_BLOCK, LOGITS_PER_BLOCK, MAX_LOGITS, PLAIN, NextToken, RowLogits
from brorl.model.tree_attention import KVShape, PackedPass, PromptCache, prefill, tree_attention
from brorl.model.tree_batch import (
    AttentionChoice,
    TreeBatch,
    TreeSlice,
    prompt_groups,
    split_into_chunks,
    tree_costs,
)
from brorl.tree import RolloutTree

_DEFAULT_NODES = 1024
_DEFAULT_NODES_ON_CUDA = 16384  # a chunk starts hundreds of kernels per layer, whatever its size


@dataclass(frozen=True)
class TreeForward:
    """Tree attention: how chunks and rows go through the model."""

    attention: AttentionChoice = "auto"  # how nodes attend to their prompts and paths; see `TreeContext`
    # whether prompts are tokens of their chunks, and FlexAttention computes all attention; see `ForestAttention`
    packed: bool = False
    compiled: bool = False  # whether the decoder layers of packed chunks are compiled
    whole_logits: bool = False  # whether the model needs whole logits; see `brorl.model.logits`
    llama: bool = False  # whether the layers are computed by `LlamaPass` instead of the model's modules
    # for each layer the shape of its keys and values; empty for a model that was not checked
    kv_shapes: Sequence[KVShape] = ()
    llama_rows: bool = False  # whether rows go through `LlamaPass`, also on a GPU
    # the model's sliding window, if contexts are longer; an engine on a GPU and packed passes compute it
    window: int | None = None
    response_costs = staticmethod(tree_costs)

    @property
    def chunk_logprobs(self) -> partial[Iterator[ChunkLogprobs]]:
        """`chunk_logprobs` with this forward pass."""
        return partial(chunk_logprobs, forward=self)

    def cost_line(self, trees: Sequence[RolloutTree]) -> None:
        """Return a line about the cost of a pass over some trees: None, as it computes each distinct token once."""

    def default_max_nodes(self, model: PreTrainedModel) -> int:
        """Return the maximum number of nodes of a chunk, where the settings have none."""
        return default_max_nodes(model, whole_logits=self.whole_logits)

    def of_tokens(self, model: PreTrainedModel) -> PackedPass:
        """Return a forward pass from the parameters of a model, to be used until they change."""
        if self.llama and not torch.is_autocast_enabled(model.device.type):
            return LlamaPass(model)
        return PackedPass(model, whole_logits=self.whole_logits, max_logits=self._logits_per_block)

    def outputs(self, next_token: NextToken, entropy: bool = False) -> NodeOutputs:
        """Return what computes the outputs of the nodes."""
        return NodeOutputs(next_token, entropy, self._logits_per_block, self.compiled)

    @property
    def _logits_per_block(self) -> int | None:
        return COMPILED_LOGITS_PER_BLOCK if self.compiled else None


TREE = TreeForward()


def default_max_nodes(model: PreTrainedModel, *, whole_logits: bool = False, device: str | None = None) -> int:
    """Return the nodes of a chunk: 1024, on CUDA 16384; fewer if whole logits of a large vocabulary are large."""
    nodes = _DEFAULT_NODES_ON_CUDA if (device or model.device.type) == "cuda" else _DEFAULT_NODES
    vocabulary: int = model.config.get_text_config().vocab_size
    return max(128, min(nodes, MAX_LOGITS // vocabulary)) if whole_logits else nodes


def tree_logprobs(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    *,
    next_token: NextToken = PLAIN,
    max_nodes: int | None = None,
    forward: TreeForward = TREE,
) -> list[Tensor]:
    """Return the log-prob (nats) of every node of every tree, shape [M], differentiable where gradients are enabled.

    `next_token` turns logits into the distribution that the rollouts were drawn from. `max_nodes` per forward pass sets
    peak memory, not the result. With gradients, chunks are computed again in the backward pass.
    """
    if not trees:
        return []
    offsets, outputs = node_offsets(trees), forward.outputs(next_token)
    chunks: list[ChunkLogprobs] = []
    cache = None
    if not forward.packed:
        with tree_attention(model):
            cache, logits_PV = prefill(forward.of_tokens(model), [t.prompt_ids for t in trees])
        chunks.append(_first_level(trees, offsets, logits_PV, outputs))
    max_nodes = max_nodes or forward.default_max_nodes(model)
    for slices in split_into_chunks(trees, max_nodes):
        run = partial(_compute_chunk, model, trees, offsets, slices, cache, outputs, forward)
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
    forward: TreeForward = TREE,
) -> Iterator[ChunkLogprobs]:
    """Yield the log-probs of all nodes in chunks; back-propagate each chunk's loss before the next chunk.

    Together the chunks hold every node once. Parameter gradients are complete when the iterator is exhausted.
    `max_nodes` limits prompt tokens too. Entropies have a gradient. With `recompute_prompts` the prompts are computed
    again for their backward pass, so that a backward pass always follows its forward pass, which a sharded model needs.
    """
    if not trees:
        return
    max_nodes = max_nodes or forward.default_max_nodes(model)
    offsets, outputs = node_offsets(trees), forward.outputs(next_token, entropy)
    if forward.packed:
        for slices in split_into_chunks(trees, max_nodes):
            chunk = _compute_chunk(model, trees, offsets, slices, None, outputs, forward)
            assert chunk is not None  # with prompts every slice owns nodes
            yield chunk
        return
    for start, stop in prompt_groups(trees, max_nodes):
        group, group_offsets = trees[start:stop], offsets[start:stop]
        with tree_attention(model):
            prompts = [t.prompt_ids for t in group]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not recompute_prompts):
                cache, logits_PV = prefill(forward.of_tokens(model), prompts)
            computed = [logits_PV, *cache.key, *cache.value]
            held = [x.detach().requires_grad_(recompute_prompts or x.requires_grad) for x in computed]
            num_layers = len(cache.key)
            held_cache = PromptCache(held[1 : 1 + num_layers], held[1 + num_layers :], cache.length)
            yield _first_level(group, group_offsets, held[0], outputs)
            for slices in split_into_chunks(group, max_nodes):
                chunk = _compute_chunk(model, group, group_offsets, slices, held_cache, outputs, forward)
                if chunk is not None:
                    yield chunk
            if recompute_prompts:
                again, logits_PV = prefill(forward.of_tokens(model), prompts)
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
    cache: PromptCache | None,
    outputs: NodeOutputs,
    forward: TreeForward,
) -> ChunkLogprobs | None:
    """Compute the log-probs of the nodes that a chunk owns; with a cache those below the first level, None if none."""
    batch = TreeBatch(trees, offsets, slices, model.device, with_prompts=cache is None)
    if not batch.target_index.numel():
        return None
    tokens = batch.token_T, batch.position_T
    with tree_attention(model), compiled_layers(model) if forward.compiled else nullcontext():
        window = smallest_window(model.config)
        context = batch.forest(window) if cache is None else batch.context(cache, forward.attention)
        rows = forward.of_tokens(model).row_logits(*tokens, context, batch.logit_rows)
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


@dataclass(frozen=True)
class ChunkLogprobs:
    """Log-probs of the nodes of one chunk."""

    index: Tensor  # their numbers among the nodes of all trees, in the trees' order, shape [K]
    logprob: Tensor  # their log-probs in nats, shape [K]
    # entropy (nats) of the distribution that each was drawn from, shape [K]; None if not requested
    entropy: Tensor | None = None


@dataclass(frozen=True)
class NodeOutputs:
    """Computes log-probs, and entropies if requested, from logits.

    Only the logits of one block are kept; the backward pass computes the softmax again. With top-p or top-k the
    distribution is that over the tokens that a row's own logits keep. A node's token counts as kept: where the row does
    not keep it, because the weights or the numerics are not those of the draw, the distribution is that over the kept
    tokens and this one, so its log-prob is finite and has a gradient.
    """

    next_token: NextToken  # from logits to the distribution that the rollouts were drawn from
    entropy: bool  # whether to compute entropies
    logits_per_block: int | None = None  # logits that are computed at once; None for the default
    compile: bool = False  # whether the reductions over the vocabulary are compiled

    def of(self, rows: RowLogits, length_R: Tensor, row_K: Tensor, token_K: Tensor, index_K: Tensor) -> ChunkLogprobs:
        """Return the log-probs of K nodes, in any order, from the logits of R rows.

        `length_R` counts the tokens that the response of each row has so far, `row_K` is the row that predicts each
        node, and `index_K` the node's number among those of all trees.
        """
        if rows.embedding is None:
            logprob_K, entropy_K = self._of_logits(rows.row, length_R, row_K, token_K)
            return ChunkLogprobs(index_K, logprob_K, entropy_K)
        order_K = torch.argsort(row_K, stable=True)
        index_K, row_K, token_K = index_K[order_K], row_K[order_K], token_K[order_K]
        size = max(1, (self.logits_per_block or LOGITS_PER_BLOCK) // rows.vocabulary)
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
        reduced: tuple[Tensor, Tensor] = _Reduced.apply(self, logits_RV, length_R, row_K, token_K)  # type: ignore[no-untyped-call]
        logprob_K, entropy_R = reduced
        return logprob_K, entropy_R[row_K] if self.entropy else None

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function of tensors, compiled if the settings say so."""
        return (compiled(function) if self.compile else function)(self.next_token, self.entropy, *inputs)


class _Reduced(torch.autograd.Function):
    """Log-probs of nodes and entropies of rows; keeps the logits as they came."""

    @staticmethod
    def forward(
        ctx: Any, outputs: NodeOutputs, logits_RV: Tensor, length_R: Tensor, row_K: Tensor, token_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        smallest_R = outputs.next_token.smallest_kept(logits_RV, length_R)
        logprob_K, lse_R, entropy_R = outputs.call(_reduce, logits_RV, length_R, smallest_R, row_K, token_K)
        if smallest_R is not None:
            outside_K = logits_RV[row_K, token_K] < smallest_R[row_K]
            logprob_K = torch.where(outside_K, torch.nn.functional.logsigmoid(logprob_K), logprob_K)
        ctx.outputs = outputs
        ctx.save_for_backward(logits_RV, length_R, smallest_R, row_K, token_K, lse_R, entropy_R, logprob_K)
        return logprob_K, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_K: Tensor, grad_entropy_R: Tensor) -> tuple[Tensor | None, ...]:
        outputs: NodeOutputs = ctx.outputs
        logits_RV, length_R, smallest_R, row_K, token_K, lse_R, entropy_R, logprob_K = ctx.saved_tensors
        grad_K = torch.where(torch.isfinite(logprob_K), grad_K, 0.0)  # a token that cannot be drawn has none
        if smallest_R is not None:
            outside_K = logits_RV[row_K, token_K] < smallest_R[row_K]
            grad_K = torch.where(outside_K, grad_K * -torch.expm1(logprob_K), grad_K)  # of the sigmoid's logarithm
        sum_R = torch.zeros_like(lse_R).index_add_(0, row_K, grad_K)
        grad_RV = outputs.call(_gradient, logits_RV, length_R, smallest_R, lse_R, entropy_R, sum_R, grad_entropy_R)
        of_token_K = (grad_K / outputs.next_token.temperature).to(grad_RV.dtype)
        return None, grad_RV.index_put_((row_K, token_K), of_token_K, accumulate=True), None, None, None


def _reduce(
    next_token: NextToken,
    entropy: bool,
    logits_RV: Tensor,
    length_R: Tensor,
    smallest_R: Tensor | None,
    row_K: Tensor,
    token_K: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs of nodes, and the log-sum-exps and entropies (0 if not requested) of rows.

    Of a token that is not kept it is the log of its mass over that of the kept tokens.
    """
    scaled_RV = next_token.logits(logits_RV, length_R)
    high_R = scaled_RV.amax(1)
    mass_RV = _kept((scaled_RV - high_R[:, None]).exp_(), logits_RV, smallest_R)
    total_R = mass_RV.sum(1)
    lse_R = high_R + total_R.log()
    entropy_R = torch.zeros_like(lse_R)
    if entropy:
        finite_RV = torch.where(mass_RV > 0, scaled_RV, 0.0)  # 0 times -inf is not 0
        entropy_R = lse_R - (mass_RV * finite_RV).sum(1) / total_R
    return scaled_RV[row_K, token_K] - lse_R[row_K], lse_R, entropy_R


def _gradient(
    next_token: NextToken,
    entropy: bool,
    logits_RV: Tensor,
    length_R: Tensor,
    smallest_R: Tensor | None,
    lse_R: Tensor,
    entropy_R: Tensor,
    sum_R: Tensor,
    grad_entropy_R: Tensor,
) -> Tensor:
    """Return the gradient of the logits but for that of the nodes' own tokens, in the dtype of the logits."""
    logprob_RV = next_token.logits(logits_RV, length_R) - lse_R[:, None]
    factor_RV = -sum_R[:, None]
    if entropy:
        finite_RV = torch.where(torch.isfinite(logprob_RV), logprob_RV, 0.0)  # 0 times -inf is not 0
        factor_RV = factor_RV - grad_entropy_R[:, None] * (finite_RV + entropy_R[:, None])
    mass_RV = _kept(logprob_RV.exp_(), logits_RV, smallest_R)
    return mass_RV.mul_(factor_RV / next_token.temperature).to(logits_RV.dtype)


def _kept(mass_RV: Tensor, logits_RV: Tensor, smallest_R: Tensor | None) -> Tensor:
    """Set the mass of the tokens that a row does not keep to 0."""
    return mass_RV if smallest_R is None else mass_RV.masked_fill_(logits_RV < smallest_R[:, None], 0.0)
