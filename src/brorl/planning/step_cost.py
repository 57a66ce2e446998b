"""Predict the seconds per training step for any number of rollouts and prompts, from a few measured steps.

The seconds are a fixed cost plus a cost per unit of work, with coefficients >= 0. Far beyond the measured sizes, the
prediction is a guess. The run's model does not change, because the measured steps train a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy.optimize import nnls
from transformers import PreTrainedModel

from brorl.activity import Observe, Stage, Stopwatch
from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.groups import Group, main_failure
from brorl.algorithms.settings import AdvantageSettings
from brorl.arrays import FloatArray
from brorl.errors import UnverifiedResponsesError
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.runs.run_directory import RunDirectory
from brorl.training.collector import KEPT_DECAY, num_prompts_for_round
from brorl.training.diagnostics import coverage_record
from brorl.training.local_parts import LocalParts

_FEATURES = {  # stage -> fields of `Work` that its seconds are affine in; None is a constant
    "generation": ("rounds", "unique_tokens", "sampled_tokens"),
    "verification": ("rounds", "responses"),
    "training": ("updates", "trained_nodes", "trained_groups"),
    "storing": (None, "responses"),
    "diagnostics": (None, "unique_tokens"),
}
_CHAINS, _STEPS, _WARM_UP, _MAX_ROUNDS = 64, 24, 4, 2000  # sizes of the simulation of dynamic sampling
_REPEATS = 3  # timings per step


@dataclass(frozen=True)
class Work:
    """The work of one call to each stage."""

    groups: float  # groups to sample, verify and store
    unique_tokens: float  # tree nodes of these groups
    sampled_tokens: float  # tokens of these groups, including duplicates
    responses: float  # distinct responses of these groups
    trained_groups: float  # groups to train on
    trained_nodes: float  # tree nodes in the loss
    updates: float  # mini-batches
    rounds: float = 1.0  # engine calls

    @classmethod
    def of_step(cls, num_prompts: float, kept_fraction: float, *, nodes: float, tokens: float, responses: float,
                trained: float, updates: float, rounds: float) -> Work:  # fmt: skip
        """Return the work of a step that trains on `num_prompts` groups. The keyword arguments are means per group."""
        groups = num_prompts / kept_fraction
        counts = (groups, groups * nodes, groups * tokens, groups * responses)
        return cls(*counts, num_prompts, num_prompts * trained, updates, rounds)

    def features(self, stage: str) -> tuple[float, ...]:
        """Return the F numbers that a stage's seconds are affine in."""
        return tuple(getattr(self, name) if name else 1.0 for name in _FEATURES[stage])


def fit_affine(feature_KF: FloatArray, cost_K: FloatArray) -> tuple[float, ...]:
    """Fit coefficients >= 0 of F features to K positive costs, minimizing the sum of squared relative errors."""
    if not (cost_K > 0).all():
        raise ValueError(f"measured costs must be positive, got {cost_K.min()}")
    relative_KF = feature_KF / cost_K[:, None]
    scale_F = np.maximum(relative_KF.max(0), np.finfo(np.float64).tiny)
    coefficient_F, _ = nnls(relative_KF / scale_F, np.ones(cost_K.size))
    return tuple((coefficient_F / scale_F).tolist())


@dataclass(frozen=True)
class StepTiming:
    """An amount of work and the time it took."""

    num_rollouts: int
    work: Work
    seconds: dict[str, float]  # stage -> median seconds over the repeats


