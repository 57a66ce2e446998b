"""The scores and costs of a comparison's arms and their runs, read from its folder.

A run that ended early keeps its last score. It is an error if any other run lacks a score at an evaluation point.
Dimensions: A arms, S seeds (runs of an arm), M evaluation points, P held-out prompts, n responses per prompt.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from brorl.arrays import FloatArray, IntArray
from brorl.cost import Budget, Cost, Unit, amount
from brorl.errors import UserError
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import EvaluationRecord, StepRecord, from_json


@dataclass(frozen=True, eq=False)
class RunEvaluation:
    """One evaluation of one run."""

    cost: Cost  # cost of the run up to the evaluation
    num_correct_P: IntArray  # correct responses among the n responses to each prompt, shape [P]
    sampled_tokens_P: IntArray  # tokens of the n responses to each prompt, shape [P]
    truncation_rate: float  # fraction of all responses that were truncated
    # unverified responses to each prompt, shape [P]; None if all were verified
    num_unverified_P: IntArray | None = None


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run that has spent its budget or ended early."""

    seed: int
    scores: tuple[RunEvaluation, ...]  # its evaluations in order of cost; the first is the start, at cost 0
    cost: Cost  # cost of the whole run
    stage_seconds: Mapping[str, float]  # the run's seconds in each stage (generation, verification, training, ...)
    groups: int  # sampled groups
    groups_mixed: int  # sampled groups that were mixed
    end_reason: str | None  # why the run ended before its budget was spent; None if it did not
    path: str
    # Title of each phase of the objective after the first -> cost at which it began.
    phase_begins: Mapping[str, Cost] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of a comparison, with its runs."""

    name: str  # short name
    title: str  # full name if the short name is a letter; else empty
    num_rollouts: int  # N
    prompts_per_step: int  # groups in a training step
    differs: Mapping[str, str]  # settings that differ between arms, with this arm's values as text
    runs: tuple[FinishedRun, ...]  # ordered by seed

    def phase_begins(self, unit: Unit) -> dict[str, float]:
        """Return title -> mean cost at which the runs began the phase, for each phase after the first."""
        titles = dict.fromkeys(title for run in self.runs for title in run.phase_begins)
        begins = {t: [r.phase_begins[t].of(unit) for r in self.runs if t in r.phase_begins] for t in titles}
        return {title: sum(costs) / len(costs) for title, costs in begins.items()}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Arms that start from the same checkpoint."""

    checkpoint: str  # the model that all runs start from
    unit: Unit  # unit of the budget
    budget: float  # per run
    eval_points: tuple[float, ...]  # amounts at which all runs were evaluated, ascending; the last is the budget
    prompts: tuple[str, ...]  # ids of the held-out prompts, P of them
    sources: tuple[str, ...]  # the dataset of each prompt, P of them
    num_samples: int  # n, responses per prompt in each evaluation
    ks: tuple[int, ...]  # the k of the reported pass@k, ascending, each at most n
    arms: tuple[Arm, ...]  # if there are two, the second is measured against the first
    machine: str  # processor or accelerator, and the number of parallel runs
    # Number of held-out prompts excluded from `prompts` because infrastructure failures left responses unverified.
    num_left_out: int = 0
    notes: tuple[str, ...] = ()  # sentences on how the arms and the budget were chosen or changed

    @property
    def ordered_by_rollouts(self) -> bool:
        """Whether every arm has a different N."""
        return len({arm.num_rollouts for arm in self.arms}) == len(self.arms)

    def source_names(self) -> list[str]:
        """Return the distinct sources, sorted."""
        return sorted(set(self.sources))

    def prompts_of(self, source: str) -> IntArray:
        """Return the indices of a source's prompts."""
        return np.array([i for i, prompt_source in enumerate(self.sources) if prompt_source == source])


def score_at(run: FinishedRun, unit: Unit, spent: float) -> RunEvaluation:
    """Return the first evaluation of a run after it spent the given amount of a unit (0: the start).

    Raises:
        ValueError: If there is no such evaluation and the run did not end early.
    """
    if not run.scores:
        raise ValueError(f"the run in {run.path} has no evaluation; compare runs that were evaluated")
    for score in run.scores:
        if score.cost.of(unit) >= spent:
            return score
    last = run.scores[-1]
    if run.end_reason is None:
        raise ValueError(
            f"the run in {run.path} (seed {run.seed}) has no evaluation at {amount(spent, unit)} or later: the last is "
            f"at {amount(last.cost.of(unit), unit)}; finish the run, or compare at a smaller budget"
        )
    return last


