"""The tree path: exact, differentiable log-probs of every tree node, computed with tree attention in chunks.

The caller of `chunk_logprobs` backpropagates through each chunk before requesting the next, so the learner's memory
does not depend on N. Packed chunks contain their prompts. Other chunks are small and share their prompts, which are
computed once. A prompt's keys and values accumulate the gradients of all chunks, which then flow through the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from brorl.arrays import IntArray
from brorl.model.chunks import (
    AttentionChoice,
    ChunkLayout,
    TreeSlice,
    default_max_nodes,
    prompt_groups,
    split_into_chunks,
    tree_costs,
)
from brorl.model.compilation import compiled_layers
from brorl.model.context_limit import smallest_window
from brorl.model.device import to_device
from brorl.model.flex_attention import BLOCK, FlexContext, FlexLayout
from brorl.model.llama_pass import LlamaPass
from brorl.model.logits import COMPILED_LOGITS_PER_BLOCK, MAX_LOGITS, RowLogits
from brorl.model.logprobs import PLAIN, ChunkLogprobs, LogprobHead, NextToken, NodeBlocks, by_tree, node_offsets
from brorl.model.pass_graphs import PassGraphs
from brorl.model.tree_attention import KVShape, ModelPass, PromptCache, check_positions, prefill, tree_attention
from brorl.tree import RolloutTree


@dataclass(frozen=True)
class TreeForward:
    """How chunks and rows go through a model with tree attention."""

    attention: AttentionChoice = "auto"  # how nodes attend to their prompts and paths; see `TreeContext`
    # whether chunks contain their prompts, and FlexAttention computes all attention; see `FlexContext`
    packed: bool = False
    compiled: bool = False  # whether the decoder layers of packed chunks are compiled
    flex_options: str = ""  # FlexAttention's kernel options in packed chunks; see `choose_flex_options`
    whole_logits: bool = False  # whether the model needs whole logits; see `brorl.model.logits`
    llama_chunks: bool = False  # whether `LlamaPass`, not the model's modules, computes chunks
    llama_rows: bool = False  # whether `LlamaPass` computes rows, including on a GPU
    # shape of each layer's keys and values; empty for an unchecked model
    kv_shapes: Sequence[KVShape] = ()
    # the model's sliding window if contexts exceed it; only an engine on a GPU and packed passes compute it
    window: int | None = None
    graphs: PassGraphs | None = None  # records packed passes of its model as CUDA graphs; None to run them eagerly
    response_costs = staticmethod(tree_costs)

    @property
    def chunk_logprobs(self) -> partial[Iterator[ChunkLogprobs]]:
        """`chunk_logprobs` with this forward pass."""
        return partial(chunk_logprobs, forward=self)

    def cost_line(self, trees: Sequence[RolloutTree]) -> None:
        """Return None: this path computes each distinct token once, so no line is needed."""

    def default_max_nodes(self, model: PreTrainedModel) -> int:
        """Return the default maximum number of nodes per chunk."""
        return default_max_nodes(model, whole_logits=self.whole_logits)

    def free_recordings(self) -> None:
        """Free the memory of recorded passes."""
        if self.graphs is not None:
            self.graphs.clear()

    def new_pass(self, model: PreTrainedModel) -> ModelPass:
        """Return a forward pass over packed tokens, which is valid until the model's parameters change."""
        if self.llama_chunks and not torch.is_autocast_enabled(model.device.type):
            return LlamaPass(model)
        return ModelPass(model, whole_logits=self.whole_logits, max_logits=self._logits_per_block)

    def logprob_head(self, next_token: NextToken, entropy: bool = False) -> LogprobHead:
        """Return the object that turns logits into the log-probs of nodes."""
        return LogprobHead(next_token, entropy, self._logits_per_block, self.compiled)

    def rows_per_block(self, model: PreTrainedModel, num_rows: int) -> int:
        """Return the rows whose logits a packed pass computes at a time."""
        vocabulary: int = model.config.get_text_config().vocab_size
        is_whole = self.whole_logits or num_rows * vocabulary <= (self._logits_per_block or MAX_LOGITS)
        return self.logprob_head(PLAIN).rows_per_block(num_rows, 0 if is_whole else vocabulary)

    @property
    def _logits_per_block(self) -> int | None:
        return COMPILED_LOGITS_PER_BLOCK if self.compiled else None


