"""The held-out check: did an update make correct responses more likely? Tested on rollouts not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brorl.arrays import FloatArray
from brorl.runs.step_record import HeldOutCheck

_NORMAL_95 = 1.959963984540054


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out rollouts of one prompt (L distinct ones among H) before and after an update."""

    count_L: NDArray[np.int64]  # number of rollouts with each distinct response, shape [L]; the sum is H >= 2
    correct_L: NDArray[np.bool_]  # verdict of each distinct response, shape [L]
    old_logprob_L: FloatArray  # log-prob (nats) of each whole response under the policy that sampled it, shape [L]
    new_logprob_L: FloatArray  # log-prob (nats) of each whole response after the update, shape [L]
    baseline: float  # any number independent of these rollouts; the pass rate keeps the variance small


def check_on_held_out(held_out: Sequence[HeldOut]) -> HeldOutCheck:
    """Estimate from held-out rollouts how much an update changed Q_pos, the probability of a correct response.

    Rollouts that the update was trained on would overestimate the change.

        w = pi_new(y) / pi_old(y),   dQ_hat = mean over held-out rollouts of (r - b)(w - 1)

    Here r is 1 for a correct response and 0 otherwise, and b is the baseline. The estimate of the change is unbiased,
    because E[w - 1] = 0 and E[r w] = Q_new. The rollouts must be independent draws from the distribution of the old
    log-probs. With top-p or top-k, E[w - 1] is 0 up to the mass of tokens that only one of the policies keeps.

    Raises:
        ValueError: If there are no prompts, or a prompt has fewer than 2 rollouts.
    """
    if not held_out or any(h.count_L.sum() < 2 for h in held_out):
        raise ValueError("a held-out check needs at least one prompt, and at least 2 held-out rollouts per prompt")
    with np.errstate(over="ignore", invalid="ignore"):  # a long response may become e^709 times as probable
        moments = np.array([_mean_and_variance(h) for h in held_out])
        change = float(moments[:, 0].mean())
        half_width = _NORMAL_95 * float(np.sqrt(moments[:, 1].sum())) / len(held_out)
    finite = bool(np.isfinite(change) and np.isfinite(half_width))

    count, correct, old, new = (
        np.concatenate([getattr(h, name) for h in held_out])
        for name in ("count_L", "correct_L", "old_logprob_L", "new_logprob_L")
    )
    log_ratio_A, count_A = (new - old)[correct], count[correct]
    num_correct, num_risen = int(count_A.sum()), int(count_A[log_ratio_A > 0].sum())
    low, high = binomial_interval(num_risen, num_correct)
    weight = np.exp(new - old - (new - old).max())  # up to a factor that cancels in the effective fraction
    return HeldOutCheck(
        change=change if finite else None,
        change_low=change - half_width if finite else None,
        change_high=change + half_width if finite else None,
        fraction_improved=num_risen / num_correct if num_correct else None,
        fraction_improved_low=low,
        fraction_improved_high=high,
        worst_drop=min(0.0, float((np.exp(new) - np.exp(old))[correct].min())) if num_correct else None,
        worst_log_ratio=float(log_ratio_A.min()) if num_correct else None,
        num_prompts=len(held_out),
        num_rollouts=int(count.sum()),
        num_correct=num_correct,
        effective_fraction=float((count @ weight) ** 2 / (count.sum() * (count @ weight**2))),
    )


def binomial_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the exact 95% interval for a success probability (coverage at least 95%); (0, 1) without trials.

    Source: Clopper and Pearson, Biometrika 26 (1934).
    """
    from scipy.special import betaincinv

    low = float(betaincinv(successes, trials - successes + 1, 0.025)) if successes else 0.0
    high = float(betaincinv(successes + 1, trials - successes, 0.975)) if successes < trials else 1.0
    return low, high


def _mean_and_variance(held_out: HeldOut) -> tuple[float, float]:
    """Return the mean of (r - b)(w - 1) over one prompt's rollouts, and the estimated variance of that mean."""
    value_L = (held_out.correct_L - held_out.baseline) * np.expm1(held_out.new_logprob_L - held_out.old_logprob_L)
    size = int(held_out.count_L.sum())
    mean = float(held_out.count_L @ value_L) / size
    return mean, float(held_out.count_L @ (value_L - mean) ** 2) / (size - 1) / size