def num_correct_at(comparison: Comparison, arm: Arm, spent: float) -> IntArray:
    """Return the correct responses to each prompt once `spent` of the budget is used, shape [S, P], by seed."""
    runs = sorted(arm.runs, key=lambda run: run.seed)
    if not runs:
        raise ValueError(f"arm {arm.name} has no run to compare")
    return np.stack([score_at(run, comparison.unit, spent).num_correct_P for run in runs])


def scores_at(comparison: Comparison, arm: Arm, spent: float, k: int = 1) -> FloatArray:
    """Return an arm's pass@k on each prompt once `spent` of the budget is used, shape [S, P], by seed."""
    return np.stack([pass_at_k(row_P, comparison.num_samples, k) for row_P in num_correct_at(comparison, arm, spent)])


def start_scores(comparison: Comparison, k: int = 1) -> FloatArray:
    """Return the checkpoint's pass@k as measured with each seed, shape [seeds of all arms, P]."""
    return np.stack([
        np.mean([pass_at_k(score.num_correct_P, comparison.num_samples, k) for score in seed_starts], axis=0)
        for seed_starts in starts_by_seed(comparison.arms)
    ])  # fmt: skip


def starts_by_seed(arms: Sequence[Arm]) -> list[list[RunEvaluation]]:
    """Return the runs' first evaluations, which are of the checkpoint, grouped by seed.

    Across arms, runs with the same seed repeat the same evaluation: same model, prompts and random numbers.
    """
    starts: dict[int, list[RunEvaluation]] = {}
    for arm in arms:
        for run in arm.runs:
            starts.setdefault(run.seed, []).append(score_at(run, "steps", 0))
    return [starts[seed] for seed in sorted(starts)]


def have_same_seeds(a: Arm, b: Arm) -> bool:
    """Return whether two arms have the same seeds, each once, so their runs can be paired."""
    seeds_a, seeds_b = ([run.seed for run in arm.runs] for arm in (a, b))
    return sorted(seeds_a) == sorted(seeds_b) and len(set(seeds_a)) == len(seeds_a)


# How a run was evaluated: the content of `held_out.json`, n, and the values of k. SETUP names these.
Setup = tuple[list[dict[str, str]], int, tuple[int, ...]]
SETUP = ("held-out prompts", "samples per prompt", "pass@k")


def without_unverified(comparison: Comparison) -> Comparison:
    """Return a comparison without the prompts that have unverified responses in any evaluation of any run.

    All arms then have the same prompts with the same number of responses each, as paired differences require.
    """
    kept = verified_prompts([score for arm in comparison.arms for run in arm.runs for score in run.scores])
    num_left_out = len(comparison.prompts) - kept.size
    if not num_left_out:
        return comparison

    def kept_prompts(score: RunEvaluation) -> RunEvaluation:
        kept_P, tokens_P = score.num_correct_P[kept], score.sampled_tokens_P[kept]
        return replace(score, num_correct_P=kept_P, sampled_tokens_P=tokens_P, num_unverified_P=None)

    arms = [
        replace(arm, runs=tuple(replace(run, scores=tuple(map(kept_prompts, run.scores))) for run in arm.runs))
        for arm in comparison.arms
    ]
    prompts, sources = (tuple(names[i] for i in kept.tolist()) for names in (comparison.prompts, comparison.sources))
    return replace(comparison, arms=tuple(arms), prompts=prompts, sources=sources, num_left_out=num_left_out)


def verified_prompts(scores: Sequence[RunEvaluation]) -> IntArray:
    """Return the indices of prompts whose responses were all verified in every evaluation.

    Raises:
        UserError: If there are none.
    """
    lost_P = np.zeros(scores[0].num_correct_P.size, np.bool_)
    for score in scores:
        if score.num_unverified_P is not None:
            lost_P |= score.num_unverified_P > 0
    if lost_P.all():
        raise UserError(
            "every held-out prompt has responses that could not be verified in some evaluation, so nothing can be "
            "compared; train the runs again on a machine with more free memory"
        )
    return np.flatnonzero(~lost_P)