@dataclass(frozen=True)
class StepCost:
    """Seconds per step, by stage."""

    costs: dict[str, tuple[float, ...]]  # timed stage -> coefficients of its features
    per_step: dict[str, float]  # stage -> runs per step: 1 / k for a stage that runs every k-th step
    worst_error: float  # largest relative error of a timing's total

    @classmethod
    def fit(cls, timings: Sequence[StepTiming], per_step: dict[str, float]) -> StepCost:
        """Fit each stage to the timings, which must all have the same stages."""
        costs = {}
        for stage in per_step:
            features = np.array([t.work.features(stage) for t in timings], np.float64)
            costs[stage] = fit_affine(features, np.array([t.seconds[stage] for t in timings]))
        once = cls(costs, dict.fromkeys(per_step, 1.0), 0.0)  # a timing runs every stage once
        errors = []
        for timing in timings:
            measured = sum(timing.seconds[stage] for stage in per_step)
            errors.append(abs(once.seconds(timing.work)["total"] / measured - 1))
        return cls(costs, per_step, max(errors))

    def seconds(self, work: Work) -> dict[str, float]:
        """Return the seconds of each stage of a step and their total."""
        seconds = {
            stage: sum(c * f for c, f in zip(cost, work.features(stage), strict=True)) * self.per_step[stage]
            for stage, cost in self.costs.items()
        }
        return {**seconds, "total": sum(seconds.values())}


@lru_cache(maxsize=4096)
def mean_rounds(kept_fraction: float, num_prompts: int) -> float:
    """Simulate dynamic sampling with refill, and return the mean number of engine calls per step.

    Surplus groups carry over to the next step. A step samples num_prompts / kept_fraction groups on average;
    `kept_fraction` is in (0, 1].
    """
    if not 0 < kept_fraction <= 1:
        raise ValueError(f"the fraction of kept groups must be in (0, 1], got {kept_fraction}")
    generator = np.random.default_rng(0)
    carried_C = np.zeros(_CHAINS, np.int64)
    seen_C, sampled_C = np.zeros(_CHAINS), np.zeros(_CHAINS)
    rounds = 0
    for step in range(_WARM_UP + _STEPS):
        kept_C, sampled_C, seen_C = carried_C, KEPT_DECAY * sampled_C, KEPT_DECAY * seen_C
        for _ in range(_MAX_ROUNDS):
            missing_C = np.maximum(num_prompts - kept_C, 0)
            if not missing_C.any():
                break
            size_C = np.where(missing_C, num_prompts_for_round(num_prompts, missing_C, seen_C, sampled_C), 0)
            new_C = generator.binomial(size_C, kept_fraction)
            kept_C, sampled_C, seen_C = kept_C + new_C, sampled_C + size_C, seen_C + new_C
            rounds += int(np.count_nonzero(missing_C)) if step >= _WARM_UP else 0
        carried_C = np.maximum(kept_C - num_prompts, 0)
    return rounds / (_CHAINS * _STEPS)


@dataclass(frozen=True)
class SampledGroups:
    """The groups sampled in one engine call, with the time of each stage."""

    groups: list[Group]  # without groups that have unverified rollouts: a plan compares groups of equal size
    num_incomplete: int  # number of prompts dropped
    clock: Stopwatch  # the time of each stage


def sample_groups(parts: LocalParts, prompts: Sequence[Prompt], num_rollouts: int, seed: int) -> SampledGroups:
    """Sample and grade N rollouts of each prompt as a step does, with the given sampling seed.

    Raises:
        UnverifiedResponsesError: If every prompt has unverified rollouts.
    """
    clock = Stopwatch(now=parts.config.engine.now)
    with clock("generation"):
        token_ids = [prompt.token_ids for prompt in prompts]
        trees = parts.engine.sample(SampleTask(token_ids, num_rollouts, parts.config.sampling.params, seed))
    with clock("verification"):
        groups = parts.grader.verify(prompts, trees)
    complete = [parts.grader.rewarded(group, step=1) for group in groups if not group.num_unverified]
    if not complete:
        raise UnverifiedResponsesError(
            f"each of the call's {len(prompts)} prompts has rollouts that could not be verified (most often: "
            f"{main_failure(groups)}); free up memory or stop other processes, then rerun the command"
        )
    return SampledGroups(complete, len(prompts) - len(complete), clock)


