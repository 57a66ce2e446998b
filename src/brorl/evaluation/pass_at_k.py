"""pass@k: the chance that at least one of k responses to a prompt is correct, estimated without bias from n of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with a bootstrap interval.

    Attributes:
        value: The mean.
        low: Lower end of the 95% interval.
        high: Upper end.
    """

    value: float
    low: float
    high: float


def pass_at_k(num_correct_P: Sequence[int] | NDArray[np.int64], num_samples: int, k: int) -> FloatArray:
    """Estimate pass@k of each prompt: 1 - C(n - c, k) / C(n, k).

    Args:
        num_correct_P: Number of correct ones, c, among n responses to each prompt, shape [P].
        num_samples: n.
        k: Number of attempts, 1 to n.

    Returns:
        Unbiased estimates, shape [P].

    Raises:
        ValueError: If k is not 1 to n, or a count is not 0 to n.

    Source: Codex (arXiv 2107.03374, Eq. 1).
    """
    num_correct = np.asarray(num_correct_P, np.int64)
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs k between 1 and the {num_samples} samples")
    if ((num_correct < 0) | (num_correct > num_samples)).any():
        raise ValueError(f"counts of correct samples must lie between 0 and {num_samples}")
    # C(n - c, k) / C(n, k) = product over j = n - c + 1 .. n of (1 - k / j)
    factor_J = np.maximum(1 - k / np.arange(1, num_samples + 1), 0.0)
    miss_C = np.append(1.0, np.cumprod(factor_J[::-1]))  # by number of correct samples
    return 1 - miss_C[num_correct]


def mean_with_interval(value_P: FloatArray, num_resamples: int = 2000) -> Estimate:
    """Average over prompts, with a 95% percentile bootstrap interval over prompts.

    Args:
        value_P: One number per prompt, shape [P].
        num_resamples: Number of bootstrap resamples; they come from a fixed seed.

    Returns:
        The estimate.
    """
    generator = np.random.default_rng(0)
    choice = generator.integers(0, value_P.size, (num_resamples, value_P.size))
    low, high = np.quantile(value_P[choice].mean(1), [0.025, 0.975])
    return Estimate(float(value_P.mean()), float(low), float(high))
