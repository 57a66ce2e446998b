"""The simulator against torch (gradient, optimizers, whole runs), the mass balance, and the laws of the draws."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from brorl.errors import DivergedError
from brorl.seeds import seed_sequence
from brorl.theory.simulator import (
    Optimizer,
    SimulationSettings,
    draw_outcomes,
    initial_logits,
    simulate,
    surrogate_gradient,
)
from each_row import each_row

SMALL = SimulationSettings(vocabulary_size=60, num_correct=4, rollouts=16, steps=30, record_every=1)


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.tensor(logits), 0).numpy()


def loss(logit_V: torch.Tensor, draws: list[int], settings: SimulationSettings) -> torch.Tensor:
    """The surrogate as the paper writes it, draw by draw."""
    rewards = [settings.reward_correct if t < settings.num_correct else settings.reward_wrong for t in draws]
    baseline = sum(rewards) / len(rewards) if settings.baseline == "mean" else 0.0
    probabilities = torch.softmax(logit_V, 0)
    seen: set[int] = set()
    total = torch.zeros((), dtype=torch.float64)
    for token, reward in zip(draws, rewards, strict=True):
        if settings.duplicates == "distinct" and token in seen:
            continue
        seen.add(token)
        p = probabilities[token]
        factor = p if settings.surrogate == "probability" else p / p.detach()
        total = total - (reward - baseline) * factor / len(draws)
    return total


def make_torch_optimizer(logit_V: torch.Tensor, settings: SimulationSettings) -> torch.optim.Optimizer:
    """torch's own, its defaults left to torch wherever the settings leave them open."""
    options: dict[str, Any] = {"lr": settings.learning_rate}
    if settings.weight_decay is not None:
        options["weight_decay"] = settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD([logit_V], **options)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind([logit_V], eps=settings.epsilon, **options)


@pytest.mark.parametrize("duplicates", ["counted", "distinct"])
@pytest.mark.parametrize("baseline", ["mean", "none"])
@pytest.mark.parametrize("surrogate", ["probability", "ratio"])
def test_gradient_is_autograd_of_the_surrogate(
    rng: np.random.Generator, surrogate: Any, baseline: Any, duplicates: Any
) -> None:
    low, high = np.sort(rng.normal(size=2))
    settings = replace(
        SMALL,
        num_correct=30,
        surrogate=surrogate,
        baseline=baseline,
        duplicates=duplicates,
        reward_correct=float(high),
        reward_wrong=float(low),
    )
    logits = torch.tensor(rng.normal(size=60) * 2, requires_grad=True)
    p_V = softmax(logits.detach().numpy())
    draws = rng.choice(60, 90, p=p_V).tolist()
    assert len(set(draws)) < len(draws)
    counts = sorted(Counter(draws).items())
    gradient = rng.normal(size=60)  # what the buffer held before must not matter
    surrogate_gradient(p_V, np.array([t for t, _ in counts]), np.array([c for _, c in counts]), settings, out=gradient)
    loss(logits, draws, settings).backward()
    assert logits.grad is not None
    np.testing.assert_allclose(gradient, logits.grad.numpy(), rtol=1e-11, atol=1e-15)


def test_gradient_is_exactly_0_where_all_draws_are_of_one_kind() -> None:
    """Then Adam must not move; its first step would blow rounding errors up to the learning rate."""
    settings = replace(SMALL, reward_correct=0.3, reward_wrong=-0.1)
    for tokens in ([0, 1, 3], [4, 25, 59]):
        gradient = np.ones(60)
        surrogate_gradient(np.full(60, 1 / 60), np.array(tokens), np.array([1, 3, 2]), settings, out=gradient)
        assert not gradient.any()


@pytest.mark.parametrize("weight_decay", [None, 0.0, 0.3])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_optimizers_are_those_of_torch_step_by_step(
    rng: np.random.Generator, optimizer: Any, weight_decay: float | None
) -> None:
    epsilon = 1e-8 if weight_decay is None else 1e-5
    settings = replace(SMALL, optimizer=optimizer, weight_decay=weight_decay, epsilon=epsilon, learning_rate=0.05)
    ours = rng.normal(size=60)
    theirs = torch.tensor(ours.copy(), requires_grad=True)
    optimizer_ours, optimizer_theirs = Optimizer(settings), make_torch_optimizer(theirs, settings)
    scale_V = 10.0 ** rng.uniform(-11, 0, 60)  # far below and far above epsilon
    for _ in range(40):
        gradient = rng.normal(size=60) * scale_V * (rng.random(60) < 0.7)
        theirs.grad = torch.tensor(gradient.copy())
        optimizer_theirs.step()
        optimizer_ours.update(ours, gradient)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=2e-14)


