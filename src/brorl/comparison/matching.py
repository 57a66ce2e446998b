"""What runs spent, whether they are compute-matched, and their scores per token and samples per second.

Runs are matched if their costs in the unit of the budget are equal up to the length of a step. An overshoot beyond the
tolerance is never called matched. A ratio is None if no run has its denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from brorl.comparison.arms import Arm, Comparison, Score, score_at, starts_by_seed
from brorl.cost import Cost, Unit
from brorl.evaluation.paired import mean_over_runs
from brorl.format import Estimate

TOLERANCE = 0.05  # a run is matched if it spent at most this fraction more than the evaluation point


@dataclass(frozen=True)
class Spread:
    """The mean and the range over the runs of an arm."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        if not values:
            raise ValueError("a spread needs the value of at least one run")
        return cls(sum(values) / len(values), min(values), max(values))


@dataclass(frozen=True)
class RunMatch:
    """The cost of one run at an evaluation point."""

    arm: str
    seed: int
    spent: Cost  # its cost when it was evaluated
    ended_early: str | None  # why it ended before the evaluation point; None if it did not
    # whether it spent at most `TOLERANCE` more than the evaluation point. A run that ended early counts as
    # matched, because it could not have spent more.
    matched: bool


def match_at(arms: Sequence[Arm], unit: Unit, eval_point: float) -> tuple[RunMatch, ...]:
    """Return for every run whether it is matched at an evaluation point, in the order of arms and runs."""
    at_point = [(arm, run, score_at(run, unit, eval_point).cost) for arm in arms for run in arm.runs]
    return tuple(
        RunMatch(
            arm.name,
            run.seed,
            spent,
            run.ended_early if spent.of(unit) < eval_point else None,
            spent.of(unit) <= eval_point * (1 + TOLERANCE),
        )
        for arm, run, spent in at_point
    )


def is_matched(arm: Arm, unit: Unit, eval_point: float) -> bool:
    """Return whether all runs of an arm are matched at an evaluation point."""
    return all(run.matched for run in match_at([arm], unit, eval_point))


def costs_at(arm: Arm, unit: Unit, eval_point: float) -> dict[str, Spread]:
    """Return the costs of an arm's runs at an evaluation point: steps, seconds, samples, sampled and unique tokens."""
    costs = [score_at(run, unit, eval_point).cost for run in arm.runs]
    return {name: Spread.of([getattr(cost, name) for cost in costs]) for name in Cost.__dataclass_fields__}


def training_efficiency(arm: Arm) -> dict[str, Spread | None]:
    """Return the throughput and the mixed fraction of an arm's runs, from their starts to their ends.

    Returns:
        Rollouts sampled per second of the run (`samples_per_s`) and of generation alone (`generated_per_s`, the paper's
        generation throughput), tokens sampled and computed per second (`sampled_tokens_per_s`, `unique_tokens_per_s`),
        the fraction of mixed groups among the sampled ones (`mixed_fraction`, the paper's dynamic-sampling pass rate),
        and sampled tokens per computed token (`tokens_per_unique`). None if no run has the denominator.
    """
    ratios: dict[str, list[tuple[float, float]]] = {
        "samples_per_s": [(r.cost.samples, r.cost.seconds) for r in arm.runs],
        "generated_per_s": [(r.cost.samples, r.phase_seconds.get("generation", 0.0)) for r in arm.runs],
        "sampled_tokens_per_s": [(r.cost.sampled_tokens, r.cost.seconds) for r in arm.runs],
        "unique_tokens_per_s": [(r.cost.unique_tokens, r.cost.seconds) for r in arm.runs],
        "mixed_fraction": [(r.groups_mixed, r.groups) for r in arm.runs],
        "tokens_per_unique": [(r.cost.sampled_tokens, r.cost.unique_tokens) for r in arm.runs],
    }
    known = {name: [above / below for above, below in pairs if below > 0] for name, pairs in ratios.items()}
    return {name: Spread.of(values) if values else None for name, values in known.items()}


@dataclass(frozen=True)
class TokenEfficiency:
    """The length of an arm's responses, and what they score for it."""

    tokens: Estimate  # mean tokens of a response
    # correct responses per 1,000 tokens generated, 1,000 times pass@1 over `tokens`; None without tokens
    per_thousand: Estimate | None


def token_efficiency(comparison: Comparison, arm: Arm | None = None, spent: float = 0.0) -> TokenEfficiency:
    """Return an arm's score per token over all prompts; without an arm that of the checkpoint that all runs start from.

    The interval of the ratio is that of its linearization in the two means (the delta method).
    """
    scores: Sequence[Sequence[Score]] = starts_by_seed(comparison.arms)
    if arm is not None:
        scores = [[score_at(run, comparison.unit, spent)] for run in arm.runs]
    correct_SP, tokens_SP = (
        np.stack([np.mean([getattr(s, name) for s in of_seed], 0) for of_seed in scores]) / comparison.num_samples
        for name in ("num_correct_P", "sampled_tokens_P")
    )
    mean_tokens, per_thousand = float(tokens_SP.mean()), None
    if mean_tokens > 0:
        ratio = float(correct_SP.mean()) / mean_tokens
        linear_SP = ratio + (correct_SP - ratio * tokens_SP) / mean_tokens
        per_thousand = mean_over_runs(1000 * linear_SP, highest=inf)
    return TokenEfficiency(mean_over_runs(tokens_SP, highest=inf), per_thousand)
