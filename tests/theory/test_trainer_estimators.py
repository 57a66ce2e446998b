"""What theory.md states of REINFORCE, the group mean and GRPO, against autograd of the trainer's loss and all draws."""

from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch


class Case(NamedTuple):
    p: np.ndarray
    correct: np.ndarray
    reward: np.ndarray
    eta: float

    @classmethod
    def random(cls, rng: np.random.Generator, size: int) -> "Case":
        p, correct = rng.dirichlet(np.full(size, rng.choice([0.3, 1, 10]))), rng.random(size) < rng.uniform(0.1, 0.9)
        correct[:2] = True, False
        return cls(p, correct, np.where(correct, rng.exponential(), -rng.exponential()), 10 ** rng.uniform(-2, 1))

    @property
    def gradient(self) -> np.ndarray:
        """Of the correct mass in the logits, by autograd."""
        logits = torch.tensor(self.p).log().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.softmax(logits, 0)[torch.tensor(self.correct)].sum(), logits)
        return gradient.numpy()

    def change(self, draw_N: np.ndarray, estimator: str) -> float:
        """The first-order change of the correct mass by a step on the trainer's loss, rollout by rollout."""
        advantage_N = self.reward[draw_N] - (0 if estimator == "reinforce" else self.reward[draw_N].mean())
        if estimator == "grpo":
            advantage_N = advantage_N / self.reward[draw_N].std() if np.ptp(self.reward[draw_N]) else 0 * advantage_N
        logits = torch.tensor(self.p).log().requires_grad_()
        loss = -(torch.tensor(advantage_N) * torch.log_softmax(logits, 0)[torch.tensor(draw_N)]).mean()
        (slope,) = torch.autograd.grad(loss, logits)
        return float(-self.eta * slope.numpy() @ self.gradient)

    def means(self, draw_N: np.ndarray) -> tuple[float, float, float]:
        """The fraction of correct rollouts, and the mean probability of the correct and of the incorrect ones."""
        right, p = self.correct[draw_N], self.p[draw_N]
        return right.mean(), *(p[kind].mean() if kind.any() else 0.0 for kind in (right, ~right))


@pytest.mark.parametrize("estimator", ["group_mean", "grpo"])
def test_with_a_baseline_no_draw_lowers_the_correct_mass(rng: np.random.Generator, estimator: str) -> None:
    """It changes by a product that is never negative; without a baseline some draws lower it."""
    without = []
    for _ in range(100):
        case = Case.random(rng, int(rng.integers(2, 51)))
        draw_N = rng.choice(case.p.size, int(rng.integers(1, 41)), p=case.p)
        x, a, b = case.means(draw_N)
        spread = np.sqrt(x * (1 - x)) if estimator == "grpo" else np.ptp(case.reward) * x * (1 - x)
        stated = case.eta * spread * (case.p[~case.correct].sum() * a + case.p[case.correct].sum() * b)
        assert stated >= 0
        assert case.change(draw_N, estimator) == pytest.approx(stated, rel=1e-8, abs=1e-13 * case.eta)
        without.append(case.change(draw_N, "reinforce"))
    assert min(without) < 0


@pytest.mark.parametrize("num_rollouts", [1, 2, 4])
def test_the_mean_over_all_draws(rng: np.random.Generator, num_rollouts: int) -> None:
    """REINFORCE: the same at every N, with a variance of 1/N; the group mean: (1 - 1/N) of it."""
    case = Case.random(rng, 3)
    draws = [np.array(draw) for draw in product(range(3), repeat=num_rollouts)]
    chance = np.array([case.p[draw].prod() for draw in draws])
    change = {name: np.array([case.change(draw, name) for draw in draws]) for name in ("reinforce", "group_mean")}
    limit = case.eta * np.ptp(case.reward) * case.gradient @ case.gradient
    assert chance @ change["reinforce"] == pytest.approx(limit, rel=1e-9)
    assert chance @ change["group_mean"] == pytest.approx((1 - 1 / num_rollouts) * limit, rel=1e-9, abs=1e-14 * limit)
    alone = np.array([case.change(np.array([y]), "reinforce") for y in range(3)])
    variance = chance @ (change["reinforce"] - limit) ** 2
    assert variance == pytest.approx(case.p @ (alone - limit) ** 2 / num_rollouts, rel=1e-9)


def test_the_correct_outcomes_that_even_the_exact_gradient_lowers(rng: np.random.Generator) -> None:
    num_lowered = num_raised = 0
    for _ in range(200):
        case = Case.random(rng, int(rng.integers(2, 51)))
        p, right = case.p, case.correct
        change_V = p * (case.gradient - p @ case.gradient)  # of the probabilities, by the softmax
        limit = (p[right] ** 2).sum() - p[right].sum() / p[~right].sum() * (p[~right] ** 2).sum()
        clear_V = right & (np.abs(change_V) > 1e-12 * p)
        np.testing.assert_array_equal((p < limit)[clear_V], (change_V < 0)[clear_V])
        num_lowered += (p < limit)[clear_V].sum()
        num_raised += (p >= limit)[clear_V].sum()
    assert min(num_lowered, num_raised) > 50
