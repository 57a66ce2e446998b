"""Scores per token of the responses, and samples per second of the training.

In: a comparison, or an arm's whole runs. Out: numbers with intervals over prompts and seeds, or with their range over
runs. A ratio is None if no run has its denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from brorl.comparison.arms import Arm, Comparison, Score
from brorl.comparison.matching import Spread
from brorl.comparison.paired import mean_over_runs
from brorl.comparison.scores import score_at, starts_by_seed
from brorl.evaluation.pass_at_k import Estimate, FloatArray

ALL_TASKS = "all"


@dataclass(frozen=True)
class TokenEfficiency:
    """An arm's score on a task, and the length of its responses.

    Attributes:
        arm: The arm's name.
        task: The prompts' source; "all" for all prompts.
        num_prompts: Number of its prompts.
        score: pass@1.
        tokens: Mean tokens of a response.
        per_thousand: Correct responses per 1,000 tokens generated, 1,000 times the ratio of the two; None without
            tokens.
    """

    arm: str
    task: str
    num_prompts: int
    score: Estimate
    tokens: Estimate
    per_thousand: Estimate | None


@dataclass(frozen=True)
class TrainingEfficiency:
    """Throughput and mixed fraction of an arm's whole runs; None if no run has the numbers.

    Attributes:
        arm: The arm's name.
        samples_per_s: Rollouts sampled per second of the run.
        generated_per_s: Rollouts sampled per second of generation alone (the paper's generation throughput).
        sampled_tokens_per_s: Tokens sampled per second of the run.
        unique_tokens_per_s: Tokens computed per second of the run.
        mixed_fraction: Fraction of mixed groups among the sampled groups (the paper's dynamic-sampling pass rate).
        tokens_per_unique: Sampled tokens per computed token.
    """

    arm: str
    samples_per_s: Spread | None
    generated_per_s: Spread | None
    sampled_tokens_per_s: Spread | None
    unique_tokens_per_s: Spread | None
    mixed_fraction: Spread | None
    tokens_per_unique: Spread | None


def token_efficiency(comparison: Comparison, arm: Arm, spent: float) -> tuple[TokenEfficiency, ...]:
    """Return an arm's score per token: for all prompts first, then by task if there are several.

    Args:
        comparison: The comparison.
        arm: One of its arms.
        spent: Amount of the budget, in the comparison's unit.

    Raises:
        ValueError: If a run was not evaluated there and did not end early.
    """
    return _by_task(comparison, arm.name, [[score_at(run, comparison.unit, spent)] for run in arm.runs])


def start_efficiency(comparison: Comparison) -> tuple[TokenEfficiency, ...]:
    """Return the same of the checkpoint that all runs start from, as the arm "start"."""
    return _by_task(comparison, "start", starts_by_seed(comparison.arms))


def training_efficiency(arm: Arm) -> TrainingEfficiency:
    """Return the throughput and the mixed fraction of an arm's runs, from their starts to their ends."""
    runs = arm.runs
    return TrainingEfficiency(
        arm=arm.name,
        samples_per_s=_ratio([(r.cost.samples, r.cost.seconds) for r in runs]),
        generated_per_s=_ratio([(r.cost.samples, r.phase_seconds.get("generation", 0.0)) for r in runs]),
        sampled_tokens_per_s=_ratio([(r.cost.sampled_tokens, r.cost.seconds) for r in runs]),
        unique_tokens_per_s=_ratio([(r.cost.unique_tokens, r.cost.seconds) for r in runs]),
        mixed_fraction=_ratio([(r.groups_mixed, r.groups) for r in runs]),
        tokens_per_unique=_ratio([(r.cost.sampled_tokens, r.cost.unique_tokens) for r in runs]),
    )


def _by_task(comparison: Comparison, arm: str, scores: Sequence[Sequence[Score]]) -> tuple[TokenEfficiency, ...]:
    """Summarize by task; the evaluations of a seed are averaged."""
    n = comparison.num_samples
    correct_SP = np.stack([np.mean([s.num_correct_P for s in of_seed], 0) for of_seed in scores]) / n
    tokens_SP = np.stack([np.mean([s.sampled_tokens_P for s in of_seed], 0) for of_seed in scores]) / n
    rows = [_efficiency(arm, ALL_TASKS, correct_SP, tokens_SP)]
    tasks = comparison.task_names()
    if len(tasks) > 1:
        chosen = [(task, comparison.prompts_of(task)) for task in tasks]
        rows += [_efficiency(arm, task, correct_SP[:, of_task], tokens_SP[:, of_task]) for task, of_task in chosen]
    return tuple(rows)


def _efficiency(arm: str, task: str, correct_SP: FloatArray, tokens_SP: FloatArray) -> TokenEfficiency:
    """Summarize a task; the interval of the ratio is that of its linearization in the two means (the delta method)."""
    mean_tokens = float(tokens_SP.mean())
    per_thousand = None
    if mean_tokens > 0:
        ratio = float(correct_SP.mean()) / mean_tokens
        linear_SP = ratio + (correct_SP - ratio * tokens_SP) / mean_tokens
        per_thousand = mean_over_runs(1000 * linear_SP, highest=inf)
    tokens = mean_over_runs(tokens_SP, highest=inf)
    return TokenEfficiency(arm, task, tokens_SP.shape[1], mean_over_runs(correct_SP), tokens, per_thousand)


def _ratio(pairs: Sequence[tuple[float, float]]) -> Spread | None:
    """Return the spread of a ratio over the runs that have its denominator."""
    ratios = [above / below for above, below in pairs if below > 0]
    return Spread.of(ratios) if ratios else None
