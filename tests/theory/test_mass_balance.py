"""Mass balance against autograd softmax steps, exact fractions, and enumeration of all draws."""

from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from brorl.theory.mass_balance import mass_balance


class Case(NamedTuple):
    p: np.ndarray
    correct: np.ndarray
    sampled: np.ndarray
    settings: dict[str, Any]


def surrogate_step(
    p: np.ndarray,
    correct: np.ndarray,
    sampled: np.ndarray,
    num_rollouts: int,
    reward_correct: float,
    reward_wrong: float,
    learning_rate: float,
) -> np.ndarray:
    """dz_j = (eta / N) p_j (R_j - S_R), with R_j = 0 where nothing was sampled; autograd gives the same (below)."""
    reward = np.where(sampled, np.where(correct, reward_correct, reward_wrong), 0.0)
    return learning_rate / num_rollouts * p / p.sum() * (reward - reward @ p / p.sum())


def random_case(rng: np.random.Generator, skew: tuple[float, ...] = (0.03, 0.3, 1.0, 10.0)) -> Case:
    """Between uniform probabilities and nearly all of the mass on one outcome; any mask, any rewards."""
    size = int(rng.integers(2, 51))
    p = rng.dirichlet(np.full(size, rng.choice(skew)))
    num_rollouts = int(rng.integers(1, 65))
    sampled = rng.multinomial(num_rollouts, p) > 0
    settings = {
        "num_rollouts": num_rollouts,
        "reward_correct": float(rng.choice([0.0, 1.0, rng.exponential()])),
        "reward_wrong": -float(rng.choice([0.0, 1.0, rng.exponential()])),
        "learning_rate": float(10 ** rng.uniform(-4, 2)),
    }
    return Case(p, rng.random(size) < rng.uniform(0.1, 0.9), sampled, settings)