TREE = TreeForward()


def tree_logprobs(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    *,
    next_token: NextToken = PLAIN,
    max_nodes: int | None = None,
    forward: TreeForward = TREE,
) -> list[Tensor]:
    """Return the log-prob (nats) of every node of every tree, shape [M], differentiable if gradients are enabled.

    `next_token` turns logits into the distribution that the rollouts were drawn from. `max_nodes` limits the nodes in a
    forward pass, and so its memory, without changing the result. The backward pass recomputes chunks.
    """
    if not trees:
        return []
    offsets = node_offsets(trees)
    forward = replace(forward, graphs=None)  # a recorded pass cannot be recomputed
    head = forward.logprob_head(next_token)
    chunks: list[ChunkLogprobs] = []
    cache = None
    if not forward.packed:
        with tree_attention(model):
            cache, logits_PV = prefill(forward.new_pass(model), [t.prompt_ids for t in trees])
        chunks.append(_first_level(trees, offsets, logits_PV, head))
    max_nodes = max_nodes or forward.default_max_nodes(model)
    for slices in split_into_chunks(trees, max_nodes):
        run = partial(_compute_chunk, model, trees, offsets, slices, cache, head, forward)
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
    """Yield the log-probs of all nodes in chunks. The caller backpropagates each chunk's loss before the next chunk.

        for chunk in chunk_logprobs(model, trees):
            loss(chunk.index, chunk.logprob).backward()

    Together, the chunks contain every node once. Parameter gradients are complete when the iterator is exhausted.
    `max_nodes` limits prompt tokens too. Entropies have a gradient. With `recompute_prompts`, the prompts are
    recomputed for their backward pass: in a sharded model, a backward pass must immediately follow its forward pass.
    """
    if not trees:
        return
    max_nodes = max_nodes or forward.default_max_nodes(model)
    offsets = node_offsets(trees)
    head = forward.logprob_head(next_token, entropy)
    if forward.packed:
        for slices in split_into_chunks(trees, max_nodes):
            # without a name here, the pass's autograd graph ends with the caller's
            yield _PackedPass.of(model, trees, offsets, slices, forward, head).logprobs()
        return
    for start, stop in prompt_groups(trees, max_nodes):
        group, group_offsets = trees[start:stop], offsets[start:stop]
        with tree_attention(model):
            prompts = [t.prompt_ids for t in group]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not recompute_prompts):
                cache, logits_PV = prefill(forward.new_pass(model), prompts)
            computed = [logits_PV, *cache.key, *cache.value]
            # `held` are leaves: they accumulate the chunks' gradients, and one backward pass below propagates the sums
            # through the prompts.
            held = [x.detach().requires_grad_(recompute_prompts or x.requires_grad) for x in computed]
            num_layers = len(cache.key)
            held_cache = PromptCache(held[1 : 1 + num_layers], held[1 + num_layers :], cache.length)
            yield _first_level(group, group_offsets, held[0], head)
            for slices in split_into_chunks(group, max_nodes):
                chunk = _compute_chunk(model, group, group_offsets, slices, held_cache, head, forward)
                if chunk is not None:
                    yield chunk
            if recompute_prompts:
                again, logits_PV = prefill(forward.new_pass(model), prompts)
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
    head: LogprobHead,
    forward: TreeForward,
) -> ChunkLogprobs | None:
    """Compute the log-probs of the nodes that a chunk owns.

    With a cache of prompts, these are the nodes below the first level; the result is None if there are none.
    """
    if cache is None:
        return _PackedPass.of(model, trees, offsets, slices, forward, head).logprobs()
    layout = ChunkLayout(trees, offsets, slices)
    if not layout.target_index.size:
        return None
    inputs = (to_device(array, model.device) for array in (layout.token_T, layout.position_T, layout.logit_rows))
    token_T, position_T, logit_rows = inputs
    with tree_attention(model):
        context = layout.tree_context(cache, forward.attention)
        rows = forward.new_pass(model).row_logits(token_T, position_T, context, logit_rows)
    return head.logprobs(rows, layout.length_R, layout.target_row, layout.target_token, layout.target_index)


