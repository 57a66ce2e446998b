"""Recommend N and the number of prompts for a time budget, from the measurements of a pilot.

At equal seconds per step, the best pair has the least relative noise in its batch gradient. The plan also names every N
that the pilot cannot distinguish from the best. All intervals come from resampling the pilot's prompts. The plan is
valid for the current policy, and does not predict a run's final performance.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from brorl.arrays import FloatArray
from brorl.config.settings import TrainConfig
from brorl.format import Estimate
from brorl.planning.gradient_noise import NoiseMoments, mean_gradient_p_value, noise_moments
from brorl.planning.pass_rates import PassRates, fit_pass_rates
from brorl.planning.pilot import ExpectedCounts, PilotCounts, expected_counts, fraction_estimates, with_interval
from brorl.planning.step_cost import StepCost, Work, mean_rounds

_REPLICATES = 400
_MIN_TIME_ERROR = 0.05  # relative error; step times are never known to better than this
_SIGNIFICANT = 0.025
NEARLY_BEST = 1.1  # limit on a tied N's noise relative to the least, or an uncertain pilot would pick the largest N
_MIN_FRACTION = 1e-9  # minimum fraction of kept groups in a replicate; a step then takes practically forever
_MISSING = Estimate(np.nan, np.nan, np.nan)


@dataclass(frozen=True)
class StepSettings:
    """The recipe's step settings."""

    num_rollouts: int  # the recipe's N, which is compared with others
    prompts_per_step: int  # the recipe's number of groups
    mini_batches: int  # updates per step, and the minimum number of groups in a step
    dynamic_sampling: bool  # whether the batch is refilled in place of groups that are not kept
    max_prompts: int  # largest number of groups in a step

    @classmethod
    def of(cls, config: TrainConfig, num_prompts: int) -> StepSettings:
        """Return the settings of a recipe that has `num_prompts` training prompts."""
        return cls(
            num_rollouts=config.rollouts_per_prompt,
            prompts_per_step=config.prompts_per_step,
            mini_batches=config.optimizer.mini_batches,
            dynamic_sampling=config.dynamic_sampling.enabled,
            max_prompts=max(num_prompts, config.prompts_per_step),
        )


@dataclass(frozen=True)
class PlanRow:
    """The expected fractions, costs and noise at N rollouts per prompt."""

    num_rollouts: int  # N
    extrapolated: bool  # whether N is beyond the pilot's rollouts, so the fractions come from the fit
    kept: Estimate  # fraction of groups that are kept: the mixed ones, up to `max_pass_rate`
    solved: Estimate  # fraction of prompts with at least one success
    unique_tokens: Estimate  # tree nodes of a sampled group
    unique_fraction: float  # tree nodes / sampled tokens of a group
    trained_nodes: float  # tree nodes of a kept group in the loss
    seconds: dict[str, float]  # seconds per step with the recipe's number of prompts, by stage and in total
    budget_prompts: int  # prompts per step that fit in the time budget; 0 if too few fit
    budget_seconds: float  # seconds per step with that many prompts
    budget_noise: Estimate  # relative gradient noise of that step; the upper end is infinite if |G|^2 may be 0
    to_best: Estimate  # budget_noise / budget_noise of the best N


@dataclass(frozen=True)
class RolloutPlan:
    """The table and the recommendation."""

    rows: list[PlanRow]  # one per N, ascending
    budget: float  # seconds per step
    recipe: int  # index of the recipe's N
    best: int | None  # index of the N with the least noise at the budget; None if no N fits
    tied: list[int]  # indices of each N that the pilot cannot distinguish from the best, including the best
    # index of the largest tied N with at most `NEARLY_BEST` times the least noise, because a larger N covers more rare
    # successes; None if no N fits
    chosen: int | None
    pass_rates: PassRates  # fit for the fractions beyond the pilot
    moments: NoiseMoments  # squared length and variances of the gradient
    p_value: float  # probability of a |G|^2 at least this large if the mean gradient were 0
    time_error: float  # relative error of the seconds, for comparisons of noise at equal time

    @property
    def recommended(self) -> PlanRow | None:
        """The row of the chosen N; None if no N fits."""
        return None if self.chosen is None else self.rows[self.chosen]

    @property
    def gradient_seen(self) -> bool:
        """Whether the pilot's mean gradient differs significantly from 0."""
        return self.p_value <= _SIGNIFICANT