CHANGES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "ratio, no baseline, sgd": {"surrogate": "ratio", "baseline": "none", "optimizer": "sgd", "learning_rate": 0.3},
    "distinct, adam, decay, correct anchor": {
        "duplicates": "distinct",
        "optimizer": "adam",
        "weight_decay": 1e-6,
        "anchor": "correct",
    },
    "noise, more draws than tokens": {"init": "normal", "init_spread": 0.2, "rollouts": 120, "vocabulary_size": 90},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_a_run_is_that_of_plain_loops_and_torch(rng: np.random.Generator, changes: dict[str, Any]) -> None:
    base = SimulationSettings(  # many correct tokens and few draws, so that some tokens rise and some fall
        vocabulary_size=300,
        num_correct=60,
        rollouts=12,
        steps=8,
        anchor="none",
        learning_rate=0.02,
        epsilon=1e-5,
        seed=int(rng.integers(1 << 30)),
        record_every=3,
    )
    settings = replace(base, **changes)
    result = simulate(settings)

    draws_rng = np.random.default_rng([settings.seed, 1])
    logits = torch.tensor(initial_logits(settings), requires_grad=True)
    optimizer = make_torch_optimizer(logits, settings)
    start = torch.softmax(logits.detach(), 0).tolist()
    expected = []
    for step in range(settings.steps + 1):
        p = torch.softmax(logits.detach(), 0).tolist()
        if step in (0, 3, 6, 8):
            mass, improved, worst = 0.0, 0, 0.0
            for token in range(settings.num_correct):
                mass += p[token]
                improved += p[token] > start[token]
                worst = min(worst, p[token] - start[token])
            expected.append((step, mass, improved / settings.num_correct, worst))
        tokens, counts = draw_outcomes(draws_rng, np.array(p), settings.rollouts)
        optimizer.zero_grad()
        loss(logits, np.repeat(tokens, counts).tolist(), settings).backward()
        optimizer.step()
    ours = np.stack([result.step, result.correct_mass, result.fraction_improved, result.worst_drop], axis=1)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)
    assert result.settings == settings
    assert 0 < result.fraction_improved[-1] < 1
    assert result.worst_drop[-1] < 0


def test_terms_of_the_first_step_add_up_to_the_gradient_step_of_the_theorem(rng: np.random.Generator) -> None:
    """By autograd: a step of gradient descent on -(1/N) sum_j R_j p_j over the distinct drawn tokens."""
    settings = SimulationSettings(
        rollouts=40, vocabulary_size=90, num_correct=20, steps=3, learning_rate=0.1, init="normal", init_spread=1.0,
        reward_correct=0.75, reward_wrong=-0.5, seed=int(rng.integers(1 << 30)),
    )  # fmt: skip
    logit_V = torch.tensor(initial_logits(settings), requires_grad=True)
    p_V = logit_V.softmax(0)
    token_K, _ = draw_outcomes(
        np.random.default_rng(seed_sequence(settings.seed, 1)), p_V.detach().numpy(), settings.rollouts
    )
    reward_K = torch.where(torch.from_numpy(token_K) < 20, 0.75, -0.5)
    (gradient_V,) = torch.autograd.grad(-(reward_K * p_V[token_K]).sum() / 40, logit_V, retain_graph=True)
    (of_mass_V,) = torch.autograd.grad(p_V[:20].sum(), logit_V)
    terms = simulate(settings).first_step
    assert terms is not None
    assert terms.total == pytest.approx(float(-0.1 * gradient_V @ of_mass_V), rel=1e-9)
    missed_V = np.setdiff1d(np.arange(90), token_K)
    squares = float((p_V.detach()[missed_V] ** 2).sum())
    assert terms.u_pos_2 + terms.u_neg_2 == pytest.approx(squares, rel=1e-9)
    assert simulate(replace(settings, reward_wrong=0.25)).first_step is None