@dataclass(frozen=True, eq=False)
class _PackedPass:
    """A pass over a chunk that contains its prompts, laid out in the host's memory."""

    model: PreTrainedModel
    forward: TreeForward
    graphs: PassGraphs | None
    head: LogprobHead
    attention: FlexLayout
    # tokens and positions; for each row of logits, its token and the response's length before; for each node, its row
    # within its block and its token
    arrays: tuple[IntArray, ...]
    edges: tuple[int, ...]  # between the blocks of nodes; see `NodeBlocks`
    index_K: IntArray  # indices of the nodes among those of all trees
    output_K: IntArray  # positions of the nodes in the outputs

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        trees: Sequence[RolloutTree],
        offsets: IntArray,
        slices: list[TreeSlice],
        forward: TreeForward,
        head: LogprobHead,
    ) -> _PackedPass:
        """Lay out a pass. To be recorded, its sizes are rounded up: few different sizes then occur."""
        graphs = forward.graphs if forward.graphs is not None and forward.graphs.records(model) else None
        layout = ChunkLayout(trees, offsets, slices, with_prompts=True, few_sizes=graphs is not None)
        multiple = layout.multiple
        rows, length_R = layout.logit_rows, layout.length_R
        if graphs is not None:  # compute logits of more tokens, which no node uses
            num_rows = -(-max(1, rows.size) // multiple) * multiple
            unused = np.setdiff1d(np.arange(layout.token_T.size), rows)[: num_rows - rows.size]
            rows, length_R = np.concatenate([rows, unused]), np.pad(length_R, (0, unused.size))
        size = forward.rows_per_block(model, rows.size)
        nodes = layout.target_row, layout.target_token, layout.target_index
        blocks = NodeBlocks.of(*nodes, rows.size, size)
        index_K, output_K = blocks.index_K, np.arange(blocks.index_K.size)
        if graphs is not None:
            rows_in_last = rows.size - (len(blocks.edges) - 2) * size
            blocks, output_K = blocks.padded(multiple, rows_in_last, model.config.get_text_config().vocab_size)
        arrays = layout.token_T, layout.position_T, rows, length_R, blocks.place_K, blocks.token_K
        window = smallest_window(model.config)
        attention = FlexLayout.of(layout.position_T, layout.end_T, window, multiple // BLOCK)
        return cls(model, forward, graphs, head, attention, arrays, tuple(blocks.edges), index_K, output_K)

    def logprobs(self) -> ChunkLogprobs:
        """Run the pass, or its recording."""
        arrays = *self.arrays, *self.attention.arrays
        device = self.model.device
        index = to_device(self.index_K, device)
        if self.graphs is None:
            return ChunkLogprobs(index, *self._compute([to_device(array, device) for array in arrays]))
        check_positions(self.model, self.attention.longest)  # a recording does not
        key = self.head, self.edges, self.attention.window
        position = to_device(self.output_K, device)
        outputs = self.graphs.run(key, arrays, self._compute)
        return ChunkLogprobs(index, *(output[position] for output in outputs))

    def _compute(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the log-probs, and the entropies if requested, from the arrays on the device."""
        token_T, position_T, rows, length_R, place_K, token_K, *attention = tensors
        model = self.model
        with tree_attention(model), compiled_layers(model) if self.forward.compiled else nullcontext():
            context = FlexContext(self.attention, *attention, options=self.forward.flex_options)
            logits = self.forward.new_pass(model).row_logits(token_T, position_T, context, rows)
        logprob_K, entropy_K = self.head.of_blocks(logits, length_R, place_K, token_K, self.edges)
        return (logprob_K,) if entropy_K is None else (logprob_K, entropy_K)


def _first_level(
    trees: Sequence[RolloutTree], offsets: IntArray, logits_PV: Tensor, head: LogprobHead
) -> ChunkLogprobs:
    """Compute the log-probs of the first tokens after the prompts."""
    roots = [np.flatnonzero(t.parent < 0) for t in trees]
    row = np.repeat(np.arange(len(trees)), [r.size for r in roots])
    token = np.concatenate([t.token[r] for t, r in zip(trees, roots, strict=True)])
    index = np.concatenate([o + r for o, r in zip(offsets, roots, strict=True)])
    return head.logprobs(RowLogits(logits_PV), np.zeros(len(trees), np.int64), row, token, index)
