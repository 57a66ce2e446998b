"""Softmax together with its log-sum-exp, in one pass over the scores.

On CPUs, PyTorch's `exp` and `logsumexp` are many times slower when results underflow, as they do for masked scores and
confident models; its `softmax` is not. The largest weight is exp(0) / Z, so the log-sum-exp follows from the softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _softmax_lse(score: Tensor) -> tuple[Tensor, Tensor]:
    weight = score.softmax(-1)
    return weight, score.amax(-1) - weight.amax(-1).log()


class _SoftmaxLse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Tensor) -> tuple[Tensor, Tensor]:
        weight, lse = _softmax_lse(score)
        ctx.save_for_backward(weight)
        ctx.set_materialize_grads(False)
        return weight, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor:
        (weight,) = ctx.saved_tensors
        grad_weight, grad_lse = grads
        if grad_weight is None:
            assert grad_lse is not None  # autograd passes the gradient of at least one of the two
            return weight * grad_lse[..., None]  # type: ignore[no-any-return]
        inner = (grad_weight * weight).sum(-1)
        if grad_lse is not None:
            inner = inner - grad_lse
        return weight * (grad_weight - inner[..., None])  # type: ignore[no-any-return]


def softmax_lse(score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over the last dimension and its log-sum-exp.

    Args:
        score: Scores, shape [..., S], each row with at least one finite entry; -inf gets a weight of exactly 0.

    Returns:
        Weights, shape [..., S], and log-sum-exp, shape [...]; both differentiable.
    """
    if not torch.is_grad_enabled():
        return _softmax_lse(score)
    both: tuple[Tensor, Tensor] = _SoftmaxLse.apply(score)  # type: ignore[no-untyped-call]
    return both