def test_initial_logits() -> None:
    """A wrong anchor gives the start of the paper's Figure 3."""
    paper = SimulationSettings()
    assert (paper.vocabulary_size, paper.num_correct, paper.steps) == (128_000, 10_000, 1000)
    correct, one, anchor = math.exp(3), 1.0, math.exp(5)
    masses = {
        "wrong": 10_000 * correct / (10_000 * correct + anchor + 117_999 * one),
        "correct": (9_999 * correct + anchor) / (9_999 * correct + anchor + 118_000 * one),
        "none": 10_000 * correct / (10_000 * correct + 118_000 * one),
    }
    for where, expected in masses.items():
        p_V = softmax(initial_logits(replace(paper, anchor=where)))  # type: ignore[arg-type]
        assert p_V[:10_000].sum() == pytest.approx(expected, rel=1e-12)
    smallest = replace(paper, vocabulary_size=2, num_correct=1)
    logits = {where: initial_logits(replace(smallest, anchor=where)).tolist() for where in masses}  # type: ignore[arg-type]
    assert logits == {"wrong": [3, 5], "correct": [5, 0], "none": [3, 0]}
    assert round(masses["wrong"], 4) == 0.6296
    assert round(masses["correct"], 4) == 0.6301


def test_noise_in_the_initial_logits_depends_on_the_seed_alone(rng: np.random.Generator) -> None:
    seed = int(rng.integers(1 << 30))
    settings = SimulationSettings(init="normal", init_spread=0.7, seed=seed)
    noise = initial_logits(settings) - initial_logits(replace(settings, init="seeded", init_spread=0.0))
    assert np.array_equal(initial_logits(replace(settings, rollouts=4)), initial_logits(settings))
    assert not np.array_equal(initial_logits(replace(settings, seed=seed + 1)), initial_logits(settings))
    assert stats.kstest(noise / 0.7, "norm").pvalue > 1e-8
    assert stats.kstest(noise[:10_000] / 0.7, "norm").pvalue > 1e-8


@pytest.mark.parametrize("num_draws", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 12, 40))])
def test_draws_are_iid_from_p(rng: np.random.Generator, num_draws: int) -> None:
    """Counts, their variances and the number of distinct tokens; below and above V draws."""
    p_V = np.array([0.0, 0.3, 0.05, 0.0, 0.2, 0.1, 0.15, 0.01, 0.04, 0.1, 0.05, 0.0])
    repeats = 6000
    count_RV = np.zeros((repeats, 12), int)
    for row in count_RV:
        tokens, counts = draw_outcomes(rng, p_V, num_draws)
        assert (np.diff(tokens) > 0).all()
        assert (counts > 0).all()
        row[tokens] = counts
    assert (count_RV.sum(axis=1) == num_draws).all()
    possible = p_V > 0
    assert not count_RV[:, ~possible].any()
    expected_V = repeats * num_draws * p_V[possible]
    chi_square = ((count_RV.sum(axis=0)[possible] - expected_V) ** 2 / expected_V).sum()
    assert chi_square < stats.chi2.isf(1e-8, possible.sum() - 1)

    # Independence: pairs of draws agree as often as sum p^2 says; the estimate's own spread sets the bound.
    agree_R = (count_RV * (count_RV - 1)).sum(axis=1) / (num_draws * (num_draws - 1))
    assert abs(agree_R.mean() - (p_V**2).sum()) < 6 * agree_R.std() / math.sqrt(repeats)
    distinct_R = (count_RV > 0).sum(axis=1)
    expected = (1 - (1 - p_V) ** num_draws).sum()
    assert abs(distinct_R.mean() - expected) < 6 * distinct_R.std() / math.sqrt(repeats) + 1e-12


@pytest.mark.parametrize(("gaps", "token"), [([1.0, 0, 0, 0], 2), ([0, 0, 0, 1.0], 1)])
def test_a_quantile_of_0_or_1_falls_on_a_token_that_is_possible(gaps: list[float], token: int) -> None:
    """Both can come out of rounding, where the first and the last tokens have no probability."""

    class Gaps:
        def standard_exponential(self, size: int) -> np.ndarray:
            assert size == len(gaps)
            return np.array(gaps)

    tokens, counts = draw_outcomes(Gaps(), np.array([0.0, 0.25, 0.75, 0.0, 0.0]), 3)  # type: ignore[arg-type]
    assert tokens.tolist() == [token]
    assert counts.tolist() == [3]


def test_more_draws_than_memory_holds(rng: np.random.Generator) -> None:
    num_draws, p_V = 10**13, np.array([0.2, 0.5, 0.0, 0.3])
    tokens, counts = draw_outcomes(rng, p_V, num_draws)
    assert tokens.tolist() == [0, 1, 3]
    assert counts.sum() == num_draws
    assert counts / num_draws == pytest.approx(p_V[tokens], abs=1e-5)


