"""The noise of a batch gradient at any number of rollouts and prompts, from one pilot.

In: inner products of per-prompt policy gradients, each estimated twice from independent halves of the pilot's
rollouts. Out: the squared length of the mean gradient, its variance between prompts and within them, from these the
relative noise of a batch of N rollouts of each of P prompts, and a p value for a mean gradient of 0.

With g_p the leave-one-out policy gradient of prompt p, E[g_p] = G_p does not depend on N, and

    |G|^2 = E over pairs of prompts of g_p . g_q            G = mean of G_p
    M     = E |G_p|^2 = E g_p1 . g_p2                       g_p1, g_p2 from the two halves of n / 2 rollouts
    s_w^2 = (n / 2) E |g_p1 - g_p2|^2 / 2                   variance within a prompt, for one rollout
    s_b^2 = M - |G|^2                                       variance between prompts

A mean over P prompts has the relative noise (s_b^2 + s_w^2 / N) / (P |G|^2). Dynamic sampling keeps a fraction s of the
prompts, those whose gradient is not 0 by construction. The P kept ones are draws from that part: mean G / s, second
moment (M + s_w^2 / N) / s, and the relative noise is (s (M + s_w^2 / N) - |G|^2) / (P |G|^2).

Source: the simple noise scale of arXiv 1812.06162 (its tr(S) / |G|^2), split here into its two levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_FLIPS = 4000


@dataclass(frozen=True)
class GradientProducts:
    """Inner products of the gradients of P prompts; g_p = (g_p1 + g_p2) / 2.

    Attributes:
        gram_PP: g_p . g_q, shape [P, P].
        across_P: g_p1 . g_p2, shape [P].
        apart_P: |g_p1 - g_p2|^2, shape [P].
        half_rollouts: n / 2, rollouts in each half.
    """

    gram_PP: FloatArray
    across_P: FloatArray
    apart_P: FloatArray
    half_rollouts: int

    @classmethod
    def of(cls, first_PK: FloatArray, second_PK: FloatArray, half_rollouts: int) -> GradientProducts:
        """Multiply the gradients, or random projections that keep inner products.

        Args:
            first_PK: Gradients of the P prompts from the first half of their rollouts, shape [P, K].
            second_PK: The same from the second half, shape [P, K].
            half_rollouts: Rollouts in each half, >= 1.
        """
        mean_PK, difference_PK = (first_PK + second_PK) / 2, first_PK - second_PK
        return cls(
            gram_PP=mean_PK @ mean_PK.T,
            across_P=np.einsum("pk,pk->p", first_PK, second_PK),
            apart_P=np.einsum("pk,pk->p", difference_PK, difference_PK),
            half_rollouts=half_rollouts,
        )


@dataclass(frozen=True)
class NoiseMoments:
    """The moments that determine the noise of any batch; scalars, or one number for each of B replicates.

    Attributes:
        mean_squared: |G|^2, unbiased, so it can be negative.
        prompt_squared: M, the mean of |G_p|^2, unbiased.
        within: s_w^2, variance within a prompt for one rollout.
    """

    mean_squared: FloatArray
    prompt_squared: FloatArray
    within: FloatArray

    @property
    def between(self) -> FloatArray:
        """s_b^2, variance between prompts; 0 where the estimate is negative."""
        return np.maximum(self.prompt_squared - self.mean_squared, 0.0)

    def excess(self, num_rollouts: FloatArray | float, kept_fraction: FloatArray | float) -> FloatArray:
        """Return the relative noise of P kept prompts times P |G|^2, which does not depend on P.

        Args:
            num_rollouts: N >= 1.
            kept_fraction: Fraction of prompts that dynamic sampling keeps at this N, in (0, 1]; 1 without it.
        """
        signal = np.maximum(self.mean_squared, 0.0)
        second = np.maximum(self.prompt_squared, signal) + self.within / num_rollouts
        return np.maximum(kept_fraction * second - signal, 0.0)


def noise_moments(products: GradientProducts, weight_BP: FloatArray | None = None) -> NoiseMoments:
    """Estimate the moments, with equal weights or with many sets of weights.

    Args:
        products: Inner products of P >= 2 prompts.
        weight_BP: Weights >= 0 of the prompts in B replicates, shape [B, P]. A prompt is never paired with itself,
            whatever its weight.

    Returns:
        The moments: of shape [B], or scalars without weights.

    Raises:
        ValueError: If there are fewer than 2 prompts.
    """
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
    return NoiseMoments(*(np.asarray(m[0] if weight_BP is None else m) for m in moments))


def mean_gradient_p_value(products: GradientProducts, generator: np.random.Generator) -> float:
    """Return the fraction of random signs of the prompts' gradients that give at least the measured |G|^2.

    If the gradients were distributed symmetrically around 0, this would be uniform on [0, 1].
    """
    sign_FP = generator.choice([-1.0, 1.0], (_FLIPS, products.across_P.size))
    flipped_F = np.einsum("fp,fp->f", sign_FP @ products.gram_PP, sign_FP)  # the diagonal adds the same to each
    return float((1 + np.count_nonzero(flipped_F >= products.gram_PP.sum())) / (1 + _FLIPS))
