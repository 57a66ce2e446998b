"""Decides whether arm B scores higher than arm A on the same prompts: difference, interval, conclusion.

A run's mean score varies with the prompts (a different sample could be held out) and with the seed (a different seed
trains a different model). D holds the differences B - A, shape [S, P] for S seeds and P prompts. The 95% interval has

    half-width^2 = t(P - 1)^2 v_P + (d u)^2 + t(S - 1)^2 v_S,
    v_P = var(mean of D over seeds) / P,    v_S = var(mean of D over prompts) / S,    u = 1 - 0.025^(1/P),

where t(d) is the 97.5% quantile of Student's t with d degrees of freedom. u is the Clopper-Pearson bound on an event
that none of P prompts shows; it keeps the interval from collapsing when few or no prompts differ. d is the root mean
square of the prompts' nonzero differences, or 1 if all are 0. At a level L, 0.025 is replaced by (1 - L) / 2. If the
arms' runs are not paired, each arm has its own v_S. docs/explanation/comparing.md shows how often the interval covers
the truth, and how often narrower intervals miss it. If no variance is known, the interval is the whole range.

For a single arm's score, the ends of `mean_with_interval` over the prompts replace the first two terms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from brorl.arrays import FloatArray
from brorl.evaluation.pass_at_k import mean_with_interval
from brorl.format import Estimate

Conclusion = Literal["A leads", "B leads", "no difference shown"]
Covers = Literal["prompts and seeds", "prompts", "seeds", "nothing"]

ROUNDING = 1e-12  # score differences below this are rounding errors


@dataclass(frozen=True)
class VariancePart:
    """The part of a mean's variance that comes from one source. Sources are independent."""

    variance: float  # variance that this source adds to the mean
    degrees: float  # degrees of freedom in the estimate of `variance`
    unseen: float = 0.0  # size of any differences that a sample of `degrees` + 1 prompts may have missed

    def squared_half_width(self, level: float = 0.95) -> float:
        """Return the squared half-width of an interval from this part alone."""
        known = float(stdtrit(self.degrees, (1 + level) / 2)) ** 2 * self.variance
        bound: float = 1 - ((1 - level) / 2) ** (1 / (self.degrees + 1))
        return known + (self.unseen * bound) ** 2

    def with_size(self, size: int) -> VariancePart:
        """Return this part for a mean over a different number of prompts or seeds."""
        return VariancePart(self.variance * (self.degrees + 1) / size, size - 1, self.unseen)


@dataclass(frozen=True)
class VarianceParts:
    """The parts of the variance of a mean over prompts and seeds."""

    prompts: VariancePart | None  # due to the prompts; None with one prompt
    # due to the seeds: one part if runs are paired, otherwise one per arm; empty if either arm has only one seed
    seeds: tuple[VariancePart, ...]

    @classmethod
    def of(cls, value_P: FloatArray, value_S: Sequence[FloatArray]) -> VarianceParts:
        """Estimate the parts from one difference per prompt and one per seed (unpaired: one mean per seed and arm)."""

        def part(values: FloatArray, unseen: float = 0.0) -> VariancePart:
            return VariancePart(float(values.var(ddof=1)) / values.size, values.size - 1, unseen)

        shown = value_P[np.abs(value_P) > ROUNDING]
        unseen = float(np.sqrt(np.mean(shown**2))) if shown.size else 1.0
        prompts = None if value_P.size < 2 else part(value_P, unseen)
        return cls(prompts, () if any(v.size < 2 for v in value_S) else tuple(map(part, value_S)))

    @property
    def covers(self) -> Covers:
        """The sources of variation that an interval from these parts accounts for."""
        if self.prompts is None:
            return "seeds" if self.seeds else "nothing"
        return "prompts and seeds" if self.seeds else "prompts"

    def interval(self, value: float, level: float = 0.95) -> Estimate:
        """Return the interval for a difference, within [-1, 1]: the whole range if no variance is known."""
        known = (*self.seeds, *(() if self.prompts is None else (self.prompts,)))
        half = sqrt(sum(part.squared_half_width(level) for part in known))
        half = half if half > ROUNDING else inf  # a single number, or seeds that agree on a single prompt
        return Estimate(value, max(value - half, -1.0), min(value + half, 1.0))


@dataclass(frozen=True)
class TTest:
    """The result of a t-test of a mean difference."""

    t: float  # the statistic; infinite if all differences are equal and not 0
    degrees: float  # degrees of freedom (fractional if the two groups are not paired)
    p_greater: float  # one-tailed p for B above A
    p_two_sided: float


