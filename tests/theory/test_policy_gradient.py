"""The trainers' estimators against autograd of their loss, enumeration of all counts, and Monte Carlo."""

from collections.abc import Callable, Iterator
from math import factorial, prod, sqrt
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from policy_gradient import (
    Estimator,
    lowered_by_exact_gradient,
    mass_change,
    mass_change_of_draw,
    shrinkage_of_unsampled,
)

from brorl.theory.mass_balance import GradientStep, Outcomes
from each_row import each_row

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


class Case(NamedTuple):
    p: np.ndarray
    correct: np.ndarray
    rewards: dict[str, Any]

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes.of(self.p, self.correct)

    @property
    def step(self) -> GradientStep:
        return GradientStep(**self.rewards)


def random_case(
    rng: np.random.Generator, size: int | None = None, skew: tuple[float, ...] = (0.03, 0.3, 1, 10)
) -> Case:
    size = size or int(rng.integers(2, 51))
    p = rng.dirichlet(np.full(size, rng.choice(skew)))
    rewards = {
        "reward_correct": float(rng.choice([0.0, 1.0, rng.exponential()])),
        "reward_wrong": -float(rng.choice([0.0, 1.0, rng.exponential()])),
        "learning_rate": float(10 ** rng.uniform(-2, 1)),
    }
    return Case(p, rng.random(size) < rng.uniform(0.1, 0.9), rewards)


def advantages(reward_N: np.ndarray, estimator: Estimator) -> np.ndarray:
    """Advantages of rollouts, one by one."""
    baseline = sum(reward_N) / len(reward_N)
    if estimator == "reinforce":
        return reward_N
    if estimator == "group_mean":
        return np.array([r - baseline for r in reward_N])
    if min(reward_N) == max(reward_N):
        return np.zeros(len(reward_N))
    std = sqrt(sum((r - baseline) ** 2 for r in reward_N) / len(reward_N))
    return np.array([(r - baseline) / std for r in reward_N])


def trainer_step(case: Case, draw_N: np.ndarray, estimator: Estimator) -> tuple[np.ndarray, torch.Tensor]:
    """The logit step of the trainer's loss on rollouts given one by one, and the logits."""
    reward_N = np.where(case.correct[draw_N], case.rewards["reward_correct"], case.rewards["reward_wrong"])
    advantage_N = torch.tensor(advantages(reward_N, estimator))
    logits = torch.tensor(case.p).log().requires_grad_()
    loss = -(advantage_N * torch.log_softmax(logits, 0)[torch.tensor(draw_N)]).mean()
    (slope,) = torch.autograd.grad(loss, logits)
    return -case.rewards["learning_rate"] * slope.numpy(), logits


def correct_mass_gradient(case: Case, logits: torch.Tensor) -> np.ndarray:
    (gradient,) = torch.autograd.grad(torch.softmax(logits, 0)[torch.tensor(case.correct)].sum(), logits)
    return gradient.numpy()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_change_of_a_draw_equals_autograd_of_the_trainers_loss(rng: np.random.Generator, estimator: Estimator) -> None:
    for _ in range(250):
        case = random_case(rng)
        draw_N = rng.choice(case.p.size, int(rng.integers(1, 41)), p=case.p)
        step, logits = trainer_step(case, draw_N, estimator)
        gradient = correct_mass_gradient(case, logits)
        count = np.bincount(draw_N, minlength=case.p.size)
        found = mass_change_of_draw(case.outcomes, count, estimator, case.step)
        floor = 1e-14 * case.rewards["learning_rate"] * 3  # autograd's rounding where one outcome is nearly certain
        assert found == pytest.approx(gradient @ step, rel=1e-9, abs=floor)


def change_by_loops(case: Case, count: tuple[int, ...], estimator: Estimator) -> float:
    """(eta / N) sum_n A_n (h(y_n) - mean h), rollout by rollout."""
    q_pos = sum(x for x, c in zip(case.p, case.correct, strict=True) if c)
    h = [x * (float(c) - q_pos) for x, c in zip(case.p, case.correct, strict=True)]
    mean_h = sum(x * g for x, g in zip(case.p, h, strict=True))
    draw = [i for i, n in enumerate(count) for _ in range(n)]
    reward_N = np.array([case.rewards["reward_correct" if case.correct[i] else "reward_wrong"] for i in draw])
    terms = [a * (h[i] - mean_h) for a, i in zip(advantages(reward_N, estimator), draw, strict=True)]
    return case.rewards["learning_rate"] * sum(terms) / len(draw)


