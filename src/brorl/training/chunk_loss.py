"""The loss of a chunk of a mini-batch: policy term, KL penalty and entropy bonus, with sums for the metrics.

In: log-probs of some nodes with a gradient, and the mini-batch's numbers. Out: what is back-propagated. Losses and sums
add up over the chunks of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brorl.algorithms.kl import KLPenalty, kl_estimates
from brorl.algorithms.policy_loss import (
    PolicyLoss,
    PolicyLossSettings,
    SequenceLoss,
    cispo_loss,
    clipped_policy_loss,
    gspo_loss,
)
from brorl.model.logprobs import ChunkLogprobs
from brorl.training.mini_batch import MiniBatch

NUM_SUMS = 7


class ChunkLoss(NamedTuple):
    """The loss of a chunk.

    Attributes:
        loss: Scalar with a gradient.
        sums: Policy loss, |weight| clipped, weighted old minus new log-prob, |weight| clipped at the lower and at the
            upper bound, weighted estimate of the KL to the reference, weighted entropy; no gradient, shape [7].
    """

    loss: Tensor
    sums: Tensor


def chunk_loss(
    chunk: ChunkLogprobs,
    batch: MiniBatch,
    settings: PolicyLossSettings,
    kl: KLPenalty | None,
    coefficient_K: Tensor | None,
) -> ChunkLoss:
    """Return the loss of a chunk.

    Args:
        chunk: Some nodes of the mini-batch.
        batch: The mini-batch.
        settings: Kind and bounds of the policy term.
        kl: The penalty, where there is a reference.
        coefficient_K: Derivative of a loss of whole responses by the log-prob of each node of the mini-batch, shape
            [K]; its policy loss and clips are then not in the sums. None for a loss of nodes.
    """
    index, new_K = chunk.index, chunk.logprob.detach()
    old_logprob_K = batch.old_logprob_K[index]
    old_kl = (batch.count_K[index] * (old_logprob_K - new_K)).sum()
    zero = torch.zeros_like(old_kl)
    if coefficient_K is not None:
        loss = (coefficient_K[index] * chunk.logprob).sum()
        value, clipped, low, high = zero, zero, zero, zero
    else:
        loss, clipped, low, high = _policy_loss(chunk, batch, settings)
        value = loss.detach()
    reference_kl = zero
    if kl is not None and batch.reference_logprob_K is not None:
        estimate_K = kl_estimates(chunk.logprob, batch.reference_logprob_K[index], kl.estimator, kl.clamp)
        reference_kl = (batch.sampled_K[index] * estimate_K.detach()).sum()
        if kl.placement == "loss":
            loss = loss + kl.coefficient * (batch.token_weight_K[index] * estimate_K).sum() / batch.denominator
    entropy = zero
    if chunk.entropy is not None:
        entropy = (batch.sampled_K[index] * chunk.entropy.detach()).sum()
        bonus = (batch.token_weight_K[index] * chunk.entropy).sum() / batch.denominator
        loss = loss - settings.entropy_coefficient * bonus
    return ChunkLoss(loss, torch.stack([value, clipped, old_kl, low, high, reference_kl, entropy]))


def _policy_loss(chunk: ChunkLogprobs, batch: MiniBatch, settings: PolicyLossSettings) -> PolicyLoss:
    """Return the policy term of nodes."""
    weights = batch.positive_K[chunk.index], batch.negative_K[chunk.index]
    logprobs = chunk.logprob, batch.old_logprob_K[chunk.index]
    low, high, denominator = settings.clip_low, settings.clip_high, batch.denominator
    match settings.kind:
        case "ppo":
            return clipped_policy_loss(
                *logprobs,
                *weights,
                clip_low=low,
                clip_high=high,
                denominator=denominator,
                dual_clip=settings.dual_clip,
            )
        case "cispo":
            return cispo_loss(*logprobs, *weights, clip_low=low, clip_high=high, denominator=denominator)
        case "gspo":
            raise ValueError("gspo is a loss of whole responses; give the coefficients of `response_losses`")
        case _:
            assert_never(settings.kind)


def response_losses(
    batch: MiniBatch, logprobs: Sequence[NDArray[np.float64]], settings: PolicyLossSettings
) -> tuple[list[NDArray[np.float64]], Tensor]:
    """Return the derivative of a loss of whole responses by each node's log-prob, and its terms of the sums.

    Args:
        batch: The mini-batch.
        logprobs: For each tree the log-probs under the current weights, shape [M].
        settings: Bounds of the ratio.

    Returns:
        For each tree the derivatives, shape [M]; and sums as in `ChunkLoss`.
    """
    losses: list[SequenceLoss] = [
        gspo_loss(
            tree,
            advantage_L,
            new_M,
            old_M,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            denominator=batch.denominator,
        )
        for tree, advantage_L, new_M, old_M in zip(
            batch.trees, batch.advantages, logprobs, batch.old_logprobs, strict=True
        )
    ]
    value, low = sum(s.loss for s in losses), sum(s.clipped_low for s in losses)
    high = sum(s.clipped_high for s in losses)
    sums = torch.tensor([value, low + high, 0.0, low, high, 0.0, 0.0], dtype=torch.float64)
    return [s.coefficient_M for s in losses], sums.to(batch.count_K.device)
