"""The reference of the exactness checks: the plain forward pass, and errors against it.

In: a model with its own attention, and trees. Out: the log-prob of every node and the gradient of their weighted sum,
computed on one padded row per distinct response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.tree import RolloutTree


class Errors(NamedTuple):
    """Errors against the reference: of log-probs (largest, root mean square; nats) and of gradients (relative)."""

    logprob: float
    logprob_rms: float
    gradient: float


class Computed(NamedTuple):
    """The log-probs of each tree's nodes, and the gradient of their weighted sum by parameter."""

    logprobs: list[Tensor]
    gradient: dict[str, Tensor]


def computed_plainly(model: PreTrainedModel, trees: Sequence[RolloutTree], weights: Sequence[Tensor]) -> Computed:
    """Compute log-probs and gradient with the model's own attention."""
    model.zero_grad()
    found = []
    for tree, weight_M in zip(trees, weights, strict=True):
        logprob_M = plain_logprobs(model, tree)
        (weight_M.to(logprob_M.dtype) * logprob_M).sum().backward()
        found.append(logprob_M.detach())
    return Computed(found, gradient_of(model))


def plain_logprobs(model: PreTrainedModel, tree: RolloutTree) -> Tensor:
    """Return the log-prob of each node's token, shape [M]."""
    return best_and_own(model, tree)[1]


def best_and_own(model: PreTrainedModel, tree: RolloutTree) -> tuple[Tensor, Tensor]:
    """Return the log-prob of the best token at each node, and of the node's token, shape [M] each.

    The distinct responses are rows, padded on the right, which a causal model never reads.
    """
    before, paths = len(tree.prompt_ids), [tree.path(int(leaf)) for leaf in tree.leaf]
    rows = np.zeros((len(paths), before + int(tree.length.max())), np.int64)
    rows[:, :before] = tree.prompt_ids
    row_M = np.empty(tree.num_unique_tokens, np.int64)
    for row, path in enumerate(paths):
        rows[row, before : before + path.size] = tree.token[path]
        row_M[path] = row
    logits = model(input_ids=torch.from_numpy(rows).to(model.device), use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logprob_RSV = wide.log_softmax(-1)
    index = (torch.from_numpy(array).to(model.device) for array in (row_M, before - 1 + tree.depth))
    logprob_MV = logprob_RSV[tuple(index)]
    token_M = torch.from_numpy(tree.token.copy()).to(model.device)
    return logprob_MV.max(1).values, logprob_MV.gather(1, token_M[:, None])[:, 0]


def gradient_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradient of each parameter in float64; zeros where there is none."""
    zero = {name: p for name, p in model.named_parameters() if p.grad is None}
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: torch.zeros_like(p, dtype=torch.float64) for name, p in zero.items()}


def errors_of(found: Computed, expected: Computed) -> Errors:
    """Return the errors; that of a small gradient is relative to a hundredth of the norm of all."""
    total = float(torch.stack([g.norm() for g in expected.gradient.values()]).norm())
    relative = [
        float((found.gradient[name].to(g.device) - g).norm() / max(float(g.norm()), 1e-2 * total))
        for name, g in expected.gradient.items()
    ]
    return Errors(*logprob_errors(found.logprobs, expected.logprobs), max(relative))


def logprob_errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """Return the largest and the root mean square difference."""
    difference_M = torch.cat(list(found)).double().cpu() - torch.cat(list(expected)).double().cpu()
    return float(difference_M.abs().max()), float(difference_M.square().mean().sqrt())
