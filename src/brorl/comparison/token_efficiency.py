"""What an arm gets for its tokens and seconds: scores per token of its responses, samples per second of its training.

In: a comparison and a mark, or an arm's whole runs. Out: numbers with intervals over prompts and seeds, or with their
range over runs. Ratios of which no run has the denominator are None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from brorl.comparison.arms import Arm, Comparison, Score
from brorl.comparison.matching import Spread, score_at, starts_by_seed
from brorl.comparison.paired import mean_over_runs
from brorl.evaluation.pass_at_k import Estimate, FloatArray

ALL_TASKS = "all"


@dataclass(frozen=True)
class TokenEfficiency:
    """What an arm scores on a task, and with how long responses.

    Attributes:
        arm: The arm's name.
        task: The prompts' source; "all" for all prompts.
        num_prompts: How many.
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
    """What an arm's runs made of their time, over whole runs; None where no run has the numbers.

    Attributes:
        arm: The arm's name.
        samples_per_s: Rollouts sampled per second of the run.
        generated_per_s: Rollouts sampled per second of generation alone (what the paper calls generation throughput).
        sampled_tokens_per_s: Tokens sampled per second of the run.
        unique_tokens_per_s: Tokens computed per second of the run.
        informative_share: Share of the sampled groups with both outcomes (the paper's dynamic-sampling pass rate).
        tokens_per_unique: Sampled tokens per computed token.
    """

    arm: str
    samples_per_s: Spread | None
    generated_per_s: Spread | None
    sampled_tokens_per_s: Spread | None
    unique_tokens_per_s: Spread | None
    informative_share: Spread | None
    tokens_per_unique: Spread | None


def token_efficiency(comparison: Comparison, arm: Arm, mark: float) -> tuple[TokenEfficiency, ...]:
    """Return what an arm scores per token at a mark: for all prompts first, then by task where there are several.

    Args:
        comparison: What is compared.
        arm: One of its arms.
        mark: How much the runs had spent, in the comparison's unit.

    Raises:
        ValueError: If a run was not evaluated there and did not end by itself.
    """
    return _by_task(comparison, arm.name, [[score_at(run, comparison.unit, mark)] for run in arm.trajectories])


def start_efficiency(comparison: Comparison) -> tuple[TokenEfficiency, ...]:
    """Return the same of the checkpoint that all runs start from, as the arm "start"."""
    return _by_task(comparison, "start", starts_by_seed(comparison.arms))


def training_efficiency(arm: Arm) -> TrainingEfficiency:
    """Return what an arm's runs made of their time, from their starts to their ends."""
    runs = arm.trajectories
    return TrainingEfficiency(
        arm=arm.name,
        samples_per_s=_ratio([(r.cost.samples, r.cost.seconds) for r in runs]),
        generated_per_s=_ratio([(r.cost.samples, r.phase_seconds.get("generation", 0.0)) for r in runs]),
        sampled_tokens_per_s=_ratio([(r.cost.sampled_tokens, r.cost.seconds) for r in runs]),
        unique_tokens_per_s=_ratio([(r.cost.unique_tokens, r.cost.seconds) for r in runs]),
        informative_share=_ratio([(r.groups_mixed, r.groups) for r in runs]),
        tokens_per_unique=_ratio([(r.cost.sampled_tokens, r.cost.unique_tokens) for r in runs]),
    )


def _by_task(comparison: Comparison, arm: str, scores: Sequence[Sequence[Score]]) -> tuple[TokenEfficiency, ...]:
    """Summarise by task; the evaluations of a seed are averaged."""
    correct_SP = np.stack([np.mean([s.num_correct_P for s in of_seed], 0) for of_seed in scores])
    tokens_SP = np.stack([np.mean([s.sampled_tokens_P for s in of_seed], 0) for of_seed in scores])
    correct_SP, tokens_SP = correct_SP / comparison.num_samples, tokens_SP / comparison.num_samples
    source_P = np.array([prompt.source for prompt in comparison.prompts])
    tasks = sorted({prompt.source for prompt in comparison.prompts})
    rows = [_efficiency(arm, ALL_TASKS, correct_SP, tokens_SP)]
    if len(tasks) > 1:
        rows += [_efficiency(arm, t, correct_SP[:, source_P == t], tokens_SP[:, source_P == t]) for t in tasks]
    return tuple(rows)


def _efficiency(arm: str, task: str, correct_SP: FloatArray, tokens_SP: FloatArray) -> TokenEfficiency:
    """Summarise a task; the interval of the ratio is that of its linearisation in the two means (the delta method)."""
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