def test_seeds_reproduce_bitwise_and_records_do_not_disturb(rng: np.random.Generator) -> None:
    settings = replace(SMALL, seed=int(rng.integers(1 << 30)), init="normal", init_spread=0.3)
    first, again, other = simulate(settings), simulate(settings), simulate(replace(settings, seed=settings.seed + 1))
    sparse = simulate(replace(settings, record_every=11))
    assert sparse.step.tolist() == [0, 11, 22, 30]
    for name in ("correct_mass", "fraction_improved", "worst_drop"):
        values = getattr(first, name)
        assert values.tobytes() == getattr(again, name).tobytes()
        assert values[sparse.step].tobytes() == getattr(sparse, name).tobytes()
    assert not np.array_equal(first.correct_mass, other.correct_mass)


@pytest.mark.slow
def test_order_of_figure_3_on_a_twentieth_of_the_vocabulary(rng: np.random.Generator) -> None:
    """The same N/V as the paper's 40, 512 and 51,200; epsilon goes with the size of the gradients, 1/V^2."""
    settings = SimulationSettings(vocabulary_size=6400, num_correct=500, epsilon=4e-6, anchor="none", record_every=1000)
    for seed in rng.integers(1 << 30, size=2).tolist():
        few, some, many = (simulate(replace(settings, rollouts=n, seed=seed)) for n in (2, 26, 2560))
        start = many.correct_mass[0]
        assert few.correct_mass[-1] < start - 0.008
        assert start + 0.001 < some.correct_mass[-1] < many.correct_mass[-1] - 0.008
        fractions = [r.fraction_improved[-1] for r in (few, some, many)]
        assert all(a + 0.1 < b for a, b in pairwise(fractions))
        assert fractions[-1] == 1
        assert few.worst_drop[-1] < 0
        assert some.worst_drop[-1] < 0
        assert many.worst_drop[-1] == 0


@pytest.mark.slow
def test_sgd_gains_the_same_mass_at_every_n(rng: np.random.Generator) -> None:
    """What makes small N lose mass is Adam: by plain gradient steps the mean gain is (1 - 1/N) of the limit."""
    settings = SimulationSettings(
        vocabulary_size=1280, num_correct=100, optimizer="sgd", learning_rate=1.0, anchor="none", record_every=1000
    )
    gains = {
        n: [
            np.ptp(simulate(replace(settings, rollouts=n, seed=seed)).correct_mass[[0, -1]])
            for seed in rng.integers(1 << 30, size=2).tolist()
        ]
        for n in (4, 512)
    }
    few, many = np.mean(gains[4]), np.mean(gains[512])
    assert few / many == pytest.approx((1 - 1 / 4) / (1 - 1 / 512), abs=0.06)


def test_logits_beyond_the_range_of_exp(rng: np.random.Generator) -> None:
    settings = replace(SMALL, init="normal", init_spread=1e4, seed=int(rng.integers(1 << 30)), steps=1)
    mass = simulate(settings).correct_mass
    assert mass[0] == pytest.approx(softmax(initial_logits(settings))[:4].sum(), abs=1e-12)
    assert 0 <= mass[1] <= 1 + 1e-12


def test_logits_that_overflow_stop_the_run_in_one_line() -> None:
    settings = replace(SMALL, optimizer="sgd", surrogate="ratio", learning_rate=1e300, reward_correct=1e10)
    with pytest.raises(DivergedError, match=r"no longer finite after step \d+; set a lower learning_rate"):
        simulate(settings)


@each_row(
    ("changes", "message"),
    [
        ({"rollouts": 0}, "rollouts must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"vocabulary_size": 1}, "vocabulary_size must be at least 2"),
        ({"num_correct": 0}, "num_correct must be at least 1"),
        ({"num_correct": 60}, "num_correct must be below vocabulary_size 60"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"record_every": 0}, "record_every must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number, got nan"),
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"weight_decay": float("inf")}, "weight_decay must be a finite number, got inf"),
        ({"reward_correct": -1.0}, "reward_correct must be above reward_wrong, got -1.0 and -1.0"),
        ({"init": "normal"}, "init_spread must be above 0 with init normal"),
        ({"init_spread": 0.5}, "0 with init seeded; got 0.5 with init seeded"),
        ({"init": "normal", "init_spread": -1.0}, "got -1.0 with init normal"),
        ({"init_spread": -1.0}, "got -1.0 with init seeded"),
        ({"anchor": "right"}, "anchor must be one of wrong, correct, none, got right"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw, adam, sgd, got lion"),
    ],
)
def test_settings_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        replace(SMALL, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_default_weight_decay_is_that_of_torch() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    for name, kind in (("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)):
        expected = kind([parameter], lr=1e-3).param_groups[0]["weight_decay"]
        assert replace(SMALL, optimizer=name).decay == expected
        assert replace(SMALL, optimizer=name, weight_decay=0.2).decay == 0.2
