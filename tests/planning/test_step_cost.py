"""Costs: affine fits of known costs, phases of a step, rounds of refill."""

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from brorl.planning.step_cost import StepCost, StepTiming, Work, fit_affine, mean_rounds


def work(rng: np.random.Generator) -> Work:
    return Work(*rng.uniform(1, 100, 8).tolist())


def test_a_fit_finds_exact_costs(rng: np.random.Generator) -> None:
    features = rng.uniform(0.5, 50, (6, 3)) * [1, 1e4, 1e-3]
    truth = np.array([0.02, 3e-6, 0.0])
    np.testing.assert_allclose(fit_affine(features, features @ truth), truth, atol=1e-9)


def test_a_fit_is_the_best_without_negative_costs(rng: np.random.Generator) -> None:
    """Against another solver of the same problem: squared relative errors, coefficients from 0 on."""
    for _ in range(20):
        features, cost = rng.uniform(0.5, 5, (7, 3)), rng.uniform(0.5, 5, 7)
        best = lsq_linear(features / cost[:, None], np.ones(7), bounds=(0, np.inf), tol=1e-12)
        np.testing.assert_allclose(fit_affine(features, cost), best.x, atol=1e-5)
    with pytest.raises(ValueError, match="positive"):
        fit_affine(features, np.zeros(7))


def test_a_step_adds_up_its_phases(rng: np.random.Generator) -> None:
    per_step = {"generation": 1.0, "verification": 1.0, "training": 1.0, "diagnostics": 1.0, "storing": 0.25}
    truth = {
        "generation": lambda w: 0.5 * w.rounds + 0.01 * w.unique_tokens + 0.002 * w.sampled_tokens,
        "verification": lambda w: 0.1 * w.rounds + 0.03 * w.responses,
        "training": lambda w: 0.2 * w.updates + 0.04 * w.trained_nodes + 0.3 * w.trained_groups,
        "diagnostics": lambda w: 0.05 + 0.001 * w.unique_tokens,
        "storing": lambda w: 0.07 + 0.002 * w.responses,
    }
    timings = [StepTiming(16, w, {n: f(w) for n, f in truth.items()}) for w in (work(rng) for _ in range(6))]
    cost = StepCost.fit(timings, per_step)
    assert cost.worst_error < 1e-6
    step = work(rng)
    seconds = cost.seconds(step)
    for name, value in truth.items():
        assert seconds[name] == pytest.approx(value(step) * per_step[name], rel=1e-6)
    assert seconds["total"] == pytest.approx(sum(seconds[n] for n in per_step))


def test_rounds_of_refill() -> None:
    assert mean_rounds(1.0, 16) == 1.0
    assert mean_rounds(0.999999, 4) < 1.1
    for fraction in (0.4, 0.6, 0.9):
        assert all(1.0 < mean_rounds(fraction, per_step) < 1.2 for per_step in (8, 16, 64))
    # A step needs P / f prompts on average, and a round has at most 6 P.
    assert mean_rounds(0.05, 16) > 0.95 / (6 * 0.05)
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match="must be in"):
            mean_rounds(fraction, 4)
