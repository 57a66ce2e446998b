"""A comparison read from its folder: `compare.json`, and the metrics of the run directories that it names.

A run that is not complete is an error, and so are runs whose held-out prompts, samples per prompt or pass@k differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from brorl.arrays import IntArray
from brorl.comparison.arms import Arm, Comparison, HeldOutPrompt, RunScores, Score
from brorl.cost import Budget, Cost, cost_of_step
from brorl.errors import UserError
from brorl.runs.run_directory import RunDirectory
from brorl.runs.run_record import SPEC_FILE

Setup = tuple[tuple[HeldOutPrompt, ...], int, tuple[int, ...]]  # of the evaluations of a run:
_SETUP = ("held-out prompts", "samples per prompt", "pass@k")


def read_comparison(folder: Path) -> Comparison:
    """Read a comparison."""
    spec = read_spec(folder)
    budget = Budget(spec["unit"], spec["budget"], tuple(spec["marks"]))
    arms: list[Arm] = []
    first: tuple[str, Setup] | None = None
    for arm in spec["arms"]:
        runs = []
        for run in arm["runs"]:
            if (read := read_run(folder / run["path"], run["seed"], budget)) is not None:
                scores, setup = read
                runs.append(scores)
                first = first or (scores.path, setup)
                other = next((n for n, a, b in zip(_SETUP, first[1], setup, strict=True) if a != b), None)
                if other is not None:
                    raise UserError(
                        f"{scores.path} was evaluated with other {other} than {first[0]}, so they cannot be compared"
                    )
        if len(runs) < len(arm["runs"]):
            raise UserError(
                f"{folder}: {len(runs)} of {len(arm['runs'])} runs of {arm['name']} are complete; continue with: brorl "
                f"compare {folder}"
            )
        settings = arm["num_rollouts"], arm["prompts_per_step"], arm["differs"]
        arms.append(Arm(arm["name"], arm["title"], *settings, tuple(runs)))
    if first is None:
        raise UserError(f"{folder / SPEC_FILE} has no runs; start a new comparison in another folder")
    whole = Comparison(
        spec["checkpoint"], budget.unit, budget.limit, budget.eval_points, *first[1], tuple(arms), spec["machine"],
        notes=tuple(spec.get("notes", ())),
    )  # fmt: skip
    return _without_unverified(whole)


def _without_unverified(whole: Comparison) -> Comparison:
    """Return a comparison without the prompts that have unverified responses in any evaluation of any run.

    All arms then have the same prompts and the same number of responses to each, as every paired difference needs.
    """
    kept = verified_prompts([score for arm in whole.arms for run in arm.runs for score in run.scores])
    if kept.size == len(whole.prompts):
        return whole

    def of_kept(score: Score) -> Score:
        kept_P, tokens_P = score.num_correct_P[kept], score.sampled_tokens_P[kept]
        return replace(score, num_correct_P=kept_P, sampled_tokens_P=tokens_P, num_unverified_P=None)

    arms = [
        replace(arm, runs=tuple(replace(run, scores=tuple(map(of_kept, run.scores))) for run in arm.runs))
        for arm in whole.arms
    ]
    prompts = tuple(whole.prompts[i] for i in kept.tolist())
    return replace(whole, arms=tuple(arms), prompts=prompts, num_left_out=len(whole.prompts) - kept.size)


def verified_prompts(scores: Sequence[Score]) -> IntArray:
    """Return the indices of the prompts whose responses were all verified in all evaluations.

    Raises:
        UserError: If there is none.
    """
    lost_P = np.zeros(scores[0].num_correct_P.size, np.bool_)
    for score in scores:
        if score.num_unverified_P is not None:
            lost_P |= score.num_unverified_P > 0
    if lost_P.all():
        raise UserError(
            "for each held-out prompt some responses could not be verified in some evaluation, so nothing can be "
            "compared; train the runs again on a machine with more free memory"
        )
    return np.flatnonzero(~lost_P)


def read_spec(folder: Path) -> dict[str, Any]:
    """Read the arms, budget and seeds of a comparison."""
    file = folder / SPEC_FILE
    if not file.is_file():
        raise UserError(f"{folder} is not a comparison (no {SPEC_FILE}); give the folder that `brorl compare` made")
    try:
        spec: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UserError(
            f"{file} is damaged ({error}); restore it, or start a new comparison in another folder"
        ) from error
    return spec


def read_run(path: Path, seed: int, budget: Budget) -> tuple[RunScores, Setup] | None:
    """Read the run of a seed, and what it was evaluated on; None if it has not spent the budget.

    Raises:
        UserError: If the metrics hold no results by prompt, or the held-out prompts are missing.
    """
    records = RunDirectory(path).read_metrics()
    cost, scores, begins = Cost(), [], dict[str, Cost]()
    ended = records[-1].get("ended") if records else None
    for record in records:
        if (begin := record.get("objective", {}).get("begins")) and record["objective"]["phase"] > 1:
            begins[begin] = cost
        cost += cost_of_step(record)
        if "evaluation" in record:
            scores.append(_score(cost, record["evaluation"]))
    if not scores or (ended is None and not budget.is_spent(cost)):
        return None
    if "evaluation" not in records[0] or (ended is None and not budget.is_spent(scores[-1].cost)):
        raise UserError(
            f"in {path} the evaluation at the start or at the budget has no score, because its responses could not be "
            f"verified (an infrastructure failure); delete {path} and rerun the command"
        )
    last = next(r["evaluation"] for r in reversed(records) if "evaluation" in r)
    prompts = tuple(HeldOutPrompt(**prompt) for prompt in RunDirectory(path).read_held_out())
    setup = prompts, last["num_samples"], tuple(sorted(int(k) for k in last["pass_at"]))
    steps = [r for r in records if "sampling" in r]
    phase_seconds: Counter[str] = Counter()
    for record in steps:
        phase_seconds.update({name: value for name, value in record["seconds"].items() if name != "total"})
    run = RunScores(
        seed=seed,
        scores=tuple(scores),
        cost=cost,
        phase_seconds=dict(phase_seconds),
        groups=sum(r["sampling"]["groups"] for r in steps),
        groups_mixed=sum(r["sampling"]["groups_mixed"] for r in steps),
        ended_early=ended,
        path=str(path),
        phase_begins=begins,
    )
    return run, setup


def _score(cost: Cost, evaluation: Mapping[str, Any]) -> Score:
    correct, tokens = (np.array(evaluation["prompts"][name], np.int64) for name in ("num_correct", "sampled_tokens"))
    lost = evaluation["prompts"].get("num_unverified")
    return Score(cost, correct, tokens, evaluation["truncation_rate"], None if lost is None else np.array(lost))
