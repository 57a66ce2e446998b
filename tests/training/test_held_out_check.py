"""The held-out check: exact mean over all draws, and coverage of its intervals by simulation."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import binomtest

from brorl.training.held_out_check import HeldOut, binomial_interval, check_on_held_out
from exact_model import ExactModel


def updated(rng: np.random.Generator, model: ExactModel, size: float) -> ExactModel:
    """The same model with every next-token logit moved a little."""
    moved = {}
    for prefix, p in model.next_token.items():
        q = p * np.exp(rng.normal(0, size, p.size))
        moved[prefix] = q / q.sum()
    return replace(model, next_token=moved)


def exact(rng: np.random.Generator, vocabulary: int, length: int, size: float):
    """Probabilities of all responses before and after an update that leans toward correct ones, and their verdicts."""
    old = ExactModel.random(rng, vocabulary, length)
    new = updated(rng, old, size)
    p = np.array([mass for _, mass in old.responses()])
    q = np.array([mass for _, mass in new.responses()])
    right = rng.permutation(p.size) < max(1, p.size // 3)
    q = q * np.where(right, 1 + size, 1)
    return p, q / q.sum(), right


def held_out(count: np.ndarray, p: np.ndarray, q: np.ndarray, right: np.ndarray, baseline: float) -> HeldOut:
    seen = count > 0
    return HeldOut(count[seen], right[seen], np.log(p[seen]), np.log(q[seen]), baseline)


@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_over_all_draws_is_the_real_change(rng: np.random.Generator, size: int) -> None:
    p, q, right = exact(rng, vocabulary=3, length=2, size=0.5)
    mean = 0.0
    for draw in product(range(p.size), repeat=size):
        count = np.bincount(draw, minlength=p.size)
        mean += float(np.prod(p[list(draw)])) * check_on_held_out([held_out(count, p, q, right, 0.37)]).change
    assert mean == pytest.approx(float((q - p)[right].sum()), abs=1e-12)


def test_it_equals_plain_loops_over_the_rollouts(rng: np.random.Generator) -> None:
    prompts, values, weights, risen, drops, logs = [], [], [], [], [], []
    for _ in range(5):
        p, q, right = exact(rng, vocabulary=4, length=2, size=0.4)
        baseline, size = rng.random(), int(rng.integers(4, 12))
        drawn = rng.choice(p.size, size, p=p)
        drawn[0] = np.flatnonzero(right)[0]
        prompts.append(held_out(np.bincount(drawn, minlength=p.size), p, q, right, baseline))
        w = [q[y] / p[y] for y in drawn]
        values.append([(float(right[y]) - baseline) * (v - 1) for y, v in zip(drawn, w, strict=True)])
        weights += w
        risen += [q[y] > p[y] for y in drawn if right[y]]
        drops += [q[y] - p[y] for y in drawn if right[y]]
        logs += [np.log(q[y] / p[y]) for y in drawn if right[y]]
    check = check_on_held_out(prompts)
    change = np.mean([np.mean(v) for v in values])
    error = np.sqrt(sum(np.var(v, ddof=1) / len(v) for v in values)) / 5
    assert check.change == pytest.approx(change, abs=1e-13)
    assert check.change_high - check.change == pytest.approx(1.959963985 * error, rel=1e-8)
    assert check.change - check.change_low == pytest.approx(1.959963985 * error, rel=1e-8)
    assert check.fraction_improved == pytest.approx(np.mean(risen))
    assert (check.worst_drop, check.worst_log_ratio) == (
        pytest.approx(min(0, *drops, 0), abs=1e-15),
        pytest.approx(min(logs)),
    )
    assert (check.num_prompts, check.num_rollouts, check.num_correct) == (5, len(weights), len(risen))
    assert check.effective_fraction == pytest.approx(sum(weights) ** 2 / (len(weights) * sum(w**2 for w in weights)))


def hits(rng: np.random.Generator, models: list, rollouts: int, draws: int) -> tuple[float, float]:
    """How often the intervals of the change and of the fraction improved hold the truth, over draws of prompts."""
    change = np.mean([(q - p)[right].sum() for p, q, right in models])
    fraction = sum(p[right & (q > p)].sum() for p, q, right in models) / sum(p[right].sum() for p, _, right in models)
    counts = [rng.multinomial(rollouts, p, size=draws) for p, _, _ in models]
    checks = [
        check_on_held_out([held_out(c[i], *m, 0.3) for c, m in zip(counts, models, strict=True)]) for i in range(draws)
    ]
    return (
        float(np.mean([f.change_low <= change <= f.change_high for f in checks])),
        float(np.mean([f.fraction_improved_low <= fraction <= f.fraction_improved_high for f in checks])),
    )


@pytest.mark.slow
def test_intervals_over_many_prompts_hold_the_truth_as_often_as_they_say(rng: np.random.Generator) -> None:
    models = [exact(rng, vocabulary=5, length=2, size=0.3) for _ in range(48)]
    change, fraction = hits(rng, models, rollouts=8, draws=500)
    five_sigma = 5 * np.sqrt(0.05 * 0.95 / 500)
    assert 0.91 - five_sigma <= change <= 0.99 + five_sigma
    assert fraction >= 0.95 - five_sigma


@pytest.mark.slow
def test_intervals_of_one_prompt_hold_the_truth_nearly_as_often_in_the_mean(rng: np.random.Generator) -> None:
    """The normal interval of one prompt depends on how skewed its responses are; the exact binomial one does not."""
    models = [exact(rng, vocabulary=5, length=2, size=0.3) for _ in range(80)]
    coverage_of_models = np.array([hits(rng, [model], rollouts=64, draws=80) for model in models])
    error = coverage_of_models.std(0) / np.sqrt(len(models))
    assert 0.91 - 5 * error[0] <= coverage_of_models[:, 0].mean() <= 0.99
    assert coverage_of_models[:, 1].mean() >= 0.95 - 5 * error[1]


def test_training_rollouts_would_flatter_the_update(rng: np.random.Generator) -> None:
    """Why they must be held out: one policy-gradient step looks better on the rollouts that it was made from."""
    p = rng.dirichlet(np.ones(200))
    right = np.arange(200) < 60
    on_training, on_held_out = [], []
    for _ in range(400):
        train, fresh = rng.multinomial(16, p), rng.multinomial(16, p)
        advantage = right - train[right].sum() / 16
        logits = np.log(p) + 2.0 * (train * advantage - p * (train @ advantage)) / 16
        q = np.exp(logits - logits.max())
        q /= q.sum()
        on_training.append(check_on_held_out([held_out(train, p, q, right, 0.3)]).change - (q - p)[right].sum())
        on_held_out.append(check_on_held_out([held_out(fresh, p, q, right, 0.3)]).change - (q - p)[right].sum())
    error = np.std(on_held_out) / 20
    assert np.mean(on_training) > 5 * error
    assert abs(np.mean(on_held_out)) < 6 * error  # 2e-9 for a normal mean, below 1e-7 for the t of 400 values


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (7, 7), (1, 30), (13, 29), (499, 1000)])
def test_the_binomial_interval_is_scipys_exact_one(successes: int, trials: int) -> None:
    expected = binomtest(successes, trials).proportion_ci(0.95, "exact")
    assert binomial_interval(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_without_a_correct_rollout_nothing_is_said_about_correct_mass(rng: np.random.Generator) -> None:
    p, q, right = exact(rng, vocabulary=3, length=2, size=0.3)
    count = np.where(right, 0, 2)
    check = check_on_held_out([held_out(count, p, q, right, 0.0)])
    assert (check.fraction_improved, check.worst_drop, check.worst_log_ratio) == (None, None, None)
    assert (check.fraction_improved_low, check.fraction_improved_high) == (0, 1)
    assert check.change == 0


def test_too_few_rollouts_are_refused(rng: np.random.Generator) -> None:
    p, q, right = exact(rng, vocabulary=3, length=2, size=0.3)
    with pytest.raises(ValueError, match="at least 2 held-out rollouts"):
        check_on_held_out([held_out(np.eye(p.size, dtype=np.int64)[0], p, q, right, 0.0)])
    with pytest.raises(ValueError, match="at least one prompt"):
        check_on_held_out([])


def test_a_weight_beyond_the_floats_leaves_no_estimate_and_no_nan() -> None:
    old, new = np.full(4, -9000.0), np.array([-8000.0, -9000.0, -9500.0, -9100.0])
    check = check_on_held_out([HeldOut(np.ones(4, np.int64), np.array([True, False, False, True]), old, new, 0.5)])
    assert (check.change, check.change_low, check.change_high) == (None, None, None)
    assert check.fraction_improved == 0.5
    assert check.effective_fraction == pytest.approx(1 / 4)
    assert check.worst_log_ratio == -100
