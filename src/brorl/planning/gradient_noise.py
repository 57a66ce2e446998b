"""Estimate the noise of a batch gradient for any number of rollouts and prompts, from one pilot.

Each prompt's policy gradient is estimated twice, from independent halves of its rollouts. Long gradients are projected
at random, which preserves inner products on average. Let g_p be the leave-one-out policy gradient of prompt p. Its mean
E[g_p] = G_p does not depend on N, and

    |G|^2 = E over pairs of prompts of g_p . g_q            G = mean of G_p
    M     = E |G_p|^2 = E g_p1 . g_p2                       g_p1, g_p2 from the two halves of n / 2 rollouts
    s_w^2 = (n / 2) E |g_p1 - g_p2|^2 / 2                   variance within a prompt, for one rollout
    s_b^2 = M - |G|^2                                       variance between prompts

A mean over P prompts has relative noise (s_b^2 + s_w^2 / N) / (P |G|^2). Dynamic sampling keeps the fraction s of
prompts whose gradient is not 0 by construction. The P kept prompts are draws from that fraction, with mean G / s and
second moment (M + s_w^2 / N) / s. Their relative noise is (s (M + s_w^2 / N) - |G|^2) / (P |G|^2).

Source: the simple noise scale of arXiv 1812.06162 (its tr(S) / |G|^2), split here into its two levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Stage
from brorl.algorithms import advantages
from brorl.algorithms.advantages import OutcomeWeight
from brorl.algorithms.groups import Group
from brorl.algorithms.losses import node_weights
from brorl.arrays import FloatArray, IntArray
from brorl.training.local_parts import LocalParts
from brorl.training.policy_logprobs import autocast
from brorl.tree import RolloutTree

_FLIPS = 4000
_SKETCH = 1 << 18  # gradients longer than this are projected onto this many numbers
_PIECE = 1 << 22  # gradient entries projected in one operation


@dataclass(frozen=True)
class GradientProducts:
    """Inner products of the gradients of P prompts; g_p = (g_p1 + g_p2) / 2."""

    gram_PP: FloatArray  # g_p . g_q, shape [P, P]
    across_P: FloatArray  # g_p1 . g_p2, shape [P]
    apart_P: FloatArray  # |g_p1 - g_p2|^2, shape [P]
    half_rollouts: int  # n / 2, rollouts in each half

    @classmethod
    def of(cls, first_PK: FloatArray, second_PK: FloatArray, half_rollouts: int) -> GradientProducts:
        """Multiply P prompts' gradients, estimated from the first and second halves of their rollouts, shape [P, K]."""
        mean_PK = (first_PK + second_PK) / 2
        difference_PK = first_PK - second_PK
        return cls(
            gram_PP=mean_PK @ mean_PK.T,
            across_P=np.einsum("pk,pk->p", first_PK, second_PK),
            apart_P=np.einsum("pk,pk->p", difference_PK, difference_PK),
            half_rollouts=half_rollouts,
        )


@dataclass(frozen=True)
class NoiseMoments:
    """The moments that determine any batch's noise: scalars, or arrays of shape [B, 1] for B replicates."""

    mean_squared: FloatArray  # |G|^2, unbiased, so it can be negative
    prompt_squared: FloatArray  # M, the mean of |G_p|^2, unbiased
    within: FloatArray  # s_w^2, variance within a prompt for one rollout

    @property
    def between(self) -> FloatArray:
        """s_b^2, variance between prompts. Negative estimates become 0."""
        return np.maximum(self.prompt_squared - self.mean_squared, 0.0)

    def excess(self, num_rollouts: FloatArray | float, kept_fraction: FloatArray | float) -> FloatArray:
        """Return relative noise x P |G|^2 for P kept prompts. This product does not depend on P."""
        signal = np.maximum(self.mean_squared, 0.0)
        second = np.maximum(self.prompt_squared, signal) + self.within / num_rollouts
        return np.maximum(kept_fraction * second - signal, 0.0)


def noise_moments(products: GradientProducts, weight_BP: FloatArray | None = None) -> NoiseMoments:
    """Estimate the moments from at least 2 prompts: scalars without weights, shape [B, 1] with weights [B, P]."""
    if products.across_P.size < 2:
        raise ValueError("the noise between prompts needs at least 2 prompts")
    weight = np.ones((1, products.across_P.size)) if weight_BP is None else np.asarray(weight_BP, np.float64)
    total_B = weight.sum(1)
    own_B = weight**2 @ np.diag(products.gram_PP)
    pairs_B = total_B**2 - (weight**2).sum(1)
    moments = (
        (np.einsum("bp,pq,bq->b", weight, products.gram_PP, weight, optimize=True) - own_B) / pairs_B,
        weight @ products.across_P / total_B,
        products.half_rollouts * (weight @ products.apart_P) / (2 * total_B),
    )
    return NoiseMoments(*(np.asarray(m[0] if weight_BP is None else m[:, None]) for m in moments))