def read_scores(path: Path, seed: int, budget: Budget) -> tuple[FinishedRun, Setup] | None:
    """Read a run's scores and how it was evaluated; return None if it has not spent the budget.

    Raises:
        UserError: If the metrics contain no per-prompt results, or the held-out prompts are missing.
    """
    records = RunDirectory(path).read_metrics()
    end_reason = records[-1].end_reason if records else None
    cost = Cost()
    scores: list[RunEvaluation] = []
    phase_begins: dict[str, Cost] = {}
    for record in records:
        if record.objective and record.objective.begins and record.objective.phase > 1:
            phase_begins[record.objective.begins] = cost
        cost += record.cost
        if record.evaluation:
            scores.append(_score(cost, record.evaluation))
    if not scores or (end_reason is None and not budget.is_spent(cost)):
        return None
    if records[0].evaluation is None or (end_reason is None and not budget.is_spent(scores[-1].cost)):
        raise UserError(
            f"in {path} the evaluation at the start or at the budget has no score, because its responses could not be "
            f"verified (an infrastructure failure); delete {path} and rerun the command"
        )
    last = next(record.evaluation for record in reversed(records) if record.evaluation)
    setup = RunDirectory(path).read_held_out(), last.num_samples, tuple(sorted(last.pass_at))
    sampled = [record.sampling for record in records if record.sampling]
    run = FinishedRun(
        seed=seed,
        scores=tuple(scores),
        cost=cost,
        stage_seconds=_stage_seconds(records),
        groups=sum(step.groups for step in sampled),
        groups_mixed=sum(step.groups_mixed for step in sampled),
        end_reason=end_reason,
        path=str(path),
        phase_begins=phase_begins,
    )
    return run, setup


def _stage_seconds(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return the total seconds of each stage over all records."""
    stage_seconds: Counter[str] = Counter()
    for record in records:
        seconds = asdict(record.seconds) if record.seconds else {}
        stage_seconds.update({name: value for name, value in seconds.items() if value is not None and name != "total"})
    return dict(stage_seconds)


def _score(cost: Cost, evaluation: EvaluationRecord) -> RunEvaluation:
    prompts = evaluation.prompts
    return RunEvaluation(
        cost=cost,
        num_correct_P=np.array(prompts.num_correct, np.int64),
        sampled_tokens_P=np.array(prompts.sampled_tokens, np.int64),
        truncation_rate=evaluation.truncation_rate,
        num_unverified_P=None if prompts.num_unverified is None else np.array(prompts.num_unverified),
    )


@dataclass(frozen=True)
class PlannedRun:
    """A run of an arm, whether or not it has started."""

    arm: str
    seed: int
    recipe: Path  # YAML file with all the run's settings
    directory: Path
    budget: Budget
    resume_with: tuple[str, ...] = ()  # options for the command that resumes the run


@dataclass
class RunProgress:
    """A run's progress, read from its metrics file while the run writes it."""

    run: PlannedRun
    spent: Cost = field(default_factory=Cost)
    score: dict[int, float] = field(default_factory=dict)  # k -> pass@k at the last evaluation
    first: dict[int, float] = field(default_factory=dict)  # k -> pass@k at the first evaluation
    ended: bool = False
    ended_early: bool = False  # whether the run ended before its budget was spent
    steps: list[Cost] = field(default_factory=list)
    _offset: int = 0
    _file: int = 0

    @property
    def fraction(self) -> float:
        """Fraction of the budget spent, at most 1."""
        budget = self.run.budget
        return 1.0 if self.ended else min(self.spent.of(budget.unit) / budget.limit, 1.0)

    def costs_of_steps(self, unit: Unit) -> list[float]:
        """Return the cost of each step in a unit."""
        return [cost.of(unit) for cost in self.steps]

    def update(self) -> None:
        """Read the new metrics records."""
        metrics = self.run.directory / "metrics.jsonl"
        if not metrics.is_file():
            return
        with metrics.open("rb") as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._file or now.st_size < self._offset:  # a resumed run starts a new, shorter file
                self._offset, self._file = 0, now.st_ino
                self.spent, self.score, self.first, self.steps = Cost(), {}, {}, []
                self.ended = self.ended_early = False
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._take(from_json(json.loads(line)))

    def _take(self, record: StepRecord) -> None:
        cost = record.cost
        self.spent += cost
        if cost.samples:
            self.steps.append(cost)
        if record.evaluation:
            self.score = {k: estimate.value for k, estimate in record.evaluation.pass_at.items()}
            self.first = self.first or self.score
        self.ended_early = record.end_reason is not None
        self.ended = self.ended_early or self.run.budget.is_spent(self.spent)


def progress_of(run: PlannedRun) -> RunProgress:
    """Read the progress of a run."""
    progress = RunProgress(run)
    progress.update()
    return progress
