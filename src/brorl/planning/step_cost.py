"""Seconds of a training step at any number of rollouts and prompts, from a few timings of the real phases.

In: timings, each with its amounts of work and the seconds of each phase; the fraction of groups that dynamic sampling
keeps. Out: the expected seconds by phase of a step. The models are affine with nonnegative coefficients: a fixed cost
per call, and a cost per unit of work. They interpolate; far beyond the timed sizes they are a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

FloatArray = NDArray[np.float64]

PHASES = ("generation", "verification", "training", "storing", "diagnostics")
_CHAINS, _STEPS, _WARM_UP, _MOST_ROUNDS = 64, 24, 4, 2000


@dataclass(frozen=True)
class Work:
    """Amounts of work in one call of every phase.

    Attributes:
        groups: Groups to sample, verify and store.
        unique_tokens: Their tree nodes.
        sampled_tokens: Their tokens, duplicates counted.
        responses: Their distinct responses.
        trained_groups: Groups to train on.
        trained_nodes: Tree nodes in the loss.
        updates: Mini-batches.
        rounds: Calls of the engine.
    """

    groups: float
    unique_tokens: float
    sampled_tokens: float
    responses: float
    trained_groups: float
    trained_nodes: float
    updates: float
    rounds: float = 1.0

    def features(self, phase: str) -> tuple[float, ...]:
        """Return the F numbers that a phase's seconds are affine in."""
        match phase:
            case "generation":
                return self.rounds, self.unique_tokens, self.sampled_tokens
            case "verification":
                return self.rounds, self.responses
            case "training":
                return self.updates, self.trained_nodes, self.trained_groups
            case "storing":
                return 1.0, self.responses
            case "diagnostics":
                return 1.0, self.unique_tokens
            case _:
                raise ValueError(f"{phase!r} is not a phase of a step; the phases are {', '.join(PHASES)}")


@dataclass(frozen=True)
class AffineCost:
    """A cost that is a sum of features, each times a coefficient >= 0.

    Attributes:
        coefficients: One per feature.
        worst_error: Largest error of the fit, relative to the measured cost.
    """

    coefficients: tuple[float, ...]
    worst_error: float

    def __call__(self, features: Sequence[float]) -> float:
        """Return the cost."""
        return float(sum(c * f for c, f in zip(self.coefficients, features, strict=True)))


def fit_affine(feature_KF: FloatArray, cost_K: FloatArray, known_K: FloatArray | float = 0.0) -> AffineCost:
    """Fit non-negative coefficients with the least sum of squared relative errors.

    Args:
        feature_KF: Features of K measurements, >= 0, shape [K, F].
        cost_K: Cost of each, > 0, shape [K].
        known_K: The known part of each cost; the coefficients explain the rest.

    Raises:
        ValueError: If a cost is not positive.
    """
    if not (cost_K > 0).all():
        raise ValueError(f"measured costs must be positive, not {cost_K.min()}")
    relative_KF = feature_KF / cost_K[:, None]
    scale_F = np.maximum(relative_KF.max(0), np.finfo(np.float64).tiny)
    rest_K = 1 - known_K / cost_K
    coefficient_F, _ = nnls(relative_KF / scale_F, rest_K)
    error_K = np.abs(relative_KF @ (coefficient_F / scale_F) - rest_K)
    return AffineCost(tuple((coefficient_F / scale_F).tolist()), float(error_K.max()))


@dataclass(frozen=True)
class StepTiming:
    """One amount of work, with the median seconds of each phase over some repeats."""

    num_rollouts: int
    work: Work
    seconds: dict[str, float]


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step by phase.

    Attributes:
        costs: Affine cost of each timed phase.
        per_step: How often a step runs each phase: 1 / k for a phase of every k-th step.
        worst_error: Largest relative error of a timing's total.
    """

    costs: dict[str, AffineCost]
    per_step: dict[str, float]
    worst_error: float

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
        found = {phase: cost(work.features(phase)) * self.per_step[phase] for phase, cost in self.costs.items()}
        return {**found, "total": sum(found.values())}


@lru_cache(maxsize=4096)
def mean_rounds(kept_fraction: float, num_prompts: int) -> float:
    """Return the mean number of engine calls per step, by a simulation of dynamic sampling with refill.

    A round samples the number of prompts that should fill the batch at the kept fraction of this step so far, at most
    P. Surplus groups are carried to the next step. `Collector` uses the same rule. A step samples P / share groups on
    average.

    Args:
        kept_fraction: Chance that a group is kept, in (0, 1].
        num_prompts: Groups that a step trains on, P >= 1.

    Raises:
        ValueError: If the fraction is outside (0, 1].
    """
    if not 0 < kept_fraction <= 1:
        raise ValueError(f"the fraction of kept groups must lie in (0, 1], not {kept_fraction}")
    generator = np.random.default_rng(0)
    carried_C = np.zeros(_CHAINS, np.int64)
    counted = 0
    for step in range(_WARM_UP + _STEPS):
        kept_C, sampled_C, found_C = carried_C, np.zeros(_CHAINS, np.int64), np.zeros(_CHAINS, np.int64)
        for _ in range(_MOST_ROUNDS):
            missing_C = np.maximum(num_prompts - kept_C, 0)
            if not missing_C.any():
                break
            # Without the guard a quotient that should be whole, such as 3 / (3 / 4), could be rounded up past it.
            wanted_C = np.ceil(missing_C / ((found_C + 1) / (sampled_C + 1)) - 1e-9).astype(np.int64)
            size_C = np.minimum(num_prompts, wanted_C)
            new_C = generator.binomial(size_C, kept_fraction)
            kept_C, sampled_C, found_C = kept_C + new_C, sampled_C + size_C, found_C + new_C
            counted += int(np.count_nonzero(missing_C)) if step >= _WARM_UP else 0
        carried_C = np.maximum(kept_C - num_prompts, 0)
    return counted / (_CHAINS * _STEPS)