def count_vectors(size: int, total: int) -> Iterator[tuple[int, ...]]:
    if size == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in count_vectors(size - 1, total - first):
            yield (first, *rest)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_mean_and_variance_equal_enumeration(rng: np.random.Generator, estimator: Estimator, size: int) -> None:
    for num_rollouts in range(1, 7):
        for skew in (0.3, 3.0):
            case = random_case(rng, size, skew=(skew,))
            if rng.random() < 0.9:
                case.correct[:2] = [True, False]
            chance, change = [], []
            for count in count_vectors(size, num_rollouts):
                ways = factorial(num_rollouts) / prod(factorial(n) for n in count)
                chance.append(ways * prod(float(x) ** n for x, n in zip(case.p, count, strict=True)))
                change.append(change_by_loops(case, count, estimator))
            mean = np.dot(chance, change)
            found = mass_change(case.outcomes, num_rollouts, estimator, case.step)
            unit = case.rewards["learning_rate"]
            assert found[0] == pytest.approx(mean, rel=1e-10, abs=1e-15 * unit)
            variance = np.dot(chance, (np.array(change) - mean) ** 2)
            assert found[1] == pytest.approx(variance, rel=1e-9, abs=1e-17 * unit**2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_mean_and_variance_equal_monte_carlo(rng: np.random.Generator, estimator: Estimator) -> None:
    case = random_case(rng, 40, skew=(0.5,))
    case.correct[:20], case.correct[20:] = True, False
    case.rewards.update(reward_correct=1.0, reward_wrong=-0.5)
    counts = rng.multinomial(48, case.p, size=5000)
    changes = [mass_change_of_draw(case.outcomes, count, estimator, case.step) for count in counts]
    found = mass_change(case.outcomes, 48, estimator, case.step)
    squares = (np.array(changes) - np.mean(changes)) ** 2
    assert found[0] == pytest.approx(np.mean(changes), abs=6 * np.std(changes) / sqrt(len(changes)))
    assert found[1] == pytest.approx(squares.mean(), abs=7 * squares.std() / sqrt(len(changes)))


@pytest.mark.parametrize("num_rollouts", [2, 16, 512, 51_200])
def test_large_groups_equal_the_moments_of_a_sample_covariance(rng: np.random.Generator, num_rollouts: int) -> None:
    """The group-mean change is eta dR (N - 1) / N times the sample covariance of verdict and h, of known variance."""
    for _ in range(5):
        case = random_case(rng, skew=(0.3, 1.0))
        case.correct[:2] = [True, False]
        q_pos, q_neg = case.p[case.correct].sum(), case.p[~case.correct].sum()
        x = np.where(case.correct, q_neg, -q_pos)  # 1 - q_pos has no digits left where q_pos is almost 1
        h = case.p * x
        y = h - case.p @ h
        mu11, mu20, mu02, mu22 = (case.p @ (x**i * y**j) for i, j in ((1, 1), (2, 0), (0, 2), (2, 2)))
        n = num_rollouts
        variance = mu22 / n - (n - 2) / (n * (n - 1)) * mu11**2 + mu20 * mu02 / (n * (n - 1))
        unit = case.rewards["learning_rate"] * (case.rewards["reward_correct"] - case.rewards["reward_wrong"])
        found = mass_change(case.outcomes, n, "group_mean", case.step)
        assert found[0] == pytest.approx(unit * (1 - 1 / n) * (h @ h), rel=1e-9, abs=1e-15 * unit)
        expected = unit**2 * ((n - 1) / n) ** 2 * variance
        assert found[1] == pytest.approx(expected, rel=1e-7, abs=1e-14 * unit**2 * mu22 / n)


def test_the_mean_without_a_baseline_does_not_depend_on_the_number_of_rollouts(rng: np.random.Generator) -> None:
    case = random_case(rng, 20)
    case.correct[:2] = [True, False]
    few, many = (mass_change(case.outcomes, n, "reinforce", case.step) for n in (1, 4096))
    assert few[0] == many[0]
    assert few[1] == pytest.approx(4096 * many[1], rel=1e-12, abs=0)


@pytest.mark.parametrize("estimator", ["group_mean", "grpo"])
def test_no_draw_lowers_the_correct_mass_with_a_baseline(rng: np.random.Generator, estimator: Estimator) -> None:
    """Not even by rounding; without a baseline some draws do."""
    without = []
    for _ in range(500):
        case = random_case(rng)
        count = rng.multinomial(int(rng.integers(1, 100)), case.p)
        if rng.random() < 0.3:  # draws that are next to impossible
            count = rng.integers(0, 3, case.p.size) + (np.arange(case.p.size) == 0)
        assert mass_change_of_draw(case.outcomes, count, estimator, case.step) >= 0
        without.append(mass_change_of_draw(case.outcomes, count, "reinforce", case.step))
    assert min(without) < 0


@pytest.mark.parametrize("estimator", ["group_mean", "grpo"])
def test_equal_rollouts_and_equal_rewards_change_nothing(rng: np.random.Generator, estimator: Estimator) -> None:
    p, correct = rng.dirichlet(np.ones(6)), np.arange(6) < 3
    for count in ([1, 2, 3, 0, 0, 0], [0, 0, 0, 4, 0, 1]):
        assert mass_change_of_draw(Outcomes.of(p, correct), count, estimator) == 0
        assert shrinkage_of_unsampled(p, correct, count, estimator) == 0
    nothing = {"reward_correct": 0.0, "reward_wrong": 0.0}
    assert mass_change_of_draw(Outcomes.of(p, correct), [1] * 6, estimator, GradientStep(**nothing)) == 0
    assert shrinkage_of_unsampled(p, correct, [1] * 6, estimator, step=GradientStep(**nothing)) == 0
    for found in (
        mass_change(Outcomes.of(p, correct), 8, estimator, GradientStep(**nothing)),
        mass_change(Outcomes.of(p, correct), 1, estimator),
    ):
        assert found == (0, 0)
    p[0] = 0.0  # a correct outcome of no probability, the only one or not, makes no difference
    for all_or_nothing in (np.ones(6, bool), np.zeros(6, bool), np.arange(6) == 0, np.arange(6) != 0):
        found = mass_change(Outcomes.of(p / p.sum(), all_or_nothing), 8, estimator)
        assert found == (0, 0)


@pytest.mark.parametrize("estimator", ["group_mean", "grpo"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_mass_far_below_rounding_still_counts(estimator: Estimator, swap: bool) -> None:
    """With mass q of either kind, the groups with one of N rollouts of that kind are all that matters as q -> 0."""
    q, n = 1e-20, 16
    x = 1 / n
    spread = sqrt(x * (1 - x)) if estimator == "grpo" else 2 * x * (1 - x)
    change = spread * 2 * q  # Q_neg a + Q_pos b = (1 - q) q + q 1
    found = mass_change(Outcomes.of(np.array([1.0, q]), np.array([not swap, swap])), n, estimator)
    assert found[0] == pytest.approx(n * q * change, rel=1e-9, abs=0)
    assert found[1] == pytest.approx(n * q * change**2, rel=1e-9, abs=0)


def test_squared_gradient_equals_autograd(rng: np.random.Generator) -> None:
    for _ in range(100):
        case = random_case(rng)
        gradient = correct_mass_gradient(case, torch.tensor(case.p).log().requires_grad_())
        found = case.outcomes.squared_gradient
        assert sqrt(found) == pytest.approx(np.linalg.norm(gradient), rel=1e-9, abs=1e-14)
        assert 0 <= found <= 0.125 + 1e-15
    assert Outcomes.of([0.5, 0.5], np.array([True, False])).squared_gradient == 0.125


def test_lowered_outcomes_are_those_that_autograd_lowers(rng: np.random.Generator) -> None:
    num_lowered = num_raised = 0
    for _ in range(300):
        case = random_case(rng, skew=(0.1, 0.3, 1.0))
        logits = torch.tensor(case.p).log()
        step = torch.tensor(correct_mass_gradient(case, logits.requires_grad_()))
        change_V = torch.func.jvp(lambda z: torch.softmax(z, 0), (logits.detach(),), (step,))[1].numpy()
        clear_V = np.abs(change_V) > 1e-12 * case.p
        lowered_V = lowered_by_exact_gradient(case.outcomes)
        np.testing.assert_array_equal(lowered_V[clear_V], (case.correct & (change_V < 0))[clear_V])
        assert not (lowered_V & (~case.correct | (case.p == 0))).any()
        num_lowered += lowered_V.sum()
        num_raised += (case.correct & ~lowered_V).sum()
    assert num_lowered > 50
    assert num_raised > 50


def test_nothing_is_lowered_where_all_or_nothing_is_correct_and_zero_stays_zero() -> None:
    p = np.array([0.7, 0.3, 0.0])
    for correct in (np.ones(3, bool), np.zeros(3, bool)):
        assert not lowered_by_exact_gradient(Outcomes.of(p, correct)).any()
    # by hand: P_2 - (Q_pos / Q_neg) N_2 = .37 - 4 .04 = .21 for probabilities .6, .1, .1, 0 (correct) and .2
    lowered = lowered_by_exact_gradient(
        Outcomes.of([0.6, 0.1, 0.1, 0.0, 0.2], np.array([True, True, True, True, False]))
    )
    assert lowered.tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("estimator", ["group_mean", "grpo"])
def test_shrinkage_is_what_autograd_takes_from_every_unsampled_outcome(
    rng: np.random.Generator, estimator: Estimator
) -> None:
    signs, num_checked = set(), 0
    for _ in range(200):
        case = random_case(rng, skew=(0.3, 1.0))
        draw_N = rng.choice(case.p.size, int(rng.integers(2, 30)), p=case.p)
        count = np.bincount(draw_N, minlength=case.p.size)
        step, _ = trainer_step(case, draw_N, estimator)
        found = shrinkage_of_unsampled(case.p, case.correct, count, estimator, step=case.step)
        log_change_V = step - case.p @ step
        unsampled_V = (count == 0) & (case.p > 0)
        floor = 1e-14 * case.rewards["learning_rate"] * 3
        np.testing.assert_allclose(log_change_V[unsampled_V], found, rtol=1e-9, atol=floor)
        drawn = count > 0
        alone = shrinkage_of_unsampled(case.p[drawn], case.correct[drawn], count[drawn], estimator, step=case.step)
        assert alone == pytest.approx(found, rel=1e-10, abs=floor)
        num_checked += unsampled_V.sum()
        signs.add(np.sign(found))
    assert num_checked > 500
    assert signs == {-1, 0, 1}


HALF, ONE = np.array([0.5, 0.5]), np.array([True, False])
EVEN = Outcomes.of(HALF, ONE)


@each_row(
    ("call", "message"),
    [
        (
            lambda: mass_change_of_draw(EVEN, [1, 1], "ppo"),
            "one of reinforce, group_mean, grpo, got 'ppo'",
        ),
        (lambda: mass_change(EVEN, 4, "ppo"), "estimator must be one of reinforce"),
        (lambda: shrinkage_of_unsampled(HALF, ONE, [1, 1], "reinforce"), "one of group_mean, grpo, got 'reinforce'"),
        (lambda: mass_change(EVEN, 0, "grpo"), "num_rollouts must be"),
        (lambda: mass_change(Outcomes.of([0.5, 0.6], ONE), 4, "grpo"), "add up to 1"),
        (
            lambda: mass_change(EVEN, 4, "grpo", GradientStep(reward_correct=-1)),
            "reward_correct >= 0 >= reward_wrong",
        ),
        (
            lambda: mass_change_of_draw(EVEN, [1, 1], "grpo", GradientStep(learning_rate=-1)),
            "learning_rate must be positive",
        ),
        (
            lambda: shrinkage_of_unsampled(HALF, ONE, [1, 1], step=GradientStep(reward_wrong=1)),
            "reward_correct >= 0 >= reward_wrong",
        ),
        (
            lambda: mass_change_of_draw(EVEN, [1, 1, 1], "grpo"),
            r"count must contain 2 whole .* shape \(3,\)",
        ),
        (
            lambda: mass_change_of_draw(EVEN, ONE, "grpo"),
            "count must contain 2 whole numbers.* got bool",
        ),
        (lambda: mass_change_of_draw(EVEN, [0.5, 1], "grpo"), "count must contain whole numbers >= 0"),
        (lambda: mass_change_of_draw(EVEN, [-1, 3], "grpo"), "count must contain whole numbers >= 0"),
        (lambda: mass_change_of_draw(EVEN, [0, 0], "grpo"), "not all 0"),
        (lambda: mass_change_of_draw(EVEN, [1, np.inf], "grpo"), "count must contain whole numbers"),
        (lambda: shrinkage_of_unsampled([0.5, 1.5], ONE, [1, 1]), "p must be .* between 0 and 1"),
        (lambda: shrinkage_of_unsampled([0.5, np.nan], ONE, [1, 1]), "apply exp to log-probs"),
        (lambda: shrinkage_of_unsampled([[0.5, 0.5]], ONE, [1, 1]), "one row of probabilities"),
        (lambda: shrinkage_of_unsampled(HALF, [0, 1], [1, 1]), "correct must be a boolean mask"),
        (lambda: lowered_by_exact_gradient(Outcomes.of(HALF, [0])), "correct must be a boolean mask"),
    ],
)
def test_refuses_in_one_line_what_it_cannot_use(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
