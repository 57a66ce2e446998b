"""A comparison read from its folder: `compare.json`, and the metrics of the run directories that it names.

In: the folder of `brorl compare`. Out: a `Comparison`. A run that is not complete, or whose held-out prompts or number
of samples are not those of the others, is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brorl.comparison.arms import Arm, Comparison, HeldOutPrompt, Score, Trajectory, labelled
from brorl.cost import Budget, Cost, cost_of_step
from brorl.errors import UserError
from brorl.runs.run_directory import Record, RunDirectory
from brorl.runs.run_record import SPEC_FILE


def read_comparison(folder: Path) -> Comparison:
    """Read a comparison.

    Args:
        folder: Where `brorl compare` wrote it.

    Raises:
        UserError: If a run is not complete, or runs were not evaluated alike.
    """
    spec = read_spec(folder)
    budget = Budget(spec["unit"], spec["budget"], tuple(spec["marks"]))
    arms, alike = [], _Alike()
    labels = labelled([arm["name"] for arm in spec["arms"]])  # an earlier version wrote long names
    for (name, title), arm in zip(labels, spec["arms"], strict=True):
        runs = [read_trajectory(Path(folder / run["path"]), run["seed"], budget, alike) for run in arm["runs"]]
        complete = tuple(run for run in runs if run is not None)
        if len(complete) < len(runs):
            raise UserError(
                f"{folder}: {len(complete)} of {len(runs)} runs of {arm['name']} are complete; go on with: brorl "
                f"compare {folder}"
            )
        title = title or arm.get("title", "")
        arms.append(Arm(name, title, arm["num_rollouts"], arm["prompts_per_step"], arm["differs"], complete))
    prompts, num_samples, ks = alike.seen
    return Comparison(
        spec["checkpoint"], budget.unit, budget.limit, budget.marks, prompts, num_samples, ks, tuple(arms),
        spec["machine"],
    )  # fmt: skip


def read_spec(folder: Path) -> dict[str, Any]:
    """Read what a comparison was asked to do.

    Raises:
        UserError: If the folder is none of a comparison.
    """
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


class _Alike:
    """Held-out prompts, samples and ks of the runs read so far, which must be the same."""

    def __init__(self) -> None:
        self._of: str | None = None

    def check(self, path: Path, prompts: tuple[HeldOutPrompt, ...], num_samples: int, ks: tuple[int, ...]) -> None:
        if self._of is None:
            self._of, self.seen = str(path), (prompts, num_samples, ks)
            return
        for what, ours, theirs in zip(
            ("held-out prompts", "samples per prompt", "pass@k"), self.seen, (prompts, num_samples, ks), strict=True
        ):
            if ours != theirs:
                raise UserError(
                    f"{path} was evaluated with other {what} than {self._of}, so that they cannot be compared"
                )


def read_trajectory(path: Path, seed: int, budget: Budget, alike: _Alike | None = None) -> Trajectory | None:
    """Read one run; None if it has not come to its end.

    Args:
        path: The run directory.
        seed: Its seed.
        budget: What it had to spend.
        alike: What it must agree with; None for nothing.

    Raises:
        UserError: If the run does not tell how it did on each held-out prompt.
    """
    records = RunDirectory(path).read_metrics()
    cost, scores = Cost(), []
    ended = records[-1].get("ended") if records else None
    for record in records:
        cost += cost_of_step(record)
        if "evaluation" in record:
            scores.append(_score(path, cost, record["evaluation"]))
    if not scores or (ended is None and not budget.is_spent(cost)):
        return None
    last = next(r["evaluation"] for r in reversed(records) if "evaluation" in r)
    prompts = tuple(HeldOutPrompt(**prompt) for prompt in RunDirectory(path).read_held_out())
    if alike is not None:
        alike.check(path, prompts, last["num_samples"], tuple(sorted(int(k) for k in last["pass_at"])))
    steps = [r for r in records if "sampling" in r]
    return Trajectory(
        seed=seed,
        scores=tuple(scores),
        cost=cost,
        phase_seconds=_phase_seconds(steps),
        groups=sum(r["sampling"]["groups"] for r in steps),
        groups_mixed=sum(r["sampling"]["groups_mixed"] for r in steps),
        num_updated=sum(r["kept"]["groups"] for r in steps),
        ended_early=ended,
        path=str(path),
    )


def _score(path: Path, cost: Cost, evaluation: Mapping[str, Any]) -> Score:
    if "prompts" not in evaluation:
        raise UserError(f"{path} was made by an earlier version, which kept no results by prompt; train it again")
    prompts = evaluation["prompts"]
    return Score(
        cost,
        np.array(prompts["num_correct"], np.int64),
        np.array(prompts["sampled_tokens"], np.int64),
        evaluation["truncated_share"],
    )


def _phase_seconds(steps: Sequence[Record]) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for record in steps:
        seconds.update({name: value for name, value in record["seconds"].items() if name != "total"})
    return dict(seconds)
