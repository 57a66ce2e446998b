"""Whether arm B scores higher than arm A on the same prompts: the difference, its interval, and the conclusion.

In: scores of P prompts by S runs of each arm. Out: means with intervals, tests, and a conclusion. Scores of different
prompts are an error. With a single number the interval is as wide as possible.

The interval. A run's mean score varies with the prompts (others could have been held out) and with the seed (another
seed trains another model). With D the differences, v_P = var(D averaged over seeds) / P and v_S = var(D averaged over
prompts) / S,

    half-width^2 = t(P - 1)^2 v_P + t(S - 1)^2 v_S,    t(d) the 97.5% quantile of Student's t with d degrees of freedom.

At another level L, t(d) is the quantile at 1 - (1 - L) / 2. For normal effects of prompts, seeds, and both together
this covers at least L whatever the fractions of the variances: the mean has at most the variance E v_P + E v_S (the
joint effect counts twice), and for weights w_i that add to 1 the probability of Z^2 <= sum w_i t_i^2 chi_i^2 / d_i is
concave in the weights, so it is at least the mean of the probabilities of each part alone, L (Banerjee 1961, for the
two-means problem). If runs of the arms are not paired, the v_S of the two arms are separate parts.

Why no narrower interval. In 2,000 simulated comparisons of two arms that do not differ (200 prompts, 16 samples; every
prompt's logit is moved by each arm with a standard deviation of 0.3 and by each run with 0.2; every run moves all
prompts together by 0, 0.1, 0.3) "a difference" was found in

                                          5 seeds              3 seeds              2 seeds
    this interval                         1%, 3%, 4%           1%, 2%, 4%           0%, 2%, 4%
    random effects, Satterthwaite         3%, 6%, 6%           3%, 5%, 7%           2%, 7%, 11%
    bootstrap over prompts and seeds      2%, 5%, 12%          1%, 7%, 22%          2%, 10%, 32%
    the paper's t-test over prompts       5%, 22%, 64%         5%, 26%, 67%         5%, 27%, 68%
    t-test over seeds                     13%, 7%, 5%          9%, 6%, 5%           5%, 5%, 5%

so the conclusion uses the first, which alone keeps its 5% everywhere. The price is paid with few seeds: t(1) = 12.7,
t(2) = 4.3, t(4) = 2.8, so 3 seeds give an interval 1.5 to 2 times as wide as 5 seeds do, and 2 seeds 4 to 6 times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal

import numpy as np
from scipy.special import stdtr

from brorl.comparison.variance_parts import Covers, VariancePart, VarianceParts, parts_of
from brorl.evaluation.pass_at_k import Estimate, FloatArray

Conclusion = Literal["A leads", "B leads", "no difference shown"]

_ROUNDING = 1e-12  # differences of scores below this are rounding
_MAX_WEIGHTS = 2_000_000  # of resampling, in memory at once


@dataclass(frozen=True)
class TTest:
    """A t-test of a mean difference.

    Attributes:
        t: The statistic; infinite if all differences are one number other than 0.
        degrees: Degrees of freedom (a fraction if two groups are not paired).
        p_greater: One-tailed p for B above A.
        p_two_sided: Two-tailed p.
    """

    t: float
    degrees: float
    p_greater: float
    p_two_sided: float


@dataclass(frozen=True)
class PairedDifference:
    """The difference of B's score less A's.

    Attributes:
        difference: Mean of B less A with the 95% interval that the conclusion uses.
        parts: The parts of the variance of that mean, from which `at_level` makes intervals at other levels.
        covers: The variation in that interval: prompts, seeds, both. With one seed an arm it shows which of
            the trained models is better, not which setting.
        conclusion: Which arm leads: the interval excludes 0.
        bootstrap: The same difference with a 95% percentile bootstrap interval over prompts and seeds; too narrow if
            seeds are few and differ much.
        prompt_test: The paper's t-test over prompts of seed-averaged scores; None for one prompt. It takes the trained
            models as given.
        seed_test: t-test over seeds of prompt-averaged scores; None if an arm has one seed. It takes the prompts as
            given.
        seed_interval: The mean difference with the 95% interval of that test.
        seeds_paired: Whether the arms have the same seeds, so that runs are paired.
        num_prompts: P.
        num_seeds: Runs of A and of B.
    """

    difference: Estimate
    parts: VarianceParts
    covers: Covers
    conclusion: Conclusion
    bootstrap: Estimate
    prompt_test: TTest | None
    seed_test: TTest | None
    seed_interval: Estimate | None
    seeds_paired: bool
    num_prompts: int
    num_seeds: tuple[int, int]

    def at_level(self, level: float) -> Estimate:
        """Return `difference` with its interval at another level between 0 and 1."""
        return _interval(self.difference.value, self.parts, (-1.0, 1.0), level)


def paired_difference(
    score_a_SP: FloatArray, score_b_SP: FloatArray, *, seeds_paired: bool, seed: int = 0
) -> PairedDifference:
    """Compare the scores of two arms on the same prompts.

    Runs of the same seed see the same prompts in the same order and are evaluated with the same random numbers, so they
    are paired: the test then holds whether or not that makes them alike. Runs of different seeds are independent.

    Args:
        score_a_SP: A's scores, between 0 and 1, shape [S, P].
        score_b_SP: B's; its S may differ if seeds are not paired.
        seeds_paired: Whether row s of both is of the same seed.
        seed: Seed of the bootstrap.

    Raises:
        ValueError: If the scores are not of the same prompts, there are none, or paired arms differ in runs.

    Source: the t-test over prompts is that of BroRL (arXiv 2510.01180, section 5); the interval is after Banerjee
    (Sankhya 23, 1961); the bootstrap is the pigeonhole bootstrap (Owen, Annals of Applied Statistics 1, 2007).
    """
    a, b, prompt_P, seeds = _paired(score_a_SP, score_b_SP, seeds_paired)
    value, parts, bounds = float(prompt_P.mean()), parts_of(prompt_P, seeds), (-1.0, 1.0)
    seed_part = _together(parts.seeds)
    interval = _interval(value, parts, bounds)
    return PairedDifference(
        difference=interval,
        parts=parts,
        covers=parts.covers,
        conclusion=conclusion_of(interval),
        bootstrap=_bootstrap(a, b, seeds_paired, seed),
        prompt_test=None if parts.prompts is None else _t_test(value, parts.prompts),
        seed_test=None if seed_part is None else _t_test(value, seed_part),
        seed_interval=None if seed_part is None else _interval(value, VarianceParts(None, (seed_part,)), bounds),
        seeds_paired=seeds_paired,
        num_prompts=a.shape[1],
        num_seeds=(len(a), len(b)),
    )


def difference_interval(
    score_a_SP: FloatArray, score_b_SP: FloatArray, *, seeds_paired: bool, level: float = 0.95
) -> Estimate:
    """Return only the `difference` of `paired_difference`, at any level; other arguments and errors are the same."""
    _, _, prompt_P, seeds = _paired(score_a_SP, score_b_SP, seeds_paired)
    return interval_from(float(prompt_P.mean()), prompt_P, seeds, (-1.0, 1.0), level=level)


def difference_parts(score_a_SP: FloatArray, score_b_SP: FloatArray, *, seeds_paired: bool) -> VarianceParts:
    """Return only the `parts` of `paired_difference`; arguments and errors are the same."""
    return parts_of(*_paired(score_a_SP, score_b_SP, seeds_paired)[2:])


def conclusion_of(difference: Estimate) -> Conclusion:
    """Return the conclusion from a difference of B less A: a lead if its interval excludes 0."""
    if difference.low > _ROUNDING:
        return "B leads"
    return "A leads" if difference.high < -_ROUNDING else "no difference shown"


def mean_over_runs(value_SP: FloatArray, lowest: float = 0.0, highest: float = 1.0, level: float = 0.95) -> Estimate:
    """Average a number of each prompt and run, with an interval over prompts and seeds by the same method.

    With one run the interval is over prompts alone, with one prompt over seeds alone; with one number it is the whole
    possible range.

    Args:
        value_SP: The numbers, shape [S, P]: scores, or differences of scores within runs.
        lowest: The smallest possible value.
        highest: The largest possible value.
        level: The level of the interval, between 0 and 1.

    Raises:
        ValueError: If there are none.
    """
    values = _checked(value_SP)
    return interval_from(float(values.mean()), values.mean(0), [values.mean(1)], (lowest, highest), level=level)


def interval_from(
    value: float,
    value_P: FloatArray,
    value_S: Sequence[FloatArray],
    bounds: tuple[float, float],
    *,
    level: float = 0.95,
) -> Estimate:
    """Return the interval of a value from its independent values by prompt and by seed.

    Args:
        value: The value.
        value_P: A value of each prompt, or a jackknife's pseudo-value; the spread of their mean is that over prompts.
        value_S: The same of each seed: one array, or one of each arm if runs of the arms are not paired.
        bounds: The smallest and the largest possible value.
        level: The level of the interval, between 0 and 1.
    """
    return _interval(value, parts_of(value_P, value_S), bounds, level)


def resamples(
    num_prompts: int, runs_of_arm: Sequence[tuple[int, ...]], generator: np.random.Generator, num_resamples: int = 2000
) -> Iterator[tuple[FloatArray, list[FloatArray]]]:
    """Draw prompts and runs with replacement, the same prompts for all arms: the pigeonhole bootstrap.

    Arms with the same seeds get the same draws of runs.

    Args:
        num_prompts: P.
        runs_of_arm: Seeds of the runs of each arm.
        generator: Source of randomness.
        num_resamples: Number of resamples in all.

    Yields:
        Some of the resamples: the fraction of each prompt, shape [B, P], and for each arm the fraction of each run,
        shape [B, S].
    """
    most = max(1, _MAX_WEIGHTS // num_prompts)
    for done in range(0, num_resamples, most):
        size = min(most, num_resamples - done)
        prompts_BP = _fractions(num_prompts, size, generator)
        drawn = {runs: _fractions(len(runs), size, generator) for runs in dict.fromkeys(runs_of_arm)}
        yield prompts_BP, [drawn[runs] for runs in runs_of_arm]


def _checked(score_SP: FloatArray) -> FloatArray:
    scores = np.asarray(score_SP, np.float64)
    if scores.ndim != 2 or not scores.size:
        raise ValueError(f"scores must have the shape [seeds, prompts] and be at least one, got {scores.shape}")
    return scores


def _paired(
    score_a_SP: FloatArray, score_b_SP: FloatArray, seeds_paired: bool
) -> tuple[FloatArray, FloatArray, FloatArray, list[FloatArray]]:
    """Check two arms' scores; add the difference of each prompt, and the independent values of seeds."""
    a, b = _checked(score_a_SP), _checked(score_b_SP)
    if a.shape[1] != b.shape[1] or (seeds_paired and len(a) != len(b)):
        raise ValueError(f"scores of shape {a.shape} and {b.shape} cannot be paired: [seeds, prompts] must agree")
    seeds = [b.mean(1) - a.mean(1)] if seeds_paired else [a.mean(1), b.mean(1)]
    return a, b, b.mean(0) - a.mean(0), seeds