def timing_sizes(
    num_prompts: int, num_rollouts: int, prompts_per_step: int, max_rollouts: int, quick: bool
) -> list[tuple[int, int]]:
    """Choose the (rollouts per prompt, prompts) of the steps to time in addition to the pilot.

    No timed step has more rollouts than the pilot. If `quick`, it has at most a quarter of them.
    """
    maximum = num_prompts * num_rollouts // (1 if quick else 4)
    low = min(16, num_rollouts)
    sizes = [(low, max(1, prompts_per_step // 4)), (low, prompts_per_step)]
    sizes += [(min(factor * num_rollouts, max_rollouts, maximum), prompts_per_step) for factor in (4, 8)]
    return sorted({(n, max(1, min(p, maximum // n, num_prompts))) for n, p in sizes})


class StepTimer:
    """Runs and times the stages of a step. Trains `model`, the run's or a copy, and stores rollouts in `scratch`."""

    def __init__(self, parts: LocalParts, model: PreTrainedModel, scratch: Path) -> None:
        self._parts = parts
        self._directory = RunDirectory(scratch)
        self.learner = parts.learner(model)
        self.per_step = {"generation": 1.0, "verification": 1.0, "training": 1.0, "diagnostics": 1.0}
        if parts.config.store_rollouts_every:
            self.per_step["storing"] = 1 / parts.config.store_rollouts_every

    def time(self, prompts: Sequence[Prompt], num_rollouts: int, seed: int) -> StepTiming:
        """Run and time a step."""
        return self.finish(sample_groups(self._parts, prompts, num_rollouts, seed))

    def finish(self, sampled: SampledGroups) -> StepTiming:
        """Run and time the stages after sampling and verification."""
        groups = sampled.groups
        clock = sampled.clock
        updates = self._parts.config.optimizer.mini_batches
        repeated = [groups[i % len(groups)] for i in range(max(updates, len(groups)))]  # a group for every mini-batch
        with clock("training"):
            # The time does not depend on the estimator; the default one supports every N.
            metrics = self.learner.learn(repeated, advantage_estimator(AdvantageSettings()), seed=0)
        if self._parts.config.store_rollouts_every:
            with clock("storing"):
                with_texts = [replace(group, texts=self._parts.grader.texts(group)) for group in groups]
                self._directory.write_responses("rollouts", 0, with_texts)
        with clock("diagnostics"):
            coverage_record(groups)
        work = Work(
            groups=len(groups),
            unique_tokens=sum(g.tree.num_unique_tokens for g in groups),
            sampled_tokens=sum(g.tree.num_sampled_tokens for g in groups),
            responses=sum(g.tree.num_responses for g in groups),
            trained_groups=len(repeated),
            trained_nodes=metrics.trained_nodes,
            updates=updates,
        )
        seconds = {stage: value for stage, value in clock.seconds().items() if stage != "total"}
        return StepTiming(groups[0].tree.num_rollouts, work, seconds)


def time_steps(
    timer: StepTimer,
    prompts: Sequence[Prompt],
    sizes: Sequence[tuple[int, int]],
    pilot: Sequence[SampledGroups],
    observe: Observe,
) -> list[StepTiming]:
    """Time a step of each size a few times, in turn. In between, time the other stages on the pilot's groups."""
    pilot_size = (pilot[0].groups[0].tree.num_rollouts, len(pilot[0].groups))
    timed: dict[tuple[int, int], list[StepTiming]] = {}
    for n, p in sizes:
        observe(Stage("warming up", f"a step of {p} prompts with {n} rollouts"))
        timer.time(prompts[:p], n, seed=1)
    for repeat in range(_REPEATS):
        for n, p in sizes:
            start = repeat * p % max(len(prompts) - p, 1)
            observe(Stage("timing", f"a step of {p} prompts with {n} rollouts ({repeat + 1} of {_REPEATS})"))
            timed.setdefault((n, p), []).append(timer.time(prompts[start : start + p], n, seed=repeat))
        if repeat < len(pilot):
            observe(Stage("timing", f"the other stages on the pilot's groups ({repeat + 1} of {_REPEATS})"))
            timed.setdefault(pilot_size, []).append(timer.finish(pilot[repeat]))
    timings = []
    for (num_rollouts, _), repeats in sorted(timed.items()):
        work = Work(*np.mean([astuple(t.work) for t in repeats], axis=0).tolist())
        seconds = {stage: float(np.median([t.seconds[stage] for t in repeats])) for stage in repeats[0].seconds}
        timings.append(StepTiming(num_rollouts, work, seconds))
    return timings
