"""Log-probs of trees under the current weights and the reference, in one process or on several ranks.

Trees go through the model in chunks, which shrink if memory runs out. Several ranks divide the responses among
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from brorl.activity import Echo
from brorl.algorithms.groups import Group
from brorl.arrays import FloatArray
from brorl.config.settings import TrainConfig
from brorl.model.chunks import ChunkSize, PassSync, TreeSlice, is_out_of_memory, num_tree_tokens, split_into_chunks
from brorl.model.flat_path import FlatForward, num_flat_tokens
from brorl.model.forward import Forward
from brorl.model.logprobs import ChunkLogprobs, NextToken, by_tree
from brorl.model.sharding import ShardedPassSync
from brorl.model.tree_path import TreeForward
from brorl.training.learner_state import ReferencePolicy
from brorl.training.ranks import Ranks, deal
from brorl.tree import RolloutTree

LITTLE_SHARED = 0.8  # rows may be faster if trees have more than this fraction of the rows' tokens, including prompts


def next_token(config: TrainConfig, stop_token_ids: tuple[int, ...]) -> NextToken:
    """Return the distribution that rollouts are drawn from. `min_new_tokens` matters only with stop tokens."""
    settings = config.sampling
    minimum = settings.min_new_tokens if stop_token_ids else 0
    return NextToken(settings.temperature, minimum, stop_token_ids, settings.top_p, settings.top_k)


def autocast(config: TrainConfig, model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Return a context in which passes compute in bfloat16, if the settings require it."""
    return torch.autocast(model.device.type, torch.bfloat16) if config.autocasts else nullcontext()


