"""Seconds of a training step at any number of rollouts and prompts, from a few timed probes of the real phases.

In: probes, each with what it worked on and how long each phase took; the share of groups that dynamic sampling keeps.
Out: the expected seconds by phase of a step. The models are affine with coefficients that are never negative: a fixed
cost per call, and a cost per unit of what a phase works on. They interpolate; far beyond the probes they are a guess.
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
    """What one call of every phase works on (F features are made from these).

    Attributes:
        groups: Groups that are sampled, verified and stored.
        unique_tokens: Their tree nodes.
        sampled_tokens: Their tokens, duplicates counted.
        responses: Their distinct responses.
        trained_groups: Groups that are trained on.
        trained_nodes: Tree nodes that go through the loss.
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
        """Return what a phase's seconds are affine in."""
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
                raise ValueError(f"{phase!r} is no phase of a step; the phases are {', '.join(PHASES)}")


@dataclass(frozen=True)
class AffineCost:
    """A cost that is a sum of features, each times a coefficient >= 0.

    Attributes:
        coefficients: One per feature.
        worst_error: Largest error at the probes, relative to what was measured there.
    """

    coefficients: tuple[float, ...]
    worst_error: float

    def __call__(self, features: Sequence[float]) -> float:
        """Return the cost."""
        return float(sum(c * f for c, f in zip(self.coefficients, features, strict=True)))


def fit_affine(feature_KF: FloatArray, cost_K: FloatArray, known_K: FloatArray | float = 0.0) -> AffineCost:
    """Fit non-negative coefficients with the least sum of squared relative errors.

    Args:
        feature_KF: Features of K probes, shape [K, F].
        cost_K: What each probe cost, > 0, shape [K].
        known_K: The part of each cost that is known already; the coefficients explain the rest.

    Returns:
        The fit.

    Raises:
        ValueError: If a cost is not positive.
    """
    if not (cost_K > 0).all():
        raise ValueError(f"costs of probes must be positive, not {cost_K.min()}")
    relative_KF = feature_KF / cost_K[:, None]
    scale_F = np.maximum(relative_KF.max(0), np.finfo(np.float64).tiny)
    rest_K = 1 - known_K / cost_K
    coefficient_F, _ = nnls(relative_KF / scale_F, rest_K)
    error_K = np.abs(relative_KF @ (coefficient_F / scale_F) - rest_K)
    return AffineCost(tuple((coefficient_F / scale_F).tolist()), float(error_K.max()))


@dataclass(frozen=True)
class StepTiming:
    """One size of work, with the median seconds of each phase over some repeats."""

    num_rollouts: int
    work: Work
    seconds: dict[str, float]


@dataclass(frozen=True)
class StepCost:
    """Seconds by phase.

    Attributes:
        costs: Affine cost of each phase that was probed.
        per_step: How often a step does each of them: 1 / k for what is done every k steps.
        worst_error: Largest relative error of a probe's total.
    """

    costs: dict[str, AffineCost]
    per_step: dict[str, float]
    worst_error: float

    @classmethod
    def fit(cls, probes: Sequence[StepTiming], per_step: dict[str, float]) -> StepCost:
        """Fit each phase to the probes, which all timed the same phases."""
        costs = {}
        for phase in per_step:
            features = np.array([p.work.features(phase) for p in probes], np.float64)
            costs[phase] = fit_affine(features, np.array([p.seconds[phase] for p in probes]))
        once = cls(costs, dict.fromkeys(per_step, 1.0), 0.0)
        errors = [abs(once.seconds(p.work)["total"] / sum(p.seconds[n] for n in per_step) - 1) for p in probes]
        return cls(costs, per_step, max(errors))

    def seconds(self, work: Work) -> dict[str, float]:
        """Return the seconds of each phase of a step, and their total."""
        found = {phase: cost(work.features(phase)) * self.per_step[phase] for phase, cost in self.costs.items()}
        return {**found, "total": sum(found.values())}


@lru_cache(maxsize=4096)
def mean_rounds(kept_share: float, num_prompts: int) -> float:
    """Return how many calls of the engine a step takes on average, by simulating dynamic sampling with refill.

    A round samples as many prompts as should fill what is missing, going by the share kept in this step so far, and at
    most P; what is left over serves the next step. `Collector` does the same. Groups sampled per step are P / share on
    average.

    Args:
        kept_share: Chance that a group is kept, in (0, 1].
        num_prompts: P, groups that a step trains on.

    Raises:
        ValueError: If nothing is ever kept.
    """
    if not 0 < kept_share <= 1:
        raise ValueError(f"the share of groups that are kept must lie in (0, 1], not {kept_share}")
    generator = np.random.default_rng(0)
    carried_C = np.zeros(_CHAINS, np.int64)
    counted = 0
    for step in range(_WARM_UP + _STEPS):
        kept_C, sampled_C, found_C = carried_C, np.zeros(_CHAINS, np.int64), np.zeros(_CHAINS, np.int64)
        for _ in range(_MOST_ROUNDS):
            missing_C = np.maximum(num_prompts - kept_C, 0)
            if not missing_C.any():
                break
            # The guard keeps a quotient that should be whole, such as 3 / (3 / 4), from being rounded up past it.
            wanted_C = np.ceil(missing_C / ((found_C + 1) / (sampled_C + 1)) - 1e-9).astype(np.int64)
            size_C = np.minimum(num_prompts, wanted_C)
            new_C = generator.binomial(size_C, kept_share)
            kept_C, sampled_C, found_C = kept_C + new_C, sampled_C + size_C, found_C + new_C
            counted += int(np.count_nonzero(missing_C)) if step >= _WARM_UP else 0
        carried_C = np.maximum(kept_C - num_prompts, 0)
    return counted / (_CHAINS * _STEPS)