@dataclass(frozen=True)
class PairedDifference:
    """How much higher B scores than A, with t-tests and a conclusion."""

    difference: Estimate  # mean of B - A, with the 95% interval that the conclusion uses
    parts: VarianceParts  # the variance of `difference`; `at_level` uses it for intervals at other levels
    # sources of variation that the interval accounts for; with one seed per arm, it shows which trained model is
    # better, not which setting
    covers: Covers
    conclusion: Conclusion  # an arm leads if the interval excludes 0
    # the paper's t-test over prompts, on scores averaged over seeds; it applies only to these trained models; None with
    # one prompt
    prompt_test: TTest | None
    # t-test over seeds, on scores averaged over prompts; applies only to these prompts; None if an arm has one seed
    seed_test: TTest | None
    seed_interval: Estimate | None  # the mean difference with the 95% interval of `seed_test`
    seeds_paired: bool  # whether runs are paired because the arms have the same seeds
    num_prompts: int  # P
    num_seeds: tuple[int, int]  # runs of A, runs of B
    seeds_ahead: int | None  # number of seeds with B's mean above A's; None unless runs are paired

    def at_level(self, level: float) -> Estimate:
        """Return `difference` with its interval at the given level, between 0 and 1."""
        return self.parts.interval(self.difference.value, level)


@dataclass(frozen=True)
class CorrectedInterval:
    """A difference in a table of several. With 95% probability, all intervals in the table contain the truth."""

    interval: Estimate  # the difference with its interval at `level`
    level: float  # level of each single interval, `corrected_level(num_intervals)`
    num_intervals: int  # number of intervals in the table
    conclusion: Conclusion  # drawn from `interval`

    @classmethod
    def of(cls, interval_at: Callable[[float], Estimate], num_intervals: int) -> CorrectedInterval:
        """Correct the level for the number of intervals, and draw the conclusion from the interval at that level."""
        level = corrected_level(num_intervals)
        return cls(interval := interval_at(level), level, num_intervals, conclusion_of(interval))


@dataclass(frozen=True)
class SeedsNeeded:
    """The number of seeds and prompts needed for a given interval width."""

    half_width: float  # half of the interval's width; smaller measured differences are not significant
    seeds: int
    prompts: int  # held-out prompts: as many as in the comparison if `enough_prompts`, otherwise more
    enough_prompts: bool  # whether the comparison has enough prompts for this number of seeds


def paired_difference(score_a_SP: FloatArray, score_b_SP: FloatArray, *, seeds_paired: bool) -> PairedDifference:
    """Compare the scores of two arms on the same prompts.

    Scores are between 0 and 1, shape [S, P]. Two runs with the same seed are paired: they see the same prompts in the
    same order, and are evaluated with the same random numbers. The test is valid whether or not that makes their scores
    similar. Runs with different seeds are independent. With `seeds_paired`, row s has the same seed in both arms;
    otherwise S may differ.

    Source: BroRL (arXiv 2510.01180, section 5) for the t-test over prompts; Banerjee (Sankhya 23, 1961) for the
    interval.
    """
    a, b = _checked(score_a_SP), _checked(score_b_SP)
    if a.shape[1] != b.shape[1] or (seeds_paired and len(a) != len(b)):
        raise ValueError(f"scores of shape {a.shape} and {b.shape} cannot be paired: [seeds, prompts] must match")
    prompt_P = b.mean(0) - a.mean(0)
    seeds = [b.mean(1) - a.mean(1)] if seeds_paired else [a.mean(1), b.mean(1)]
    value = float(prompt_P.mean())
    parts = VarianceParts.of(prompt_P, seeds)
    interval = parts.interval(value)
    seed_part = _together(parts.seeds)
    return PairedDifference(
        difference=interval,
        parts=parts,
        covers=parts.covers,
        conclusion=conclusion_of(interval),
        prompt_test=None if parts.prompts is None else _t_test(value, parts.prompts),
        seed_test=None if seed_part is None else _t_test(value, seed_part),
        seed_interval=None if seed_part is None else VarianceParts(None, (seed_part,)).interval(value),
        seeds_paired=seeds_paired,
        num_prompts=a.shape[1],
        num_seeds=(len(a), len(b)),
        seeds_ahead=int((b.mean(1) > a.mean(1) + ROUNDING).sum()) if seeds_paired else None,
    )