def _interval(value: float, parts: VarianceParts, bounds: tuple[float, float], level: float = 0.95) -> Estimate:
    half = parts.half_width(level)
    return Estimate(value, max(value - half, bounds[0]), min(value + half, bounds[1]))


def _together(parts: Sequence[VariancePart]) -> VariancePart | None:
    """Add independent parts of a variance; the degrees of freedom are Welch's."""
    if len(parts) < 2:
        return parts[0] if parts else None
    total = sum(part.variance for part in parts)
    if total <= _ROUNDING**2:
        return VariancePart(total, sum(part.degrees for part in parts))
    return VariancePart(total, total**2 / sum(part.variance**2 / part.degrees for part in parts))


def _t_test(value: float, part: VariancePart) -> TTest:
    if sqrt(part.variance) > _ROUNDING:
        t = value / sqrt(part.variance)
    else:  # all differences are the same
        t = 0.0 if abs(value) <= _ROUNDING else inf if value > 0 else -inf
    return TTest(t, part.degrees, float(stdtr(part.degrees, -t)), min(1.0, 2 * float(stdtr(part.degrees, -abs(t)))))


def _fractions(size: int, num_resamples: int, generator: np.random.Generator) -> FloatArray:
    """Return the fraction of draws of each item in each resample, shape [B, size]."""
    drawn_BK = generator.integers(size, size=(num_resamples, size)) + size * np.arange(num_resamples)[:, None]
    return np.bincount(drawn_BK.ravel(), minlength=num_resamples * size).reshape(num_resamples, size) / size


def _bootstrap(a: FloatArray, b: FloatArray, seeds_paired: bool, seed: int) -> Estimate:
    """Resample prompts (for both arms alike) and runs (for both alike if paired)."""
    runs_a = tuple(range(len(a)))
    runs_b = runs_a if seeds_paired else tuple(range(-len(b), 0))
    drawn = [
        (runs_BS[1] * (prompts_BP @ b.T)).sum(1) - (runs_BS[0] * (prompts_BP @ a.T)).sum(1)
        for prompts_BP, runs_BS in resamples(a.shape[1], (runs_a, runs_b), np.random.default_rng(seed))
    ]
    low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975])
    return Estimate(float((b.mean(0) - a.mean(0)).mean()), float(low), float(high))
