"""pass@k and worst@k: the chance that at least one, or all, of k responses to a prompt are correct.

The estimates are unbiased. Counts above n and k above n are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from brorl.arrays import FloatArray


def pass_at_k(num_correct_P: Sequence[int] | NDArray[np.int64], num_rollouts: int, k: int) -> FloatArray:
    """Estimate pass@k of each prompt: 1 - C(n - c, k) / C(n, k).

    Args:
        num_correct_P: Number of correct responses, c, among n to each prompt, shape [P], 0 to n.
        num_rollouts: Responses per prompt, n, at least 1.
        k: Number of attempts, 1 to n.

    Returns:
        Unbiased estimates, shape [P].

    Raises:
        ValueError: If k is not 1 to n, or a count is not 0 to n.

    Source: Codex (arXiv 2107.03374, Eq. 1).
    """
    num_correct = _checked(num_correct_P, num_rollouts, k)
    return 1 - _all_drawn_from(num_rollouts, k)[num_rollouts - num_correct]


def pass_at_k_of_each(num_correct_P: NDArray[np.int64], num_rollouts_P: NDArray[np.int64], k: int) -> FloatArray:
    """Estimate pass@k of prompts that may differ in their number of responses.

    Args:
        num_correct_P: Number of correct responses to each prompt, shape [P].
        num_rollouts_P: Number of responses to each prompt, n, shape [P].
        k: Number of attempts, at least 1.

    Returns:
        Unbiased estimates of the prompts with at least k responses, in their order.
    """
    enough_P = num_rollouts_P >= k
    value_P = np.empty(num_correct_P.size)
    for n in np.unique(num_rollouts_P[enough_P]).tolist():
        value_P[num_rollouts_P == n] = pass_at_k(num_correct_P[num_rollouts_P == n], n, k)
    return value_P[enough_P]


def worst_at_k(num_correct_P: Sequence[int] | NDArray[np.int64], num_rollouts: int, k: int) -> FloatArray:
    """Estimate worst@k of each prompt, the chance that all of k responses are correct: C(c, k) / C(n, k).

    pass@k measures the coverage of the prompts, worst@k the reliability on each of them.

    Args:
        num_correct_P: Number of correct responses, c, among n to each prompt, shape [P], 0 to n.
        num_rollouts: Responses per prompt, n, at least 1.
        k: Number of attempts, 1 to n.

    Returns:
        Unbiased estimates, shape [P].

    Raises:
        ValueError: If k is not 1 to n, or a count is not 0 to n.

    Source: the worst@k of IsoCompute (arXiv 2603.12151), in the manner of Codex (arXiv 2107.03374, Eq. 1).
    """
    return _all_drawn_from(num_rollouts, k)[_checked(num_correct_P, num_rollouts, k)]


def _checked(num_correct_P: Sequence[int] | NDArray[np.int64], num_rollouts: int, k: int) -> NDArray[np.int64]:
    num_correct = np.asarray(num_correct_P, np.int64)
    if not 1 <= k <= num_rollouts:
        raise ValueError(f"k must be between 1 and the number of samples {num_rollouts}, got {k}")
    if ((num_correct < 0) | (num_correct > num_rollouts)).any():
        raise ValueError(f"counts of correct samples must be between 0 and {num_rollouts}, got {num_correct}")
    return num_correct


def _all_drawn_from(num_rollouts: int, k: int) -> FloatArray:
    """Return the chance C(m, k) / C(n, k) that k draws of n all fall on m of them, for m = 0 .. n, shape [n + 1]."""
    # C(m, k) / C(n, k) = product over j = m + 1 .. n of (1 - k / j)
    factor_J = np.maximum(1 - k / np.arange(1, num_rollouts + 1), 0.0)
    return np.append(1.0, np.cumprod(factor_J[::-1]))[::-1]
