"""The measurements of an update, which the metrics show as means over the updates of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from brorl.training.chunk_loss import LossSums


@dataclass(frozen=True)
class UpdateMeans:
    """One update, or the mean of several; see `Update` for the attributes."""

    loss: float
    grad_norm: float
    clip_fraction: float
    clip_low_fraction: float
    clip_high_fraction: float
    old_policy_kl: float
    reference_kl: float
    entropy: float

    @classmethod
    def of(cls, sums: LossSums, grad_norm: Tensor, totals_3: Tensor) -> UpdateMeans:
        """Divide the sums of a mini-batch by its weights and tokens; see `MiniBatch.totals`."""
        weight, sampled, count = totals_3[0].clamp(min=1e-30), totals_3[1].clamp(min=1), totals_3[2].clamp(min=1)
        means = (
            sums.policy_loss,
            grad_norm.double(),
            sums.clipped / weight,
            sums.clipped_low / weight,
            sums.clipped_high / weight,
            sums.old_policy_kl / count,
            sums.reference_kl / sampled,
            sums.entropy / sampled,
        )
        return cls(*torch.stack(means).tolist())

    @classmethod
    def mean(cls, updates: Sequence[UpdateMeans]) -> UpdateMeans:
        """Return the mean over updates."""
        return cls(*(sum(values) / len(updates) for values in zip(*map(astuple, updates), strict=True)))
