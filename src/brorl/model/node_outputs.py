"""Log-probs and entropies of nodes from the logits of their rows, or from the inputs of the output embedding in blocks.

Nothing of the size of nodes times vocabulary is kept but the logits of one block, in the dtype of the computation. The
forward pass reduces them to a log-sum-exp and an entropy per row, in float32 at least; the backward pass computes the
softmax again. Compiled, both are one kernel that reads the logits and writes at most their gradient.

With top-p or top-k the distribution is the truncated one, over the tokens that a row's own logits keep. A node's token
counts as kept: where the row does not keep it, because the weights or the numerics are not those of the draw, the
distribution is that over the kept tokens and this one, so its log-prob is finite and has a gradient.

Dimensions: R rows, V vocabulary, K nodes, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from brorl.model.compiled import compiled
from brorl.model.logits import LOGITS_PER_BLOCK, NextToken, RowLogits


@dataclass(frozen=True)
class ChunkLogprobs:
    """Log-probs of the nodes of one chunk."""

    index: Tensor  # their numbers among the nodes of all trees, in the trees' order, shape [K]
    logprob: Tensor  # their log-probs in nats, shape [K]
    # entropy (nats) of the distribution that each was drawn from, shape [K]; None if not requested
    entropy: Tensor | None = None


@dataclass(frozen=True)
class NodeOutputs:
    """Computes log-probs, and entropies if requested, from logits."""

    next_token: NextToken  # from logits to the distribution that the rollouts were drawn from
    entropy: bool  # whether to compute entropies
    logits_per_block: int | None = None  # logits that are computed at once; None for the default
    compile: bool = False  # whether the reductions over the vocabulary are compiled

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
