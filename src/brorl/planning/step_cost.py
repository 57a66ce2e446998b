"""Seconds of a training step at any number of rollouts and prompts, from a few measured steps.

They are affine with nonnegative coefficients: a fixed cost, and a cost per unit of work. The model interpolates; far
beyond the measured sizes it is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import nnls

from brorl.arrays import FloatArray
from brorl.training.collect import MEMORY, prompts_of_round

_FEATURES = {  # what the seconds of each phase are affine in; None is a constant
    "generation": ("rounds", "unique_tokens", "sampled_tokens"),
    "verification": ("rounds", "responses"),
    "training": ("updates", "trained_nodes", "trained_groups"),
    "storing": (None, "responses"),
    "diagnostics": (None, "unique_tokens"),
}
_CHAINS, _STEPS, _WARM_UP, _MAX_ROUNDS = 64, 24, 4, 2000


@dataclass(frozen=True)
class Work:
    """Amounts of work in one call of every phase."""

    groups: float  # groups to sample, verify and store
    unique_tokens: float  # their tree nodes
    sampled_tokens: float  # their tokens, duplicates counted
    responses: float  # their distinct responses
    trained_groups: float  # groups to train on
    trained_nodes: float  # tree nodes in the loss
    updates: float  # mini-batches
    rounds: float = 1.0  # calls of the engine

    @classmethod
    def of_step(cls, num_prompts: float, kept_fraction: float, *, nodes: float, tokens: float, responses: float,
                trained: float, updates: float, rounds: float) -> Work:  # fmt: skip
        """Return the work of a step that trains on `num_prompts` groups, from the means of a group."""
        groups = num_prompts / kept_fraction
        counts = (groups, groups * nodes, groups * tokens, groups * responses)
        return cls(*counts, num_prompts, num_prompts * trained, updates, rounds)

    def features(self, phase: str) -> tuple[float, ...]:
        """Return the F numbers that a phase's seconds are affine in."""
        return tuple(getattr(self, name) if name else 1.0 for name in _FEATURES[phase])


@dataclass(frozen=True)
class AffineCost:
    """A cost that is a sum of features, each times a coefficient >= 0."""

    coefficients: tuple[float, ...]  # one per feature
    worst_error: float  # largest error of the fit, relative to the measured cost

    def __call__(self, features: Sequence[float]) -> float:
        """Return the cost."""
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))


def fit_affine(feature_KF: FloatArray, cost_K: FloatArray) -> AffineCost:
    """Fit non-negative coefficients with the least sum of squared relative errors to K positive costs."""
    if not (cost_K > 0).all():
        raise ValueError(f"measured costs must be positive, got {cost_K.min()}")
    relative_KF = feature_KF / cost_K[:, None]
    scale_F = np.maximum(relative_KF.max(0), np.finfo(np.float64).tiny)
    coefficient_F, _ = nnls(relative_KF / scale_F, np.ones(cost_K.size))
    error_K = np.abs(relative_KF @ (coefficient_F / scale_F) - 1)
    return AffineCost(tuple((coefficient_F / scale_F).tolist()), float(error_K.max()))


@dataclass(frozen=True)
class StepTiming:
    """One amount of work, with the median seconds of each phase over some repeats."""

    num_rollouts: int
    work: Work
    seconds: dict[str, float]


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step by phase."""

    costs: dict[str, AffineCost]  # affine cost of each timed phase
    per_step: dict[str, float]  # how often a step runs each phase: 1 / k for a phase of every k-th step
    worst_error: float  # largest relative error of a timing's total

    @classmethod
    def fit(cls, timings: Sequence[StepTiming], per_step: dict[str, float]) -> StepCost:
        """Fit each phase to the timings, all of the same phases."""
        costs = {}
        for phase in per_step:
            features = np.array([t.work.features(phase) for t in timings], np.float64)
            costs[phase] = fit_affine(features, np.array([t.seconds[phase] for t in timings]))
        once = cls(costs, dict.fromkeys(per_step, 1.0), 0.0)
        errors = [abs(once.seconds(t.work)["total"] / sum(t.seconds[n] for n in per_step) - 1) for t in timings]
        return cls(costs, per_step, max(errors))

    def seconds(self, work: Work) -> dict[str, float]:
        """Return the seconds of each phase of a step, and their total."""
        seconds = {phase: cost(work.features(phase)) * self.per_step[phase] for phase, cost in self.costs.items()}
        return {**seconds, "total": sum(seconds.values())}


@lru_cache(maxsize=4096)
def mean_rounds(kept_fraction: float, num_prompts: int) -> float:
    """Return the mean number of engine calls per step, by a simulation of dynamic sampling with refill.

    Surplus groups are carried to the next step. A step samples P / fraction groups on average; fraction is in (0, 1].
    """
    if not 0 < kept_fraction <= 1:
        raise ValueError(f"the fraction of kept groups must be in (0, 1], got {kept_fraction}")
    generator = np.random.default_rng(0)
    carried_C = np.zeros(_CHAINS, np.int64)
    mixed_C, sampled_C = np.zeros(_CHAINS), np.zeros(_CHAINS)
    rounds = 0
    for step in range(_WARM_UP + _STEPS):
        kept_C, sampled_C, mixed_C = carried_C, MEMORY * sampled_C, MEMORY * mixed_C
        for _ in range(_MAX_ROUNDS):
            missing_C = np.maximum(num_prompts - kept_C, 0)
            if not missing_C.any():
                break
            size_C = np.where(missing_C, prompts_of_round(num_prompts, missing_C, mixed_C, sampled_C), 0)
            new_C = generator.binomial(size_C, kept_fraction)
            kept_C, sampled_C, mixed_C = kept_C + new_C, sampled_C + size_C, mixed_C + new_C
            rounds += int(np.count_nonzero(missing_C)) if step >= _WARM_UP else 0
        carried_C = np.maximum(kept_C - num_prompts, 0)
    return rounds / (_CHAINS * _STEPS)