@dataclass(frozen=True)
class _Steps:
    """Work and seconds of steps, one column per N."""

    cost: StepCost
    settings: StepSettings
    point: ExpectedCounts

    def rounds(self, column: int, num_prompts: int) -> float:
        """Return the number of engine calls in a step."""
        if not self.settings.dynamic_sampling:
            return 1.0
        fraction = float(self.point.kept[0, column])
        return mean_rounds(round(fraction, 3) or fraction, num_prompts)

    def work(self, expected: ExpectedCounts, row: Any, column: int, num_prompts: float, rounds: float) -> Work:
        """Return the work of a step that trains on `num_prompts` groups. A slice of rows gives arrays."""
        fraction = expected.kept[row, column] if self.settings.dynamic_sampling else 1.0
        at = (row, column)
        return Work.of_step(
            num_prompts, np.maximum(fraction, _MIN_FRACTION), nodes=expected.nodes[at], tokens=expected.tokens[at],
            responses=expected.responses[at], trained=expected.trained[at], updates=self.settings.mini_batches,
            rounds=rounds,
        )  # fmt: skip

    def seconds(self, column: int, num_prompts: int) -> dict[str, float]:
        """Return the seconds of a step by stage, and their total."""
        rounds = self.rounds(column, num_prompts)
        return self.cost.seconds(self.work(self.point, 0, column, num_prompts, rounds))

    def total(self, column: int, num_prompts: int) -> float:
        """Return the total seconds of a step."""
        return self.seconds(column, num_prompts)["total"]

    def redrawn_prompts(self, drawn: ExpectedCounts, column: int, num_prompts: int) -> FloatArray:
        """Return, for each replicate, the unrounded number of prompts that takes the same time, shape [B].

        For a given number of rounds, the cost is affine in the number of prompts. If no prompts fit, every entry is 1.
        """
        if not num_prompts:
            return np.ones(drawn.nodes.shape[0])
        rounds = self.rounds(column, num_prompts)
        total = self.total(column, num_prompts)
        fixed = self.cost.seconds(Work(0, 0, 0, 0, 0, 0, self.settings.mini_batches, rounds))["total"]
        work_B = self.work(drawn, slice(None), column, num_prompts, rounds)
        variable_B = np.asarray(self.cost.seconds(work_B)["total"]) - fixed
        rises_B = variable_B > 1e-9 * total  # without a cost per prompt, nothing limits the number of prompts
        factor_B: FloatArray = np.where(rises_B, (total - fixed) / np.where(rises_B, variable_B, 1.0), 1.0)
        return num_prompts * factor_B