def mean_gradient_p_value(products: GradientProducts, generator: np.random.Generator) -> float:
    """Flip signs of the prompts' gradients at random. Return the fraction of flips with |G|^2 at least as large.

    This p-value is uniform on [0, 1] if the gradients are distributed symmetrically around 0.
    """
    sign_FP = generator.choice([-1.0, 1.0], (_FLIPS, products.across_P.size))
    flipped_F = np.einsum("fp,fp->f", sign_FP @ products.gram_PP, sign_FP)  # flips do not change the diagonal
    return float((1 + np.count_nonzero(flipped_F >= products.gram_PP.sum())) / (1 + _FLIPS))


def gradient_products(
    model: PreTrainedModel, groups: Sequence[Group], parts: LocalParts, generator: np.random.Generator
) -> GradientProducts:
    """Estimate each prompt's policy gradient twice, from halves of its rollouts, and multiply the gradients.

    The model is a copy with the weights that sampled the groups; its gradients are overwritten. All groups have n
    rollouts, where n is even and at least 4. The gradient is 0 for a group that a step would not train on.
    """
    half = groups[0].tree.num_rollouts // 2
    length = min(_SKETCH, sum(p.numel() for p in model.parameters() if p.requires_grad))
    first, second = np.zeros((2, len(groups), length))
    model.train()
    for row, group in enumerate(groups):
        if not parts.config.dynamic_sampling.keeps(group):
            continue
        parts.observe(Stage("measuring", f"the gradient of prompt {row + 1} of {len(groups)}"))
        count_L = generator.multivariate_hypergeometric(group.tree.leaf_count, half, method="marginals")
        for halves, half_L in ((first, count_L), (second, group.tree.leaf_count - count_L)):
            halves[row] = prompt_gradient(model, group, half_L, parts)
    model.zero_grad(set_to_none=True)
    return GradientProducts.of(first, second, half)


def prompt_gradient(
    model: PreTrainedModel,
    group: Group,
    count_L: IntArray,
    parts: LocalParts,
    weight: OutcomeWeight = advantages.rloo_weight,
) -> FloatArray:
    """Return the policy gradient of one prompt: (1/N) sum_i w(N, c) (r_i - mean of r) grad log pi(y_i).

    With RLOO's weight, its mean over draws does not depend on N. Up to a factor, it is the gradient of the learner's
    loss at ratio 1. `count_L` (shape [L]) is how often each distinct response occurs among the N rollouts. The model's
    gradients are overwritten. A long gradient is projected at random onto fewer numbers. All gradients of a model share
    the projection, which preserves inner products on average.
    """
    model.zero_grad(set_to_none=True)
    num_rollouts = int(count_L.sum())
    mean = float(count_L @ group.reward_L) / num_rollouts
    advantage_L = (group.reward_L - mean) * weight(num_rollouts, int(count_L @ group.correct_L)) / num_rollouts
    kept = np.flatnonzero((count_L > 0) & (advantage_L != 0))
    if kept.size:
        tree, _ = group.tree.select(kept)
        positive_M, negative_M = node_weights(tree, advantage_L[kept] * count_L[kept] / tree.leaf_count)
        _accumulate(model, tree, positive_M + negative_M, parts)
    return projected_gradient([p for p in model.parameters() if p.requires_grad])


def _accumulate(model: PreTrainedModel, tree: RolloutTree, weight_M: FloatArray, parts: LocalParts) -> None:
    """Add the gradient of the weighted sum of the tree's log-probs to the model's gradient."""
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    weight = torch.from_numpy(weight_M).to(model.device, dtype)
    nodes = parts.config.engine.nodes_per_pass
    with autocast(parts.config, model):
        for chunk in parts.forward.chunk_logprobs(model, [tree], next_token=parts.next_token, max_nodes=nodes):
            (weight[chunk.index] * chunk.logprob).sum().backward()


def projected_gradient(parameters: Sequence[Tensor]) -> FloatArray:
    """Return the gradient as a vector, or a long one as a count sketch: random signs, summed into `_SKETCH` numbers."""
    total = sum(p.numel() for p in parameters)
    device = parameters[0].device
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if total <= _SKETCH:
        gradient_K: FloatArray = torch.cat([g.flatten().double() for g in gradients]).cpu().numpy()
        return gradient_K
    signs = torch.Generator(device).manual_seed(total)
    sketch = torch.zeros(_SKETCH, dtype=torch.float64, device=device)
    for gradient in gradients:
        for piece in gradient.flatten().split(_PIECE):
            sign = torch.randint(0, 2, piece.shape, generator=signs, device=device, dtype=torch.int8) * 2 - 1
            signed = torch.nn.functional.pad(piece * sign, (0, -piece.numel() % _SKETCH))
            sketch += signed.view(-1, _SKETCH).double().sum(0)
    projected: FloatArray = sketch.cpu().numpy()
    return projected
