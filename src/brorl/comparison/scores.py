"""The scores and costs of a comparison's arms, and of their runs with several seeds, as read from its folder.

A run that ended early keeps its last score; any other run without a score at an evaluation point is an error.
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
    # responses to each prompt that could not be verified, shape [P]; None if all were verified
    num_unverified_P: IntArray | None = None


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run of an arm that has spent its budget, or ended early."""

    seed: int
    scores: tuple[RunEvaluation, ...]  # its evaluations by rising cost; the first is the start, at no cost
    cost: Cost  # cost of the whole run
    stage_seconds: Mapping[str, float]  # seconds of the run in each stage (generation, verification, training, ...)
    groups: int  # sampled groups
    groups_mixed: int  # sampled groups that were mixed
    end_reason: str | None  # the reason if the run ended before its budget was spent; else None
    path: str
    # Title of each later phase of the objective -> cost at which the phase began.
    phase_begins: Mapping[str, Cost] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of a comparison, with its runs."""

    name: str  # short name
    title: str  # full name if the short name is a letter; else empty
    num_rollouts: int  # N
    prompts_per_step: int  # groups that a step trains on
    differs: Mapping[str, str]  # settings in which the arms differ, with this arm's values as text
    runs: tuple[FinishedRun, ...]  # in the order of their seeds

    def phase_begins(self, unit: Unit) -> dict[str, float]:
        """Return title of each later phase -> mean cost at which the runs began the phase."""
        titles = dict.fromkeys(title for run in self.runs for title in run.phase_begins)
        begins = {t: [r.phase_begins[t].of(unit) for r in self.runs if t in r.phase_begins] for t in titles}
        return {title: sum(costs) / len(costs) for title, costs in begins.items()}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Arms that start from one checkpoint."""

    checkpoint: str  # all runs start from this model
    unit: Unit  # unit of the budget
    budget: float  # per run
    eval_points: tuple[float, ...]  # all runs were evaluated at these amounts, rising; the last is the budget
    prompts: tuple[str, ...]  # ids of the held-out prompts, P of them
    sources: tuple[str, ...]  # the dataset of each prompt, P of them
    num_samples: int  # n, responses per prompt in each evaluation
    ks: tuple[int, ...]  # the k of the reported pass@k, rising, each at most n
    arms: tuple[Arm, ...]  # if there are two, the second is measured against the first
    machine: str  # processor or accelerator, and how many runs were made in parallel
    # Number of held-out prompts not in `prompts`, because an infrastructure failure left responses unverified.
    num_left_out: int = 0
    notes: tuple[str, ...] = ()  # sentences about choices and changes of the arms and the budget

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
    """Return a run's first evaluation after it had spent an amount of a unit (0: the start).

    Raises:
        ValueError: If the run was not evaluated there and did not end early.
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
    """Return the number of correct responses to each prompt after `spent` of the budget, shape [S, P], by seed."""
    runs = sorted(arm.runs, key=lambda run: run.seed)
    if not runs:
        raise ValueError(f"arm {arm.name} has no run to compare")
    return np.stack([score_at(run, comparison.unit, spent).num_correct_P for run in runs])


def scores_at(comparison: Comparison, arm: Arm, spent: float, k: int = 1) -> FloatArray:
    """Return an arm's pass@k on each prompt after `spent` of the budget, shape [S, P], by seed."""
    return np.stack([pass_at_k(row_P, comparison.num_samples, k) for row_P in num_correct_at(comparison, arm, spent)])


def start_scores(comparison: Comparison, k: int = 1) -> FloatArray:
    """Return the checkpoint's pass@k as measured with each seed, shape [seeds of all arms, P]."""
    return np.stack([
        np.mean([pass_at_k(score.num_correct_P, comparison.num_samples, k) for score in seed_starts], axis=0)
        for seed_starts in starts_by_seed(comparison.arms)
    ])  # fmt: skip


def starts_by_seed(arms: Sequence[Arm]) -> list[list[RunEvaluation]]:
    """Return the runs' first evaluations, of the checkpoint, grouped by seed.

    In all arms, runs of one seed repeat the same evaluation: same model, prompts and random numbers.
    """
    starts: dict[int, list[RunEvaluation]] = {}
    for arm in arms:
        for run in arm.runs:
            starts.setdefault(run.seed, []).append(score_at(run, "steps", 0))
    return [starts[seed] for seed in sorted(starts)]


def have_same_seeds(a: Arm, b: Arm) -> bool:
    """Return whether two arms have runs with the same seeds, each once, so that the runs are paired."""
    seeds_a, seeds_b = ([run.seed for run in arm.runs] for arm in (a, b))
    return sorted(seeds_a) == sorted(seeds_b) and len(set(seeds_a)) == len(seeds_a)


# How a run was evaluated: the content of `held_out.json`, n and the k. SETUP names these.
Setup = tuple[list[dict[str, str]], int, tuple[int, ...]]
SETUP = ("held-out prompts", "samples per prompt", "pass@k")


def without_unverified(comparison: Comparison) -> Comparison:
    """Return a comparison without the prompts that have unverified responses in any evaluation of any run.

    All arms then have the same prompts and the same number of responses to each, as paired differences require.
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
            "every held-out prompt has responses that could not be verified in some evaluation, so nothing can be "
            "compared; train the runs again on a machine with more free memory"
        )
    return np.flatnonzero(~lost_P)


def read_scores(path: Path, seed: int, budget: Budget) -> tuple[FinishedRun, Setup] | None:
    """Read the scores of a run and how it was evaluated; return None if it has not spent the budget.

    Raises:
        UserError: If the metrics contain no results by prompt, or the held-out prompts are missing.
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
    """Return the seconds of each stage, over all records."""
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
    """A run of an arm, started or not."""

    arm: str
    seed: int
    recipe: Path  # YAML file with all settings of the run
    directory: Path
    budget: Budget
    resume_with: tuple[str, ...] = ()  # options of the command that resumes the run


@dataclass
class RunProgress:
    """The progress of a run, read from its metrics as they grow."""

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
        """Fraction of the budget that is spent, at most 1."""
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
            if now.st_ino != self._file or now.st_size < self._offset:  # a resumed run begins with a new, shorter file
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
