"""The loss of a chunk of nodes: policy term, KL penalty and entropy bonus, with sums for the metrics.

Losses and sums add up over the chunks of a mini-batch, and over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self, assert_never

import torch
from torch import Tensor

from brorl.algorithms.kl import kl_estimates
from brorl.algorithms.policy_loss import PolicyLoss, SequenceLoss, cispo_loss, clipped_policy_loss, gspo_loss
from brorl.algorithms.settings import KLPenalty, PolicyLossSettings
from brorl.model.device import in_float64
from brorl.model.logprobs import ChunkLogprobs
from brorl.training.mini_batch import MiniBatch
from brorl.tree import FloatArray


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over nodes of a mini-batch, scalars in float64 without a gradient."""

    policy_loss: Tensor  # policy loss, without penalty and bonus
    clipped: Tensor  # |weight| whose gradient the clip removed
    clipped_low: Tensor  # the part of it at the lower bound
    clipped_high: Tensor  # the part of it at the upper bound
    old_policy_kl: Tensor  # old minus new log-prob (nats) of every rollout's token
    reference_kl: Tensor  # estimate of the KL to the reference (nats), weighted as `MiniBatch.sampled_K`
    entropy: Tensor  # entropy (nats) of the next-token distribution, weighted as `MiniBatch.sampled_K`

    @classmethod
    def zero(cls, device: torch.device) -> Self:
        """Return sums over no nodes."""
        return cls.from_vector(in_float64(torch.zeros(len(fields(cls)), device=device)))

    @classmethod
    def from_vector(cls, sums_S: Tensor) -> Self:
        """Return the sums in a vector that `vector` made, for instance after an all-reduce."""
        return cls(*sums_S.unbind())

    def vector(self) -> Tensor:
        """Return the sums in the order of the attributes, shape [S]."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    def means(self, totals_3: Tensor) -> dict[str, float]:
        """Divide by the weights and tokens of the mini-batch; see `MiniBatch.totals` and `StepMetrics`."""
        weight, sampled, count = totals_3[0].clamp(min=1e-30), totals_3[1].clamp(min=1), totals_3[2].clamp(min=1)
        means = {
            "loss": self.policy_loss,
            "clip_fraction": self.clipped / weight,
            "clip_low_fraction": self.clipped_low / weight,
            "clip_high_fraction": self.clipped_high / weight,
            "old_policy_kl": self.old_policy_kl / count,
            "reference_kl": self.reference_kl / sampled,
            "bonus_entropy": self.entropy / sampled,
        }
        return dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))

    def __add__(self, other: Self) -> Self:
        """Return the sums over the nodes of both."""
        return self.from_vector(self.vector() + other.vector())


def chunk_loss(
    chunk: ChunkLogprobs,
    batch: MiniBatch,
    settings: PolicyLossSettings,
    kl: KLPenalty | None,
    coefficient_K: Tensor | None,
) -> tuple[Tensor, LossSums]:
    """Return the loss of a chunk, a scalar with a gradient, and the sums over its nodes.

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
    return loss, LossSums.from_vector(in_float64(torch.stack([*sums, old_kl, reference_kl, entropy])))


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
) -> tuple[list[FloatArray], LossSums]:
    """Return the derivative of a loss of whole responses by each node's log-prob, and its sums.

    Args:
        batch: The mini-batch.
        logprobs: For each tree the log-probs (nats) under the current weights, shape [M].
        settings: Bounds of the ratio.

    Returns:
        For each tree the derivatives, shape [M]; and sums of policy loss and clips, the other sums 0.
    """
    losses: list[SequenceLoss] = [
        gspo_loss(
            tree,
            advantage_L,
            new_M,
            old_M,
            clip_low=settings.clip.low,
            clip_high=settings.clip.high,
            denominator=batch.denominator,
        )
        for tree, advantage_L, new_M, old_M in zip(
            batch.trees, batch.advantages, logprobs, batch.old_logprobs, strict=True
        )
    ]
    low, high = sum(s.clipped_low for s in losses), sum(s.clipped_high for s in losses)
    sums = LossSums.zero(batch.count_K.device).vector()
    sums[:4] = torch.tensor([sum(s.loss for s in losses), low + high, low, high], dtype=torch.float64)
    return [s.coefficient_M for s in losses], LossSums.from_vector(sums)
