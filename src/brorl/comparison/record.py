"""Everything that a comparison shows as one dictionary that JSON can hold.

In: a comparison. Out: what was compared, every run, every arm at every mark, differences, tests, tasks, coverage,
frontiers, and the verdict in words. Numbers without a value or without an end are null; keys are text.
"""

from __future__ import annotations

from typing import Any

from brorl.comparison.arms import Arm, Comparison, Trajectory
from brorl.comparison.findings import Findings, Pair, findings, start_scores
from brorl.comparison.matching import TOLERANCE
from brorl.comparison.paired import scores_at
from brorl.comparison.report import verdict
from brorl.comparison.tables import measure_name
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.storage import json_ready


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Return everything that a comparison shows.

    Raises:
        ValueError: If there are fewer than two arms, or runs that were not evaluated at a mark.
    """
    found, words = findings(comparison), verdict(comparison)
    record = {
        "verdict": words,
        "checkpoint": comparison.checkpoint,
        "machine": comparison.machine,
        "unit": comparison.unit,
        "budget": comparison.budget,
        "marks": comparison.marks,
        "tolerance": TOLERANCE,
        "matched": not found.mismatch,
        "mismatch": found.mismatch,
        "num_prompts": len(comparison.prompts),
        "num_samples": comparison.num_samples,
        "ks": found.ks,
        "start": {"pass_at": found.start, "efficiency": [e for e in found.efficiency if e.arm == "start"]},
        "arms": [_arm(found, arm, index) for index, arm in enumerate(comparison.arms)],
        "runs_at_budget": found.runs,
        "at_equal_cost": found.equal,
        "coverage_at_equal_pass_1": found.equal_score,
        "tasks": found.tasks,
        "pair": None if found.pair is None else _pair(found.pair),
        "against_first": found.against_first,
        "frontiers": {measure_name(line): line for line in found.frontiers},
        "prompts": _prompts(comparison),
    }
    plain: dict[str, Any] = json_ready(record)
    return plain


def _arm(found: Findings, arm: Arm, index: int) -> dict[str, Any]:
    return {
        "name": arm.name,
        "title": arm.title,
        "num_rollouts": arm.num_rollouts,
        "prompts_per_step": arm.prompts_per_step,
        "differs": arm.differs,
        "at_marks": found.arms[arm.name],
        "training": found.training[index],
        "efficiency": [e for e in found.efficiency[_num_tasks(found) :] if e.arm == arm.name],
        "coverage": found.coverage[index],
        "runs": [_run(run, found) for run in arm.trajectories],
    }


def _num_tasks(found: Findings) -> int:
    """Return how many of the efficiencies are the start's: they come first, and an arm may be called "start" too."""
    return len(found.efficiency) // (1 + len(found.comparison.arms))


def _run(run: Trajectory, found: Findings) -> dict[str, Any]:
    """Return a run with all its evaluations, those between the marks too."""
    num_samples = found.comparison.num_samples
    return {
        "seed": run.seed,
        "path": run.path,
        "ended_early": run.ended_early,
        "cost": run.cost,
        "phase_seconds": run.phase_seconds,
        "groups": run.groups,
        "groups_mixed": run.groups_mixed,
        "num_updated": run.num_updated,
        "evaluations": [
            {
                "cost": score.cost,
                "truncated_share": score.truncated_share,
                "tokens_per_response": score.sampled_tokens_P.mean() / num_samples,
                "pass_at": {k: pass_at_k(score.num_correct_P, num_samples, k).mean() for k in found.ks},
            }
            for score in run.scores
        ],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    """Return the differences of B less A, those in worst@k beside those in pass@k."""
    return {
        "differences": pair.differences,
        "by_mark": [{"mark": mark, "differences": by_k} for mark, by_k in pair.by_mark.items()],
        "worst": pair.worst,
        "worst_at": None if pair.worst_at is None else dict(zip(("start", "a", "b"), pair.worst_at, strict=True)),
        "tasks": pair.kinds,
        "coverage": pair.coverage,
        "seeds_ahead": pair.seeds_ahead,
    }


def _prompts(comparison: Comparison) -> list[dict[str, Any]]:
    """Return each prompt's pass@1 at the start and with each arm at the budget, averaged over runs."""
    arms = comparison.arms
    start_P = start_scores(comparison, "pass@1", 1).mean(0)
    end_AP = [scores_at(comparison, arm, comparison.marks[-1]).mean(0) for arm in arms]
    return [
        {
            "id": prompt.id,
            "source": prompt.source,
            "start": start_P[i],
            "arms": {arm.name: end_P[i] for arm, end_P in zip(arms, end_AP, strict=True)},
        }
        for i, prompt in enumerate(comparison.prompts)
    ]
