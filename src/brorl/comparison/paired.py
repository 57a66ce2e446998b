"""Whether arm B scores higher than arm A on the same prompts: the difference, its interval, and what it can show.

In: scores of P prompts by S runs of each arm. Out: means with intervals, tests, and a verdict. It refuses scores of
different prompts, and gives an interval as wide as can be where there is but one number.

The interval. A run's mean score varies with the prompts (others could have been held out) and with the seed (another
seed trains another model). With D the differences, v_P = var(D averaged over seeds) / P and v_S = var(D averaged over
prompts) / S,

    half-width^2 = t(P - 1)^2 v_P + t(S - 1)^2 v_S,    t(d) the 97.5% quantile of Student's t with d degrees of freedom.

For normal effects of prompts, seeds, and both together this covers at least 95% whatever the shares of the variances:
the mean has at most the variance E v_P + E v_S (the joint effect counts twice), and for weights w_i that add to 1 the
chance of Z^2 <= sum w_i t_i^2 chi_i^2 / d_i is concave in the weights, so it is at least the mean of the chances of
each part alone, 95% (Banerjee 1961, for the two-means problem). Where runs of the arms are not paired, the v_S of the
two arms enter as separate parts.

Why not something tighter. In 2,000 simulated comparisons of two arms that do not differ (200 prompts, 16 samples; every
prompt's logit is moved by each arm with a standard deviation of 0.3 and by each run with 0.2; every run moves all
prompts together by 0, 0.1, 0.3) "a difference" was found in

                                          5 seeds              3 seeds              2 seeds
    this interval                         1%, 3%, 4%           1%, 2%, 4%           0%, 2%, 4%
    random effects, Satterthwaite         3%, 6%, 6%           3%, 5%, 7%           2%, 7%, 11%
    bootstrap over prompts and seeds      2%, 5%, 12%          1%, 7%, 22%          2%, 10%, 32%
    the paper's t-test over prompts       5%, 22%, 64%         5%, 26%, 67%         5%, 27%, 68%
    t-test over seeds                     13%, 7%, 5%          9%, 6%, 5%           5%, 5%, 5%

so the verdict goes by the first, which alone holds its 5% everywhere. Few seeds pay for it: t(1) = 12.7, t(2) = 4.3,
t(4) = 2.8, so that 3 seeds give an interval 1.5 to 2 times as wide as 5 do, and 2 seeds one 4 to 6 times as wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.matching import score_at
from brorl.evaluation.pass_at_k import Estimate, FloatArray, pass_at_k, worst_at_k

Verdict = Literal["A leads", "B leads", "no difference shown"]
Covers = Literal["prompts and seeds", "prompts", "seeds", "nothing"]
Measure = Literal["pass@1", "best@k", "worst@k"]

_ROUNDING = 1e-12  # differences of scores below this are rounding
_WEIGHTS_HELD = 2_000_000  # at a time, of resampling


@dataclass(frozen=True)
class TTest:
    """A t-test of a mean difference.

    Attributes:
        t: The statistic; infinite where all differences are one number other than 0.
        degrees: Degrees of freedom (a fraction where two groups are not paired).
        p_greater: One-tailed p for B above A.
        p_two_sided: Two-tailed p.
    """

    t: float
    degrees: float
    p_greater: float
    p_two_sided: float


@dataclass(frozen=True)
class PairedDifference:
    """How much higher B scores than A.

    Attributes:
        difference: Mean of B less A with the 95% interval that the verdict goes by.
        covers: What that interval allows for: other prompts, other seeds, both. With one seed an arm it tells which of
            the trained models is better, not which setting.
        verdict: Which arm leads: the interval excludes 0.
        bootstrap: The same difference with a 95% percentile bootstrap interval over prompts and seeds; too narrow where
            seeds are few and differ much.
        prompt_test: The paper's t-test over prompts of seed-averaged scores; None of one prompt. It takes the trained
            models as given.
        seed_test: t-test over seeds of prompt-averaged scores; None where an arm has one seed. It takes the prompts as
            given.
        seed_interval: The mean difference with the 95% interval of that test.
        seeds_paired: Whether the arms have the same seeds, so that runs are paired.
        num_prompts: P.
        num_seeds: Runs of A and of B.
    """

    difference: Estimate
    covers: Covers
    verdict: Verdict
    bootstrap: Estimate
    prompt_test: TTest | None
    seed_test: TTest | None
    seed_interval: Estimate | None
    seeds_paired: bool
    num_prompts: int
    num_seeds: tuple[int, int]


@dataclass(frozen=True)
class _Part:
    """A part of the variance of a mean.

    Attributes:
        variance: Its estimate.
        degrees: Degrees of freedom of the estimate.
    """

    variance: float
    degrees: float

    @classmethod
    def of(cls, value_K: FloatArray) -> _Part | None:
        """Return what K independent values say of the variance of their mean; None if they are fewer than two."""
        return cls(float(value_K.var(ddof=1)) / value_K.size, value_K.size - 1) if value_K.size > 1 else None

    @property
    def squared_half_width(self) -> float:
        """Return the squared half-width of a 95% interval, were this the only part."""
        return float(stdtrit(self.degrees, 0.975)) ** 2 * self.variance


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
        seed: Of the bootstrap.

    Returns:
        The comparison.

    Raises:
        ValueError: If the scores are not of the same prompts, there are none, or paired arms differ in runs.

    Source: the t-test over prompts is that of BroRL (arXiv 2510.01180, section 5); the interval is after Banerjee
    (Sankhya 23, 1961); the bootstrap is the pigeonhole bootstrap (Owen, Annals of Applied Statistics 1, 2007).
    """
    a, b, seeds = _paired(score_a_SP, score_b_SP, seeds_paired)
    prompt_P = b.mean(0) - a.mean(0)
    value = float(prompt_P.mean())
    prompt_part, seed_part = _Part.of(prompt_P), _together(seeds)
    interval, covers = _interval(value, prompt_part, seeds, (-1.0, 1.0))
    return PairedDifference(
        difference=interval,
        covers=covers,
        verdict=verdict_of(interval),
        bootstrap=_bootstrap(a, b, seeds_paired, seed),
        prompt_test=None if prompt_part is None else _t_test(value, prompt_part),
        seed_test=None if seed_part is None else _t_test(value, seed_part),
        seed_interval=None if seed_part is None else _around(value, seed_part.squared_half_width, (-1.0, 1.0)),
        seeds_paired=seeds_paired,
        num_prompts=a.shape[1],
        num_seeds=(len(a), len(b)),
    )