def make_plan(
    counts: PilotCounts, cost: StepCost, settings: StepSettings, budget: float | None, generator: np.random.Generator
) -> RolloutPlan:
    """Compare values of N, including the recipe's, and recommend one.

    The budget is in seconds per step. None uses the time of a step with the recipe's N and number of prompts.
    """
    recipe = counts.wanted_J.tolist().index(settings.num_rollouts)
    fit = fit_pass_rates(counts.correct_P, counts.num_rollouts)
    num_pilot = counts.correct_P.size
    weight_BP = generator.multinomial(num_pilot, np.full(num_pilot, 1 / num_pilot), _REPLICATES).astype(np.float64)
    point, drawn = expected_counts(counts, fit), expected_counts(counts, fit, weight_BP)
    p_value = mean_gradient_p_value(counts.products, generator)

    steps = _Steps(cost, settings, point)
    columns = range(counts.wanted_J.size)
    budget = steps.total(recipe, settings.prompts_per_step) if budget is None else budget
    minimum, maximum = settings.mini_batches, settings.max_prompts
    prompts = [prompts_that_fit(partial(steps.total, j), budget, minimum, maximum) for j in columns]
    redrawn_BJ = np.stack([steps.redrawn_prompts(drawn, j, prompts[j]) for j in columns], axis=1)

    # Noise times |G|^2: comparisons do not need |G|^2.
    fits_J = np.array(prompts) > 0
    wanted_J = counts.wanted_J.astype(np.float64)
    fraction_J, fraction_BJ = (point.kept[0], drawn.kept) if settings.dynamic_sampling else (1.0, 1.0)
    moments, drawn_moments = noise_moments(counts.products), noise_moments(counts.products, weight_BP)
    noise_J = np.where(fits_J, moments.excess(wanted_J, fraction_J) / np.maximum(prompts, 1), np.inf)
    noise_BJ = drawn_moments.excess(wanted_J, fraction_BJ) / redrawn_BJ
    time_error = max(cost.worst_error, _MIN_TIME_ERROR)
    best, tied, ratio_BJ = least_noise(noise_J, noise_BJ, time_error)
    # relative to |G|^2, which is infinite where |G|^2 may be 0
    signal = float(moments.mean_squared) if p_value <= _SIGNIFICANT else 0.0
    signal_B1 = drawn_moments.mean_squared
    relative_J = noise_J / signal if signal > 0 else np.full(noise_J.size, np.inf)
    relative_BJ = np.where(signal_B1 > 0, noise_BJ / np.where(signal_B1 > 0, signal_B1, 1.0), np.inf)

    kept, solved = fraction_estimates(counts, point, drawn)
    rows = [
        PlanRow(
            num_rollouts=int(counts.wanted_J[j]),
            extrapolated=bool(counts.wanted_J[j] > counts.num_rollouts),
            kept=kept[j],
            solved=solved[j],
            unique_tokens=with_interval(point.nodes[0, j], drawn.nodes[:, j]),
            unique_fraction=float(point.nodes[0, j] / point.tokens[0, j]),
            trained_nodes=float(point.trained[0, j]),
            seconds=steps.seconds(j, settings.prompts_per_step),
            budget_prompts=prompts[j],
            budget_seconds=steps.total(j, prompts[j]) if prompts[j] else np.inf,
            budget_noise=_noise(relative_J[j], relative_BJ[:, j]) if fits_J[j] else _MISSING,
            to_best=_noise(noise_J[j] / noise_J[best], ratio_BJ[:, j]) if fits_J[j] and noise_J[best] else _MISSING,
        )
        for j in columns
    ]
    chosen = max((j for j in tied if noise_J[j] <= NEARLY_BEST * noise_J[best]), default=None)
    return RolloutPlan(rows, budget, recipe, best, tied, chosen, fit, moments, p_value, time_error)


def prompts_that_fit(seconds_of: Callable[[int], float], budget: float, minimum: int, maximum: int) -> int:
    """Return the largest number of prompts, minimum to maximum, whose step takes at most `budget` s; 0 if none."""
    num_fitting = bisect_right(range(minimum, maximum + 1), budget, key=seconds_of)
    return minimum + num_fitting - 1 if num_fitting else 0


def least_noise(
    noise_J: FloatArray, noise_BJ: FloatArray, time_error: float
) -> tuple[int | None, list[int], FloatArray]:
    """Return the N with the least noise (None if nothing fits), every N tied with it, and the replicates' ratios.

    Noise is infinite where no prompts fit. An N's ratio is its noise / the best noise. It is tied if the lower end of
    the ratio's 95% interval is at most 1 + `time_error`.
    """
    fitting = np.flatnonzero(np.isfinite(noise_J)).tolist()
    if not fitting:
        return None, [], noise_BJ
    best = int(np.argmin(noise_J))
    min_B1 = noise_BJ[:, best : best + 1]  # 0 in a replicate whose best N has no noise
    seen_BJ = noise_BJ / np.where(min_B1 > 0, min_B1, 1.0)
    ratio_BJ = np.where(min_B1 > 0, seen_BJ, np.where(noise_BJ > 0, np.inf, 1.0))
    return best, [j for j in fitting if j == best or _noise(np.inf, ratio_BJ[:, j]).low <= 1 + time_error], ratio_BJ


def _noise(value: float, replicates_B: FloatArray) -> Estimate:
    """Return a value with a 95% interval that includes it. Its ends are replicates, because some may be infinite."""
    low, high = np.quantile(replicates_B, 0.025, method="lower"), np.quantile(replicates_B, 0.975, method="higher")
    return Estimate(float(value), min(float(low), float(value)), max(float(high), float(value)))
