"""Whether arm B scores higher than arm A on the same prompts: the difference, its interval, and the conclusion.

A run's mean score varies with the prompts (others could have been held out) and with the seed (another seed trains
another model). With D the differences of P prompts and S seeds, v_P = var(D averaged over seeds) / P and v_S = var(D
averaged over prompts) / S,

    half-width^2 = t(P - 1)^2 v_P + t(S - 1)^2 v_S,    t(d) the 97.5% quantile of Student's t with d degrees of freedom.

At another level L, t(d) is the quantile at 1 - (1 - L) / 2. If runs of the arms are not paired, the v_S of the two arms
are separate parts. docs/explanation/comparing.md shows why the interval covers at least L, and how often narrower
intervals do not. With a single number the interval is as wide as possible.
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
from brorl.format import Estimate

Conclusion = Literal["A leads", "B leads", "no difference shown"]
Covers = Literal["prompts and seeds", "prompts", "seeds", "nothing"]

ROUNDING = 1e-12  # differences of scores below this are rounding
_BOUNDS = (-1.0, 1.0)  # of a difference


@dataclass(frozen=True)
class VariancePart:
    """An independent part of the variance of a mean."""

    variance: float  # the variance of the mean that is due to this part
    degrees: float  # degrees of freedom of its estimate

    def squared_half_width(self, level: float = 0.95) -> float:
        """Return the squared half-width of an interval if this were the only part."""
        return float(stdtrit(self.degrees, (1 + level) / 2)) ** 2 * self.variance

    def with_size(self, size: int) -> VariancePart:
        """Return the same part if the mean were over another number of prompts or seeds."""
        return VariancePart(self.variance * (self.degrees + 1) / size, size - 1)


@dataclass(frozen=True)
class VarianceParts:
    """The parts of the variance of a mean over prompts and seeds."""

    prompts: VariancePart | None  # the part of the prompts; None for one prompt
    # the part of the seeds, or one of each arm if runs of the arms are not paired; empty if an arm has one seed
    seeds: tuple[VariancePart, ...]

    @classmethod
    def of(cls, value_P: FloatArray, value_S: Sequence[FloatArray]) -> VarianceParts:
        """Estimate the parts from independent values by prompt, and by seed (one array, or one of each arm)."""

        def part(values: FloatArray) -> VariancePart:
            return VariancePart(float(values.var(ddof=1)) / values.size, values.size - 1)

        prompts = None if value_P.size < 2 else part(value_P)
        return cls(prompts, () if any(v.size < 2 for v in value_S) else tuple(map(part, value_S)))

    @property
    def covers(self) -> Covers:
        """The sources of variation that an interval from these parts covers."""
        if self.prompts is None:
            return "seeds" if self.seeds else "nothing"
        return "prompts and seeds" if self.seeds else "prompts"

    def interval(self, value: float, bounds: tuple[float, float], level: float = 0.95) -> Estimate:
        """Return the interval of a mean with these parts, within its bounds; the whole range if no part is known."""
        known = (*self.seeds, *(() if self.prompts is None else (self.prompts,)))
        half = sqrt(sum(part.squared_half_width(level) for part in known)) if known else inf
        return Estimate(value, max(value - half, bounds[0]), min(value + half, bounds[1]))


@dataclass(frozen=True)
class TTest:
    """A t-test of a mean difference."""

    t: float  # the statistic; infinite if all differences are one number other than 0
    degrees: float  # degrees of freedom (a fraction if two groups are not paired)
    p_greater: float  # one-tailed p for B above A
    p_two_sided: float


@dataclass(frozen=True)
class PairedDifference:
    """The difference of B's score minus A's."""

    difference: Estimate  # mean of B minus A with the 95% interval that the conclusion uses
    # the parts of the variance of that mean, from which `at_level` makes intervals at other levels
    parts: VarianceParts
    # the sources of variation in that interval; with one seed per arm it shows which trained model is better, not which
    # setting
    covers: Covers
    conclusion: Conclusion  # an arm leads if the interval excludes 0
    # the paper's t-test over prompts of seed-averaged scores, which takes the trained models as given; None for one
    # prompt
    prompt_test: TTest | None
    # t-test over seeds of prompt-averaged scores, which takes the prompts as given; None if an arm has one seed
    seed_test: TTest | None
    seed_interval: Estimate | None  # the mean difference with the 95% interval of that test
    seeds_paired: bool  # whether the arms have the same seeds, so that runs are paired
    num_prompts: int  # P
    num_seeds: tuple[int, int]  # runs of A and of B
    seeds_ahead: int | None  # seeds in which B's mean is above A's; None unless runs are paired

    def at_level(self, level: float) -> Estimate:
        """Return `difference` with its interval at another level between 0 and 1."""
        return self.parts.interval(self.difference.value, _BOUNDS, level)


@dataclass(frozen=True)
class CorrectedInterval:
    """A difference with an interval that holds together with the others of its table."""

    interval: Estimate  # the difference with the interval at that level
    level: float  # the level of each interval, `corrected_level(num_intervals)`
    num_intervals: int  # the number of intervals in the table
    conclusion: Conclusion  # the conclusion from this interval

    @classmethod
    def of(cls, interval_at: Callable[[float], Estimate], num_intervals: int) -> CorrectedInterval:
        """Conclude from the interval at the level for so many intervals."""
        level = corrected_level(num_intervals)
        return cls(interval := interval_at(level), level, num_intervals, conclusion_of(interval))


@dataclass(frozen=True)
class SeedsNeeded:
    """Numbers of seeds and prompts whose interval has a given half-width."""

    half_width: float  # the half-width: the smallest measured difference that is shown
    seeds: int
    prompts: int  # held-out prompts: as many as the comparison has if `enough_prompts`, else more
    enough_prompts: bool  # whether the prompts of the comparison are enough, with this many seeds


def paired_difference(score_a_SP: FloatArray, score_b_SP: FloatArray, *, seeds_paired: bool) -> PairedDifference:
    """Compare the scores of two arms on the same prompts.

    Runs of the same seed see the same prompts in the same order and are evaluated with the same random numbers, so they
    are paired: the test then holds whether or not that makes them alike. Runs of different seeds are independent.
    Scores are between 0 and 1, shape [S, P]; S may differ if row s of both is not of the same seed.

    Source: the t-test over prompts is that of BroRL (arXiv 2510.01180, section 5); the interval is after Banerjee
    (Sankhya 23, 1961).
    """
    a, b = _checked(score_a_SP), _checked(score_b_SP)
    if a.shape[1] != b.shape[1] or (seeds_paired and len(a) != len(b)):
        raise ValueError(f"scores of shape {a.shape} and {b.shape} cannot be paired: [seeds, prompts] must agree")
    prompt_P = b.mean(0) - a.mean(0)
    seeds = [b.mean(1) - a.mean(1)] if seeds_paired else [a.mean(1), b.mean(1)]
    value, parts = float(prompt_P.mean()), VarianceParts.of(prompt_P, seeds)
    interval, seed_part = parts.interval(value, _BOUNDS), _together(parts.seeds)
    return PairedDifference(
        difference=interval,
        parts=parts,
        covers=parts.covers,
        conclusion=conclusion_of(interval),
        prompt_test=None if parts.prompts is None else _t_test(value, parts.prompts),
        seed_test=None if seed_part is None else _t_test(value, seed_part),
        seed_interval=None if seed_part is None else VarianceParts(None, (seed_part,)).interval(value, _BOUNDS),
        seeds_paired=seeds_paired,
        num_prompts=a.shape[1],
        num_seeds=(len(a), len(b)),
        seeds_ahead=int((b.mean(1) > a.mean(1) + ROUNDING).sum()) if seeds_paired else None,
    )


def difference_interval(
    score_a_SP: FloatArray, score_b_SP: FloatArray, *, seeds_paired: bool, level: float = 0.95
) -> Estimate:
    """Return only the `difference` of `paired_difference`, at any level."""
    return paired_difference(score_a_SP, score_b_SP, seeds_paired=seeds_paired).at_level(level)


def conclusion_of(difference: Estimate) -> Conclusion:
    """Return the conclusion from a difference of B minus A: a lead if its interval excludes 0."""
    if difference.low > ROUNDING:
        return "B leads"
    return "A leads" if difference.high < -ROUNDING else "no difference shown"


def mean_over_runs(value_SP: FloatArray, lowest: float = 0.0, highest: float = 1.0, level: float = 0.95) -> Estimate:
    """Average numbers of runs and prompts, shape [S, P], with an interval over prompts and seeds by the same method.

    With one run the interval is over prompts alone, and with one prompt over seeds alone. With one number it is the
    whole range from `lowest` to `highest`.
    """
    values = _checked(value_SP)
    return VarianceParts.of(values.mean(0), [values.mean(1)]).interval(float(values.mean()), (lowest, highest), level)


def corrected_level(num_intervals: int) -> float:
    """Return the level of each of several intervals that contain the truth together with a probability of 95%.

    Source: Dunn, Journal of the American Statistical Association 56 (1961), after Bonferroni's inequality.
    """
    if num_intervals < 1:
        raise ValueError(f"the number of intervals must be at least 1, got {num_intervals}")
    return 1 - 0.05 / num_intervals


def seeds_needed(parts: VarianceParts, half_width: float = 0.02) -> SeedsNeeded | None:
    """Return the fewest seeds whose 95% interval has at most a given half-width.

    With v the variance over seeds of one seed's mean difference, that is the smallest S with

        t(S - 1)^2 v / S + t(P - 1)^2 v_P <= half_width^2,

    and if runs are not paired, the sum over both arms instead of v. If the part of the prompts alone is above half of
    half_width^2, no number of seeds is enough, or only a very large one. The result then has the fewest prompts whose
    part is at most half of it, and the fewest seeds with these prompts. A true difference of the half-width is shown in
    about half of the comparisons. Few seeds measure the variance roughly, so the result is rough too. It is None if the
    parts of prompts and seeds are not both known.
    """
    prompts = parts.prompts
    if prompts is None or not parts.seeds:
        return None

    def smallest(parts: Sequence[VariancePart], allowed: float) -> int:
        def fits(size: int) -> bool:
            return sum(part.with_size(size).squared_half_width() for part in parts) <= allowed

        return 2 + bisect_left(range(2, 2**40), True, key=fits)

    allowed, num_prompts = half_width**2, round(prompts.degrees) + 1
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
    """Add independent parts of a variance; the degrees of freedom are Welch's."""
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
