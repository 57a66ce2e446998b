"""The faster of two ways of the learner on CUDA, by a measurement: packed trees, or a row per distinct response.

Trees compute each distinct token once. Where responses share little, rows have few tokens more, and their attention is
a dense kernel. The two ways give the same gradient, so only time depends on the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch
from transformers import PreTrainedModel

from brorl.model.forward import FlatForward, Forward, TreeForward, num_flat_tokens, num_tree_tokens
from brorl.model.tree_batch import split_into_chunks
from brorl.tree import RolloutTree

LITTLE_SHARED = 0.8  # distinct tokens over all tokens of rows, prompts included, above which rows can be faster


def rows_forward(forward: Forward) -> Forward:
    """Return the way of rows for a model."""
    if isinstance(forward, FlatForward):
        return forward
    return FlatForward("rows were faster when the run began", whole_logits=forward.model_pass.whole_logits)


def device_seconds() -> float:
    """Return a time after all work of the CUDA device."""
    torch.cuda.synchronize()
    return perf_counter()


def measured_forward(
    model: PreTrainedModel,
    forward: Forward,
    trees: Sequence[RolloutTree],
    max_nodes: int,
    seconds: Callable[[], float] = device_seconds,
) -> tuple[Forward, str | None]:
    """Return the faster way for a mini-batch, and a line about the measurement; None if trees share too much for one.

    Each way makes a forward and a backward pass over the first chunk of the trees, twice, and the second one counts.
    The gradients are cleared.

    Args:
        model: A model on a device where work waits in a queue.
        forward: How trees go through it.
        trees: The trees of a mini-batch.
        max_nodes: Nodes per pass.
        seconds: Returns a time after all work of the device.
    """
    if not isinstance(forward, TreeForward) or num_tree_tokens(trees) <= LITTLE_SHARED * num_flat_tokens(trees):
        return forward, None
    slices = next(split_into_chunks(trees, max_nodes))
    some = [trees[one.tree].select(np.arange(one.start, one.stop))[0] for one in slices]
    flat = rows_forward(forward)
    taken = []
    for way in (forward, flat):
        for _ in range(2):  # the first one compiles and allocates
            start = seconds()
            for chunk in way.chunk_logprobs(model, some, max_nodes=max_nodes):
                chunk.logprob.sum().backward()
            model.zero_grad(set_to_none=True)
            end = seconds()
        taken.append(1e3 * (end - start))
    tokens = num_tree_tokens(some), num_flat_tokens(some)
    chosen = flat if taken[1] < taken[0] else forward
    line = (
        f"responses share little: {tokens[0]:,} distinct tokens took {taken[0]:,.0f} ms as trees, "
        f"{taken[0] / tokens[0]:.4f} ms each, and {tokens[1]:,} tokens {taken[1]:,.0f} ms as rows, "
        f"{taken[1] / tokens[1]:.4f} ms each; the learner takes {'rows' if chosen is flat else 'trees'}"
    )
    return chosen, line