def difference_interval(score_a_SP: FloatArray, score_b_SP: FloatArray, *, seeds_paired: bool) -> Estimate:
    """Return only the difference of B less A that `paired_difference` goes by; arguments and errors are the same."""
    a, b, seeds = _paired(score_a_SP, score_b_SP, seeds_paired)
    prompt_P = b.mean(0) - a.mean(0)
    return _interval(float(prompt_P.mean()), _Part.of(prompt_P), seeds, (-1.0, 1.0))[0]


def verdict_of(difference: Estimate) -> Verdict:
    """Return what a difference of B less A shows: a lead if its interval excludes 0."""
    if difference.low > _ROUNDING:
        return "B leads"
    return "A leads" if difference.high < -_ROUNDING else "no difference shown"


def mean_over_runs(value_SP: FloatArray, lowest: float = 0.0, highest: float = 1.0) -> Estimate:
    """Average a number of each prompt and run, with a 95% interval over prompts and seeds by the same method.

    With one run the interval is over prompts alone, with one prompt over seeds alone; with one number it is all that is
    possible.

    Args:
        value_SP: The numbers, shape [S, P]: scores, or differences of scores within runs.
        lowest: The least value possible.
        highest: The largest.

    Returns:
        The mean with its interval, within what is possible.

    Raises:
        ValueError: If there are none.
    """
    values = _checked(value_SP)
    return interval_from(float(values.mean()), values.mean(0), [values.mean(1)], lowest, highest)


def interval_from(
    value: float, value_P: FloatArray, value_S: Sequence[FloatArray], lowest: float, highest: float
) -> Estimate:
    """Return the interval of a value of which prompts and seeds tell by independent values each.

    Args:
        value: The value.
        value_P: A value of each prompt, or a jackknife's pseudo-value; the spread of their mean is that over prompts.
        value_S: The same of each seed: one array, or one of each arm where runs of the arms are not paired.
        lowest: The least value possible.
        highest: The largest.

    Returns:
        The value with its 95% interval, within what is possible.
    """
    parts = [_Part.of(values) for values in value_S]
    known = [part for part in parts if part is not None]
    seeds = known if len(known) == len(parts) else []
    return _interval(value, _Part.of(value_P), seeds, (lowest, highest))[0]


def scores_at(comparison: Comparison, arm: Arm, mark: float, measure: Measure = "pass@1", k: int = 1) -> FloatArray:
    """Return an arm's score on each prompt at a mark.

    Args:
        comparison: What is compared.
        arm: One of its arms.
        mark: How much the runs had spent, in the comparison's unit; 0 is the start.
        measure: pass@1; pass@k, called best@k beside worst@k; or worst@k, the chance that all of k are correct.
        k: Of best@k and worst@k.

    Returns:
        Scores, shape [S, P], runs by seed.

    Raises:
        ValueError: If a run was not evaluated there and did not end by itself, or k is not 1 to n.
    """
    estimate = worst_at_k if measure == "worst@k" else pass_at_k
    attempts = 1 if measure == "pass@1" else k
    return np.stack(
        [estimate(count, comparison.num_samples, attempts) for count in num_correct_at(comparison, arm, mark)]
    )


def num_correct_at(comparison: Comparison, arm: Arm, mark: float) -> NDArray[np.int64]:
    """Return how many responses to each prompt were correct at a mark, shape [S, P], runs by seed."""
    runs = sorted(arm.trajectories, key=lambda run: run.seed)
    if not runs:
        raise ValueError(f"arm {arm.name} has no run to compare")
    return np.stack([score_at(run, comparison.unit, mark).num_correct_P for run in runs])


