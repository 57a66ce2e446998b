"""Seconds and memory of a training step at any number of rollouts and prompts, from a few measured steps.

Both are affine with nonnegative coefficients: a fixed cost, and a cost per unit of work. The engine's own prediction
for its rows is the known part of sampling. The models interpolate; far beyond the measured sizes they are a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import nnls

from brorl.arrays import FloatArray
from brorl.model.moments import moment_bytes
from brorl.rollout.native.engine import NativeEngine
from brorl.training.collect import MEMORY, prompts_of_round
from brorl.training.local_parts import LocalParts

_FEATURES = {  # what the seconds of each phase are affine in; None is a constant
    "generation": ("rounds", "unique_tokens", "sampled_tokens"),
    "verification": ("rounds", "responses"),
    "training": ("updates", "trained_nodes", "trained_groups"),
    "storing": (None, "responses"),
    "diagnostics": (None, "unique_tokens"),
}
_CHAINS, _STEPS, _WARM_UP, _MAX_ROUNDS = 64, 24, 4, 2000
_KNOWN = 1e12  # groups after which a fraction is known


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


def fit_affine(feature_KF: FloatArray, cost_K: FloatArray, known_K: FloatArray | float = 0.0) -> AffineCost:
    """Fit non-negative coefficients with the least sum of squared relative errors to the unknown part of K costs.

    Raises:
        ValueError: If a cost is not positive.
    """
    if not (cost_K > 0).all():
        raise ValueError(f"measured costs must be positive, got {cost_K.min()}")
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


def prompts_at_once(kept_fraction: float, num_prompts: int) -> int:
    """Return the prompts of the first round of a step at a known fraction of kept groups."""
    return int(prompts_of_round(num_prompts, num_prompts, _KNOWN * kept_fraction, _KNOWN))


@lru_cache(maxsize=4096)
def mean_rounds(kept_fraction: float, num_prompts: int) -> float:
    """Return the mean number of engine calls per step, by a simulation of dynamic sampling with refill.

    Surplus groups are carried to the next step. A step samples P / fraction groups on average.

    Raises:
        ValueError: If the fraction is outside (0, 1].
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


@dataclass(frozen=True)
class PeakMemory:
    """Bytes above the loaded model at the peaks of one step."""

    num_rollouts: int
    num_prompts: int  # prompts of the step
    rows_D: FloatArray  # expected live rows of a prompt at each depth, shape [D]
    nodes_per_update: float  # tree nodes of a mini-batch
    sampling: int  # peak while sampling
    training: int  # peak while training


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of a step above the loaded model."""

    parts: LocalParts  # the parts of the run; the engine predicts the bytes of its rows
    longest_prompt: int  # tokens of the longest prompt
    # further bytes while sampling (activations, draws), affine in that prediction and in the rollouts
    sampling: AffineCost
    training: AffineCost  # bytes of gradients, optimizer and activations, affine in the nodes of a forward pass
    resident_bytes: int  # gradients and optimizer state, which stay while sampling
    nodes_per_pass: int  # largest number of nodes in a forward pass of the learner

    @classmethod
    def fit(cls, parts: LocalParts, peaks: Sequence[PeakMemory | None], longest_prompt: int) -> MemoryModel | None:
        """Fit the model to some peaks; None if one is missing, or if the engine has no model of its rows."""
        known = [p for p in peaks if p is not None and p.training > 0]
        engine = parts.engine
        if len(known) < len(peaks) or not isinstance(engine, NativeEngine) or engine.row_costs(1, 1) is None:
            return None
        config, optimizer = parts.config, parts.config.optimizer
        nodes_per_pass = config.engine.nodes_per_pass or parts.forward.default_max_nodes(parts.model)
        trained = [p for p in parts.model.parameters() if p.requires_grad]
        trainable, device = sum(p.numel() * p.element_size() for p in trained), parts.model.device.type
        offloaded = config.reference.offload and device == "cuda"
        has_reference, has_average = bool(config.kl.coefficient) and not offloaded, optimizer.ema_decay is not None
        moments = moment_bytes([p.shape for p in trained], optimizer.states, trained[0].element_size(), device)
        resident = moments + (1 + has_reference + has_average) * trainable  # gradients, reference, average
        rows_K = [_row_bytes(parts, p.rows_D, p.num_rollouts, p.num_prompts, longest_prompt) for p in known]
        known_K = np.array(rows_K, np.float64) + resident
        sampling = fit_affine(
            np.array([(1.0, r, p.num_rollouts * p.num_prompts) for r, p in zip(rows_K, known, strict=True)]),
            np.maximum([p.sampling for p in known], known_K),
            known_K,
        )
        training = fit_affine(
            np.array([(1.0, min(p.nodes_per_update, nodes_per_pass)) for p in known]),
            np.array([p.training for p in known], np.float64),
        )
        return cls(parts, longest_prompt, sampling, training, resident, nodes_per_pass)

    def rows(self, rows_D: FloatArray, num_rollouts: int, num_prompts: int) -> int:
        """Return the engine's own prediction for the rows of a call."""
        return _row_bytes(self.parts, rows_D, num_rollouts, num_prompts, self.longest_prompt)

    def predict(self, rows_D: FloatArray, num_rollouts: int, num_prompts: int, nodes_per_update: float) -> int:
        """Return the bytes at the peak of a step: of sampling or of training, whichever is larger."""
        rows = self.rows(rows_D, num_rollouts, num_prompts)
        sampling = rows + round(self.sampling((1.0, rows, num_rollouts * num_prompts)))
        training = self.training((1.0, min(nodes_per_update, self.nodes_per_pass)))
        return max(self.resident_bytes + sampling, round(training))


def _row_bytes(parts: LocalParts, rows_D: FloatArray, num_rollouts: int, num_prompts: int, prompt_tokens: int) -> int:
    """Return an engine's prediction for a call, from the live rows of a prompt at each depth, shape [D]."""
    rows = np.ceil(rows_D * num_prompts).astype(np.int64)
    assert isinstance(parts.engine, NativeEngine)  # as `MemoryModel.fit` needs it
    costs = parts.engine.row_costs(num_rollouts * num_prompts, parts.config.sampling.max_new_tokens)
    assert costs is not None
    return costs(rows[rows > 0], num_prompts * prompt_tokens)