def autograd_step(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """One gradient step on the surrogate loss, and the gradient of Q_pos, in the logits."""
    logits = torch.tensor(case.p).log().requires_grad_()
    p = torch.softmax(logits, 0)
    loss = torch.zeros((), dtype=torch.float64)
    for i in np.flatnonzero(case.sampled):
        loss = loss - case.settings["reward_correct" if case.correct[i] else "reward_wrong"] * p[int(i)]
    loss = loss / case.settings["num_rollouts"] + 0 * p.sum()
    (slope,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad((p * torch.tensor(case.correct)).sum(), logits)
    return -case.settings["learning_rate"] * slope.numpy(), gradient.numpy()


def correct_mass_change(p: np.ndarray, correct: np.ndarray, step: np.ndarray) -> float:
    """The real change of the correct mass, by exponentials."""
    moved = p * np.exp(step - step.max())
    return float((moved / moved.sum() - p / p.sum())[correct].sum())


def test_terms_are_the_shares_of_an_autograd_step(rng: np.random.Generator) -> None:
    """Each term is its outcomes' part of gradient . step; the parts of all outcomes are the first-order change."""
    for _ in range(150):
        case = random_case(rng)
        p, correct, sampled, settings = case
        step, gradient = autograd_step(case)
        balance = mass_balance(p, correct, sampled, **settings)
        scale = settings["learning_rate"] / settings["num_rollouts"]
        # Autograd itself rounds at the scale of the largest outcome, which a nearly certain outcome shows.
        floor = 1e-14 * scale * p.max() * (settings["reward_correct"] - settings["reward_wrong"])
        close = {"rel": 1e-9, "abs": floor}
        assert balance.sampled_correct_term == pytest.approx((gradient * step)[sampled & correct].sum(), **close)
        assert balance.sampled_wrong_term == pytest.approx((gradient * step)[sampled & ~correct].sum(), **close)
        assert balance.unsampled_term == pytest.approx((gradient * step)[~sampled].sum(), **close)
        assert balance.total == pytest.approx(gradient @ step, **close)
        np.testing.assert_allclose(surrogate_step(p, correct, sampled, **settings), step, rtol=1e-9, atol=floor)


def exact_parts(case: Case) -> dict[str, Fraction]:
    """Every field but the terms and the bound, by plain loops over exact fractions; and the exact total."""
    p = [Fraction(float(x)) for x in case.p]
    p = [x / sum(p) for x in p]
    reward = [Fraction(case.settings["reward_wrong"]), Fraction(case.settings["reward_correct"])]
    part = dict.fromkeys(["q_pos", "q_neg", "p_pos", "p_neg", "a_2", "b_2", "u_pos_2", "u_neg_2"], Fraction(0))
    for x, correct, sampled in zip(p, case.correct, case.sampled, strict=True):
        part["q_pos" if correct else "q_neg"] += x
        if sampled:
            part["p_pos" if correct else "p_neg"] += x
            part["a_2" if correct else "b_2"] += x**2
        else:
            part["u_pos_2" if correct else "u_neg_2"] += x**2
    part["s_r"] = reward[1] * part["p_pos"] + reward[0] * part["p_neg"]
    scale = Fraction(case.settings["learning_rate"]) / case.settings["num_rollouts"]
    reward_of = [reward[int(c)] if s else 0 for c, s in zip(case.correct, case.sampled, strict=True)]
    step = [scale * x * (r - part["s_r"]) for x, r in zip(p, reward_of, strict=True)]
    mean_step = sum(x * dz for x, dz in zip(p, step, strict=True))
    part["total"] = sum(x * (dz - mean_step) for x, dz, c in zip(p, step, case.correct, strict=True) if c) + Fraction(0)
    return part


def test_fields_and_total_equal_exact_fractions_however_skewed(rng: np.random.Generator) -> None:
    """Here nothing rounds in the reference, so a nearly certain outcome is held to the same digits."""
    for _ in range(30):
        case = random_case(rng)
        balance, exact = mass_balance(case.p, case.correct, case.sampled, **case.settings), exact_parts(case)
        terms = (balance.sampled_correct_term, balance.sampled_wrong_term, balance.unsampled_term)
        assert balance.total == pytest.approx(float(exact.pop("total")), rel=1e-9, abs=1e-13 * np.abs(terms).sum())
        assert balance.s_r == pytest.approx(float(exact.pop("s_r")), rel=1e-12, abs=1e-14)
        for name, value in exact.items():
            assert getattr(balance, name) == pytest.approx(float(value), rel=1e-12, abs=1e-300), name


def test_the_bound_holds_at_any_step_size_and_is_the_stated_formula(rng: np.random.Generator) -> None:
    for _ in range(1000):
        p, correct, sampled, settings = random_case(rng)
        settings["learning_rate"] = float(10 ** rng.uniform(-3, 4))
        balance = mass_balance(p, correct, sampled, **settings)
        step = surrogate_step(p, correct, sampled, **settings)
        error = abs(correct_mass_change(p, correct, step) - balance.total)
        assert error <= balance.remainder_bound + 1e-13 * (1 + abs(balance.total))
        spread = settings["reward_correct"] - settings["reward_wrong"]
        bound = settings["learning_rate"] ** 2 * max(p) ** 2 * spread**2 / (8 * settings["num_rollouts"] ** 2)
        assert balance.remainder_bound == pytest.approx(bound, rel=1e-12, abs=0)


def test_sampled_terms_are_never_negative_and_the_unsampled_one_can_be(rng: np.random.Generator) -> None:
    unsampled = []
    for _ in range(1000):
        case = random_case(rng)
        balance = mass_balance(case.p, case.correct, case.sampled, **case.settings)
        assert balance.sampled_correct_term >= 0
        assert balance.sampled_wrong_term >= 0
        unsampled.append(balance.unsampled_term)
    assert min(unsampled) < 0 < max(unsampled)


@pytest.mark.parametrize("sampled_is_correct", [False, True])
def test_a_mass_far_below_rounding_keeps_its_digits(sampled_is_correct: bool) -> None:
    """By hand, with q the other mass, unsampled: |R - S_R| = q, so either part is q q 1^2."""
    q, sampled = 1e-20, np.array([True, False])
    balance = mass_balance(np.array([1.0, q]), sampled == sampled_is_correct, sampled, num_rollouts=1)
    terms = {True: balance.sampled_correct_term, False: balance.sampled_wrong_term}
    assert terms[sampled_is_correct] == pytest.approx(q**2, rel=1e-12, abs=0)
    assert terms[not sampled_is_correct] == 0
    assert balance.unsampled_term == pytest.approx(q**2, rel=1e-12, abs=0)


@pytest.mark.parametrize("all_correct", [False, True])
def test_no_change_where_all_or_nothing_is_correct(rng: np.random.Generator, all_correct: bool) -> None:
    for _ in range(20):
        p, _, sampled, settings = random_case(rng)
        balance = mass_balance(p, np.full(p.size, all_correct), sampled, **settings)
        assert balance.total == 0
        assert (balance.q_pos, balance.q_neg) == pytest.approx((float(all_correct), float(not all_correct)), abs=1e-14)


def enumerate_draws(p: np.ndarray, num_rollouts: int) -> list[tuple[float, np.ndarray]]:
    """Every sequence of N draws, as its probability and the mask of what it sampled."""
    draws = []
    for sequence in product(range(p.size), repeat=num_rollouts):
        sampled = np.zeros(p.size, bool)
        sampled[list(sequence)] = True
        draws.append((float(np.prod(p[list(sequence)])), sampled))
    return draws


@pytest.mark.parametrize(("size", "num_rollouts"), [(2, 1), (2, 6), (3, 4), (4, 1), (4, 5)])
def test_lemma_2_equals_enumeration(rng: np.random.Generator, size: int, num_rollouts: int) -> None:
    """E[U_2] = sum of p^2 (1 - p)^N; and the expected change is never negative, whatever N."""
    for skew in (0.2, 1.0):
        p, correct = rng.dirichlet(np.full(size, skew)), np.arange(size) < rng.integers(0, size + 1)
        draws = enumerate_draws(p, num_rollouts)
        for mask in (correct, ~correct):
            expected = sum(chance * sum(p[~sampled & mask] ** 2) for chance, sampled in draws)
            assert sum((p**2 * (1 - p) ** num_rollouts)[mask]) == pytest.approx(expected, rel=1e-11, abs=1e-15)
        totals = [mass_balance(p, correct, sampled, num_rollouts=num_rollouts).total for _, sampled in draws]
        assert sum(chance * total for (chance, _), total in zip(draws, totals, strict=True)) >= -1e-16
