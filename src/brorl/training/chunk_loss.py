"""The loss of a chunk of nodes: policy term, KL penalty and entropy bonus, with sums for the metrics.

Losses and sums add up over the chunks of a mini-batch, and over ranks.

Dimensions: K nodes of the mini-batch, S sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from brorl.algorithms.groups import known
from brorl.algorithms.kl import kl_estimates
from brorl.algorithms.policy_loss import PolicyLoss, SequenceLoss, cispo_loss, clipped_policy_loss, gspo_loss
from brorl.algorithms.settings import KLPenalty, PolicyLossSettings
from brorl.arrays import FloatArray
from brorl.model.device import in_float64
from brorl.model.logprobs import ChunkLogprobs
from brorl.training.mini_batch import MiniBatch

NUM_SUMS = 7
"""Sums over nodes of a mini-batch, in a vector in float64 without a gradient.

In this order: the policy loss, without penalty and bonus; |weight| whose gradient the clip removed; the parts of it at
the lower and at the upper bound; old minus new log-prob (nats) of every rollout's token; the estimate of the KL to the
reference (nats) and the entropy (nats) of the next-token distribution, both weighted as `MiniBatch.sampled_K`.
"""


def no_sums(device: torch.device) -> Tensor:
    """Return the sums over no nodes, shape [S]."""
    return in_float64(torch.zeros(NUM_SUMS, device=device))


def means(sums_S: Tensor, totals_3: Tensor) -> dict[str, float]:
    """Divide sums by the weights and tokens of the mini-batch; see `MiniBatch.totals` and `StepMetrics`."""
    loss, clipped, clipped_low, clipped_high, old_policy_kl, reference_kl, entropy = sums_S.unbind()
    weight, sampled, count = totals_3[0].clamp(min=1e-30), totals_3[1].clamp(min=1), totals_3[2].clamp(min=1)
    found = {
        "loss": loss,
        "clip_fraction": clipped / weight,
        "clip_low_fraction": clipped_low / weight,
        "clip_high_fraction": clipped_high / weight,
        "old_policy_kl": old_policy_kl / count,
        "reference_kl": reference_kl / sampled,
        "bonus_entropy": entropy / sampled,
    }
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))


def chunk_loss(
    chunk: ChunkLogprobs,
    batch: MiniBatch,
    settings: PolicyLossSettings,
    kl: KLPenalty | None,
    coefficient_K: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk, a scalar with a gradient, and the sums over its nodes, shape [S].

    Args:
        chunk: Some nodes of the mini-batch.
        batch: The mini-batch.
        settings: Kind and bounds of the policy term.
        kl: The penalty, where there is a reference.
        coefficient_K: Derivative of a loss of whole responses by the log-prob of each node of the mini-batch, shape
            [K]; its policy loss and clips are then not in the sums. None for a loss of nodes.
    """
    index, new_K = chunk.index, chunk.logprob.detach()
    old_kl = (batch.count_K[index] * (batch.old_logprob_K[index] - new_K)).sum()
    zero = torch.zeros_like(old_kl)
    if coefficient_K is None:
        policy = _policy_loss(chunk, batch, settings)
        loss, sums = policy.loss, (policy.loss.detach(), *policy[1:])
    else:
        loss, sums = (coefficient_K[index] * chunk.logprob).sum(), (zero,) * 4
    reference_kl = entropy = zero
    if kl is not None and batch.reference_logprob_K is not None:
        estimate_K = kl_estimates(chunk.logprob, batch.reference_logprob_K[index], kl.estimator, kl.clamp)
        reference_kl = (batch.sampled_K[index] * estimate_K.detach()).sum()
        match kl.placement:
            case "loss":
                loss = loss + kl.coefficient * (batch.token_weight_K[index] * estimate_K).sum() / batch.denominator
            case "reward":
                pass  # the rewards hold it
            case _:
                assert_never(kl.placement)
    if chunk.entropy is not None:
        entropy = (batch.sampled_K[index] * chunk.entropy.detach()).sum()
        bonus = (batch.token_weight_K[index] * chunk.entropy).sum() / batch.denominator
        loss = loss - settings.entropy_coefficient * bonus
    return loss, in_float64(torch.stack([*sums, old_kl, reference_kl, entropy]))


def _policy_loss(chunk: ChunkLogprobs, batch: MiniBatch, settings: PolicyLossSettings) -> PolicyLoss:
    """Return the policy term of nodes."""
    weights = batch.positive_K[chunk.index], batch.negative_K[chunk.index]
    logprobs = chunk.logprob, batch.old_logprob_K[chunk.index]
    (low, high), denominator = settings.clip, batch.denominator
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
            raise ValueError("gspo is a loss of whole responses; pass the coefficients of `response_losses`")
        case _:
            assert_never(settings.kind)


def response_losses(
    batch: MiniBatch, logprobs: Sequence[FloatArray], settings: PolicyLossSettings
) -> tuple[list[FloatArray], Tensor]:
    """Return the derivative of a loss of whole responses by each node's log-prob, and its sums.

    Args:
        batch: The mini-batch.
        logprobs: For each tree the log-probs (nats) under the current weights, shape [M].
        settings: Bounds of the ratio.

    Returns:
        For each tree the derivatives, shape [M]; and sums of policy loss and clips, the other sums 0, shape [S].
    """
    losses: list[SequenceLoss] = [
        gspo_loss(
            group.tree,
            known(group.advantage_L),
            new_M,
            known(group.old_logprob_M),
            clip_low=settings.clip.low,
            clip_high=settings.clip.high,
            denominator=batch.denominator,
        )
        for group, new_M in zip(batch.groups, logprobs, strict=True)
    ]
    low, high = sum(s.clipped_low for s in losses), sum(s.clipped_high for s in losses)
    sums = no_sums(batch.count_K.device)
    sums[:4] = torch.tensor([sum(s.loss for s in losses), low + high, low, high], dtype=torch.float64)
    return [s.coefficient_M for s in losses], sums