def conclusion_of(difference: Estimate) -> Conclusion:
    """Return the conclusion from a difference B - A: one arm leads if the interval excludes 0."""
    if difference.low > ROUNDING:
        return "B leads"
    return "A leads" if difference.high < -ROUNDING else "no difference shown"


def mean_over_runs(value_SP: FloatArray) -> Estimate:
    """Average scores between 0 and 1 over runs and prompts, shape [S, P], with a 95% interval.

    With one run, the result is `mean_with_interval` over the prompts. With more, each end's squared distance from the
    mean is the sum of two squared distances: from `mean_with_interval` on the prompts' means over runs, and from the
    t-interval over runs.

    Source: MOVER (Zou and Donner, Statistics in Medicine 27, 2008) for adding the squared distances.
    """
    values = _checked(value_SP)
    over_prompts = mean_with_interval(values.mean(0))
    value = over_prompts.value
    run_parts = VarianceParts.of(values.mean(0), [values.mean(1)]).seeds
    if not run_parts:
        return over_prompts
    squared = sum(part.squared_half_width() for part in run_parts)
    low, high = (sqrt((value - end) ** 2 + squared) for end in (over_prompts.low, over_prompts.high))
    return Estimate(value, max(value - low, 0.0), min(value + high, 1.0))


def corrected_level(num_intervals: int) -> float:
    """Return 1 - 0.05 / n, the level per interval at which all n intervals contain the truth with 95% probability.

    Source: Dunn, Journal of the American Statistical Association 56 (1961), after Bonferroni's inequality.
    """
    if num_intervals < 1:
        raise ValueError(f"the number of intervals must be at least 1, got {num_intervals}")
    return 1 - 0.05 / num_intervals


def seeds_needed(parts: VarianceParts, half_width: float = 0.02) -> SeedsNeeded | None:
    """Return the fewest seeds whose 95% interval has at most the given half-width.

    Let v be the variance over seeds of one seed's mean difference (summed over both arms if runs are not paired). The
    result is the smallest S with

        t(S - 1)^2 v / S + t(P - 1)^2 v_P + (d u)^2 <= half_width^2.

    If the prompts alone contribute more than half of half_width^2, it would take very many seeds, or no number would be
    enough. The result then has the fewest prompts that contribute at most half, and the fewest seeds for that many
    prompts. About half of all comparisons detect a true difference equal to the half-width. Few seeds give only a rough
    estimate of the variance, so the result is rough too. It is None unless the variance is known for both prompts and
    seeds.
    """
    prompts = parts.prompts
    if prompts is None or not parts.seeds:
        return None

    def smallest(parts: Sequence[VariancePart], allowed: float) -> int:
        def fits(size: int) -> bool:
            return sum(part.with_size(size).squared_half_width() for part in parts) <= allowed

        return 2 + bisect_left(range(2, 2**40), True, key=fits)

    allowed = half_width**2
    num_prompts = round(prompts.degrees) + 1
    enough = prompts.squared_half_width() <= allowed / 2
    if not enough:
        num_prompts = smallest([prompts], allowed / 2)
        prompts = prompts.with_size(num_prompts)
    return SeedsNeeded(half_width, smallest(parts.seeds, allowed - prompts.squared_half_width()), num_prompts, enough)


def _checked(score_SP: FloatArray) -> FloatArray:
    scores = np.asarray(score_SP, np.float64)
    if scores.ndim != 2 or not scores.size:
        raise ValueError(f"scores must have the shape [seeds, prompts] with at least one entry, got {scores.shape}")
    return scores


def _together(parts: Sequence[VariancePart]) -> VariancePart | None:
    """Add independent parts of a variance, with Welch's degrees of freedom."""
    if len(parts) < 2:
        return parts[0] if parts else None
    total = sum(part.variance for part in parts)
    if total <= ROUNDING**2:
        return VariancePart(total, sum(part.degrees for part in parts))
    return VariancePart(total, total**2 / sum(part.variance**2 / part.degrees for part in parts))


def _t_test(value: float, part: VariancePart) -> TTest:
    if sqrt(part.variance) > ROUNDING:
        t = value / sqrt(part.variance)
    else:  # all differences are the same
        t = 0.0 if abs(value) <= ROUNDING else inf if value > 0 else -inf
    return TTest(t, part.degrees, float(stdtr(part.degrees, -t)), min(1.0, 2 * float(stdtr(part.degrees, -abs(t)))))
