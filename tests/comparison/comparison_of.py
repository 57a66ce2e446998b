"""Comparisons made from plain numbers."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from brorl.comparison.arms import Arm, Comparison, HeldOutPrompt, RunScores, Score
from brorl.cost import Cost, Unit


def score_of(
    cost: Cost, num_correct_P: Sequence[int] | NDArray[np.int64], tokens_P: Sequence[int] | None = None
) -> Score:
    correct = np.asarray(num_correct_P, np.int64)
    tokens = np.full(correct.size, 100) if tokens_P is None else np.asarray(tokens_P, np.int64)
    return Score(cost, correct, tokens, 0.0)


def run_of(
    seed: int,
    scores: Sequence[Score],
    *,
    ended_early: str | None = None,
    cost: Cost | None = None,
    phases: Mapping[str, float] | None = None,
    groups: tuple[int, int] = (10, 5),
) -> RunScores:
    return RunScores(
        seed=seed,
        scores=tuple(scores),
        cost=scores[-1].cost if cost is None and scores else cost or Cost(),
        phase_seconds=phases or {},
        groups=groups[0],
        groups_mixed=groups[1],
        num_updated=groups[1],
        ended_early=ended_early,
        path=f"runs/{seed}",
    )


def arm_of(name: str, runs: Sequence[RunScores], num_rollouts: int | None = 16) -> Arm:
    return Arm(name, "", num_rollouts, 8, {}, tuple(runs))


def comparison_of(
    arms: Sequence[Arm],
    eval_points: Sequence[float],
    num_samples: int,
    *,
    sources: Sequence[str] | None = None,
    unit: Unit = "seconds",
) -> Comparison:
    num_prompts = arms[0].runs[0].scores[0].num_correct_P.size
    prompts = tuple(
        HeldOutPrompt(f"prompt-{i}", "task" if sources is None else sources[i], "math", "?", "!")
        for i in range(num_prompts)
    )
    return Comparison(
        "model", unit, eval_points[-1], tuple(eval_points), prompts, num_samples, (1,), tuple(arms), "a machine"
    )