def have_same_seeds(a: Arm, b: Arm) -> bool:
    """Return whether the runs of two arms are of the same seeds, each once, so that they can be paired."""
    seeds_a, seeds_b = ([run.seed for run in arm.trajectories] for arm in (a, b))
    return sorted(seeds_a) == sorted(seeds_b) and len(set(seeds_a)) == len(seeds_a)


def difference_at(
    comparison: Comparison, a: Arm, b: Arm, mark: float, measure: Measure = "pass@1", k: int = 1
) -> PairedDifference:
    """Compare two arms at a mark.

    Args:
        comparison: What is compared.
        a: The arm that the other is measured against.
        b: The other.
        mark: How much the runs had spent, in the comparison's unit.
        measure: What is scored.
        k: Of best@k and worst@k.

    Raises:
        ValueError: If a run was not evaluated there and did not end by itself, or k is not 1 to n.
    """
    score_a_SP, score_b_SP = (scores_at(comparison, arm, mark, measure, k) for arm in (a, b))
    return paired_difference(score_a_SP, score_b_SP, seeds_paired=have_same_seeds(a, b))


def resamples(
    num_prompts: int, runs_of_arm: Sequence[tuple[int, ...]], generator: np.random.Generator, num_resamples: int = 2000
) -> Iterator[tuple[FloatArray, list[FloatArray]]]:
    """Draw prompts and runs with replacement, the prompts for all arms alike: the pigeonhole bootstrap.

    Arms with the same seeds are given the same draws of runs.

    Args:
        num_prompts: P.
        runs_of_arm: Names (seeds) of the runs of each arm.
        generator: Draws.
        num_resamples: How many resamples there are in all.

    Yields:
        Some resamples at a time: the share of each prompt, shape [B, P], and the share of each run of each arm, each
        of shape [B, S].
    """
    most = max(1, _WEIGHTS_HELD // num_prompts)
    for done in range(0, num_resamples, most):
        size = min(most, num_resamples - done)
        prompts_BP = _shares(num_prompts, size, generator)
        drawn = {runs: _shares(len(runs), size, generator) for runs in dict.fromkeys(runs_of_arm)}
        yield prompts_BP, [drawn[runs] for runs in runs_of_arm]


def _checked(score_SP: FloatArray) -> FloatArray:
    scores = np.asarray(score_SP, np.float64)
    if scores.ndim != 2 or not scores.size:
        raise ValueError(f"scores must have the shape [seeds, prompts] and be at least one, got {scores.shape}")
    return scores


def _paired(
    score_a_SP: FloatArray, score_b_SP: FloatArray, seeds_paired: bool
) -> tuple[FloatArray, FloatArray, list[_Part]]:
    """Check two arms' scores; add what their runs tell of the variance between seeds, nothing if an arm has but one."""
    a, b = _checked(score_a_SP), _checked(score_b_SP)
    if a.shape[1] != b.shape[1] or (seeds_paired and len(a) != len(b)):
        raise ValueError(f"scores of shape {a.shape} and {b.shape} cannot be paired: [seeds, prompts] must agree")
    parts = [_Part.of(mean_S) for mean_S in ([b.mean(1) - a.mean(1)] if seeds_paired else [a.mean(1), b.mean(1)])]
    known = [part for part in parts if part is not None]
    return a, b, known if len(known) == len(parts) else []


def _interval(
    value: float, prompts: _Part | None, seeds: list[_Part], bounds: tuple[float, float]
) -> tuple[Estimate, Covers]:
    """Return the interval over what can be told of prompts and seeds, and what it covers."""
    covers: Covers
    if prompts is not None:
        covers = "prompts and seeds" if seeds else "prompts"
    elif seeds:
        covers = "seeds"
    else:
        return Estimate(value, *bounds), "nothing"
    parts = [*seeds, *([] if prompts is None else [prompts])]
    return _around(value, sum(part.squared_half_width for part in parts), bounds), covers


def _around(value: float, squared_half_width: float, bounds: tuple[float, float]) -> Estimate:
    half = sqrt(squared_half_width)
    return Estimate(value, max(value - half, bounds[0]), min(value + half, bounds[1]))


def _together(parts: list[_Part]) -> _Part | None:
    """Add independent parts of a variance; the degrees of freedom are Welch's."""
    if len(parts) < 2:
        return parts[0] if parts else None
    total = sum(part.variance for part in parts)
    if total <= _ROUNDING**2:
        return _Part(total, sum(part.degrees for part in parts))
    return _Part(total, total**2 / sum(part.variance**2 / part.degrees for part in parts))


def _t_test(value: float, part: _Part) -> TTest:
    if sqrt(part.variance) > _ROUNDING:
        t = value / sqrt(part.variance)
    else:  # all differences are the same
        t = 0.0 if abs(value) <= _ROUNDING else inf if value > 0 else -inf
    return TTest(t, part.degrees, float(stdtr(part.degrees, -t)), min(1.0, 2 * float(stdtr(part.degrees, -abs(t)))))


def _shares(size: int, num_resamples: int, generator: np.random.Generator) -> FloatArray:
    """Return how often each of some things is drawn in each resample, as shares, shape [B, size]."""
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