class PolicyLogprobs:
    """Computes the log-probs of nodes, normalized over the tokens that sampling can draw.

    Args:
        model: The model. A KL penalty uses its current weights as the reference.
        config: The recipe.
        forward: How trees go through the model.
        stop_token_ids: The tokens that end a response.
        echo: Receives a line when memory runs out.
        ranks: The processes that share the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        forward: Forward,
        stop_token_ids: tuple[int, ...],
        echo: Echo,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self.config = config
        self.ranks = ranks
        self._next_token = next_token(config, stop_token_ids)
        self.forward = forward
        self.passes = ShardedPassSync(model, ranks.maximum) if ranks.size > 1 else PassSync()
        max_nodes = config.engine.nodes_per_pass or forward.default_max_nodes(model)
        self.nodes = ChunkSize(max_nodes, echo, self.passes, self._free_recordings)
        self.reference = ReferencePolicy(model, config.reference.offload) if config.kl.coefficient else None

    def _free_recordings(self) -> None:
        if isinstance(self.forward, TreeForward):
            self.forward.free_recordings()

    def chunks(self, trees: Sequence[RolloutTree], **options: bool) -> Iterator[ChunkLogprobs]:
        """Yield the nodes of this rank's trees with their log-probs, in chunks of the current size."""
        return self.forward.chunk_logprobs(
            self.model, trees, next_token=self._next_token, max_nodes=self.nodes.value, **options
        )

    def gathered(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-prob (nats) of every node of each tree, shape [M], on every rank."""
        if not trees:
            return []
        if self.ranks.size == 1:
            return self.local(trees)
        pieces = self.local_pieces(trees)
        subtrees = [trees[piece.tree].select(np.arange(piece.start, piece.stop)) for piece in pieces]
        logprobs = self.local([subtree for subtree, _ in subtrees])
        local = [
            (piece.tree, node_M, logprob_M)
            for piece, (_, node_M), logprob_M in zip(pieces, subtrees, logprobs, strict=True)
        ]
        whole_logprobs = [np.empty(tree.num_nodes) for tree in trees]
        for index, node_M, logprob_M in chain(*reversed(self.ranks.gather(local))):  # rank 0 writes last
            whole_logprobs[index][node_M] = logprob_M
        return whole_logprobs

    @torch.no_grad()
    def local(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-probs of the nodes of this rank's trees. All ranks must call this together."""

        def work() -> list[FloatArray]:
            with autocast(self.config, self.model):
                logprobs = [lp.double().cpu().numpy() for lp in by_tree(list(self.chunks(trees)), trees)]
            self.passes.finish()
            return logprobs

        was_training = self.model.training
        self.model.eval()
        try:
            return self.nodes.run(work)
        finally:
            self.model.train(was_training)

    def local_pieces(self, trees: Sequence[RolloutTree]) -> list[TreeSlice]:
        """Return the responses that this rank works on."""
        if self.ranks.size == 1:
            return [TreeSlice(index, 0, tree.num_responses) for index, tree in enumerate(trees)]
        # A layer has about 12 hidden^2 weights, and attends to one token with 2 hidden multiplications.
        per_position = 1 / (6 * self.model.config.get_text_config().hidden_size)
        costs = [self.forward.response_costs(tree, per_position) for tree in trees]
        return deal(costs, self.ranks.size)[self.ranks.rank]

    def local_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Return the part of each group's responses that this rank works on, omitting groups without any."""
        if self.ranks.size == 1:
            return list(groups)
        pieces = self.local_pieces([group.tree for group in groups])
        return [groups[piece.tree].select(np.arange(piece.start, piece.stop)) for piece in pieces]

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups with old log-probs: those they have, the engine's, or those of the current weights."""
        if not self.config.recompute_old_logprobs:
            return [replace(group, old_logprob_M=group.tree.logprob) for group in groups]
        computed = iter(self.gathered([group.tree for group in groups if group.old_logprob_M is None]))
        return [g if g.old_logprob_M is not None else replace(g, old_logprob_M=next(computed)) for g in groups]

    def with_all_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups with old log-probs, and reference log-probs if there is a reference."""
        with_old = self.with_old_logprobs(groups)
        reference = self.reference
        if reference is None or all(group.reference_logprob_M is not None for group in with_old):
            return with_old

        def work() -> list[FloatArray]:
            self.model.zero_grad(set_to_none=True)  # frees the memory of the last update's gradients
            with reference.in_place():
                return self.gathered([group.tree for group in with_old])

        return [replace(g, reference_logprob_M=lp) for g, lp in zip(with_old, self.nodes.run(work), strict=True)]


def flat_forward(forward: Forward) -> Forward:
    """Return the flat path in place of `forward`, or `forward` if it already is one."""
    if isinstance(forward, FlatForward):
        return forward
    return FlatForward("rows were faster when the run began", whole_logits=forward.whole_logits)


def device_seconds() -> float:
    """Wait until the CUDA device is idle, and return the time."""
    torch.cuda.synchronize()
    return perf_counter()


def measured_forward(
    model: PreTrainedModel,
    forward: Forward,
    trees: Sequence[RolloutTree],
    max_nodes: int,
    seconds: Callable[[], float] = device_seconds,
) -> tuple[Forward, str | None]:
    """Time trees against rows. Return the faster path, and a line about it (None if rows cannot be faster).

    Trees compute each distinct token once. Rows compute few extra tokens if responses share little, and use a dense
    kernel. Each path makes three forward and backward passes over the first chunk, and the last is timed. Gradients are
    cleared. If rows run out of memory, trees are used: compiled layers keep less for the backward pass, and smaller
    passes would not help a long response. `seconds` waits for the device and returns the time.
    """
    if not isinstance(forward, TreeForward) or num_tree_tokens(trees) <= LITTLE_SHARED * num_flat_tokens(trees):
        return forward, None
    pieces = next(split_into_chunks(trees, max_nodes))
    first_trees = [trees[piece.tree].select(np.arange(piece.start, piece.stop))[0] for piece in pieces]
    flat = flat_forward(forward)
    tree_ms = _milliseconds(model, forward, first_trees, max_nodes, seconds)
    forward.free_recordings()  # rows need the memory, now or during the run
    flat_ms = None
    try:
        flat_ms = _milliseconds(model, flat, first_trees, max_nodes, seconds)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    if flat_ms is None:
        model.zero_grad(set_to_none=True)
        return forward, "responses share little, but there is too little memory for rows; the learner uses trees"
    tokens = num_tree_tokens(first_trees), num_flat_tokens(first_trees)
    chosen = flat if flat_ms < tree_ms else forward
    line = (
        f"responses share little: {tokens[0]:,} distinct tokens took {tree_ms:,.0f} ms as trees, "
        f"{tree_ms / tokens[0]:.4f} ms each, and {tokens[1]:,} tokens took {flat_ms:,.0f} ms as rows, "
        f"{flat_ms / tokens[1]:.4f} ms each; the learner uses {'rows' if chosen is flat else 'trees'}"
    )
    return chosen, line


def _milliseconds(
    model: PreTrainedModel,
    path: Forward,
    trees: Sequence[RolloutTree],
    max_nodes: int,
    seconds: Callable[[], float],
) -> float:
    """Return the time of the last of three forward and backward passes."""
    start = end = 0.0
    for _ in range(3):  # the first compiles and allocates, and the second may be recorded
        start = seconds()
        for chunk in path.chunk_logprobs(model, trees, max_nodes=max_nodes):
            chunk.logprob.sum().backward()
            del chunk  # see `TreeLearner`
        model.zero_grad(set_to_none=True)
        end = seconds()
    return 1e3 * (end - start)
