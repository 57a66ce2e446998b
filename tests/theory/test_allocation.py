"""Spreading rollouts over prompts, against integrals, simulations and brute force."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import beta as beta_function

from brorl.theory.allocation import AdaptiveAllocation, allocate_rollouts, fit_prior, next_rollout_gains
from brorl.theory.pass_rates import PassRates

Rng = np.random.Generator


def random_prior(rng: Rng) -> PassRates:
    never, always, _ = rng.dirichlet([1, 1, 3])
    return PassRates(float(rng.uniform(0.2, 3)), float(rng.uniform(0.2, 6)), float(never), float(always))


def moment(prior: PassRates, successes: int, failures: int) -> float:
    """E[p^successes (1 - p)^failures] by numerical integration; the weight has the Beta's poles."""
    poles = (prior.a - 1, prior.b - 1)
    integral, _ = quad(lambda p: p**successes * (1 - p) ** failures, 0, 1, weight="alg", wvar=poles, epsabs=1e-13)
    spikes = prior.never * (successes == 0) + prior.always * (failures == 0)
    return float(spikes + (1 - prior.never - prior.always) * integral / beta_function(prior.a, prior.b))


def chance(n: int, k: int, more: int, prior: PassRates) -> float:
    """Chance that more rollouts bring the outcome that is missing, by integration."""
    if 0 < k < n:
        return 0.0
    if k == 0:
        return 1 - moment(prior, 0, n + more) / moment(prior, 0, n)
    return 1 - moment(prior, n + more, 0) / moment(prior, n, 0)


def draw_pass_rates(prior: PassRates, size: int, rng: Rng) -> np.ndarray:
    kind = rng.choice(3, size, p=[prior.never, prior.always, 1 - prior.never - prior.always])
    return np.where(kind == 2, rng.beta(prior.a, prior.b, size), kind)


def test_chances_equal_integrals(rng: Rng) -> None:
    for _ in range(30):
        prior, n = random_prior(rng), int(rng.integers(1, 20))
        for k in (0, n):
            gains = next_rollout_gains(n, k, 40, prior)
            expected = [chance(n, k, more, prior) for more in range(1, 41)]
            np.testing.assert_allclose(np.cumsum(gains), expected, rtol=1e-7, atol=1e-10)
            assert (np.diff(gains) <= 0).all()


def test_chances_equal_the_share_in_a_simulation(rng: Rng) -> None:
    prior, n, more, groups = PassRates(0.4, 2.0, 0.2, 0.1), 6, 10, 400_000
    p = draw_pass_rates(prior, groups, rng)
    pilot = rng.binomial(n, p)
    later = rng.binomial(more, p)
    for k, became in ((0, later > 0), (n, later < more)):
        among = pilot == k
        expected = next_rollout_gains(n, k, more, prior).sum()
        sigma = np.sqrt(expected * (1 - expected) / among.sum())
        assert abs(became[among].mean() - expected) < 6 * sigma


def test_nothing_is_to_be_won_in_a_mixed_group_or_a_pass_rate_is_certain() -> None:
    prior = PassRates(0.5, 0.5, 0.1, 0.1)
    assert not next_rollout_gains(5, 2, 4, prior).any()
    assert next_rollout_gains(5, 5, 4, prior).all()
    assert next_rollout_gains(5, 0, 0, prior).size == 0
    certain = PassRates(1.0, 1.0, 0.5, 0.5)
    assert not next_rollout_gains(5, 0, 4, certain).any()
    assert not next_rollout_gains(5, 5, 4, certain).any()
    # With more rollouts than floating point can tell from none, the chance of the Beta is 0 and not nan.
    assert not next_rollout_gains(1000, 1000, 4, PassRates(1e-3, 1e4)).any()


@pytest.mark.parametrize(("n", "k"), [(4, 5), (4, -1), (0, 0)])
def test_outcomes_that_cannot_be_are_refused(n: int, k: int) -> None:
    with pytest.raises(ValueError, match="num_correct must be between 0 and num_rollouts"):
        next_rollout_gains(n, k, 3, PassRates(1.0, 1.0))


@pytest.mark.parametrize("samples_per_prompt", [1, 9])
def test_a_budget_that_cannot_be_spent_is_refused(samples_per_prompt: int) -> None:
    with pytest.raises(ValueError, match=f"between 2 and max_rollouts = 8, not {samples_per_prompt}"):
        AdaptiveAllocation(max_rollouts=8, samples_per_prompt=samples_per_prompt)
    AdaptiveAllocation(max_rollouts=8, samples_per_prompt=8)


def value_of(choice: Sequence[int], n_G: Sequence[int], k_G: Sequence[int], prior: PassRates) -> float:
    return sum(chance(n, k, more, prior) for more, n, k in zip(choice, n_G, k_G, strict=True) if more)


def test_choice_is_the_best_of_all_within_the_budget(rng: Rng) -> None:
    bound = 0
    for _ in range(40):
        prior, groups, maximum = random_prior(rng), int(rng.integers(1, 4)), int(rng.integers(2, 9))
        n_G = rng.integers(1, 6, groups).tolist()
        k_G = [int(rng.choice([0, n, rng.integers(0, n + 1)])) for n in n_G]
        budget = int(rng.integers(0, 9))
        caps = [max(min(n, maximum - n), 0) for n in n_G]
        every = [c for c in product(*(range(cap + 1) for cap in caps)) if sum(c) <= budget]
        best = max(value_of(c, n_G, k_G, prior) for c in every)
        chosen = dict(allocate_rollouts(n_G, k_G, budget, maximum, prior))
        assert tuple(chosen.get(g, 0) for g in range(groups)) in every
        assert value_of([chosen.get(g, 0) for g in range(groups)], n_G, k_G, prior) == pytest.approx(best, abs=1e-9)
        bound += sum(caps) > budget > 0
    assert bound  # there was a choice to make


def test_limits_hold_for_any_outcomes(rng: Rng) -> None:
    for _ in range(100):
        prior, groups, maximum = random_prior(rng), int(rng.integers(1, 40)), int(rng.integers(2, 300))
        n_G = rng.choice([4, 8, 16, 32, 64, 128], groups)
        k_G = rng.binomial(n_G, draw_pass_rates(prior, groups, rng))
        budget = int(rng.integers(-5, 2000))
        chosen = allocate_rollouts(n_G.tolist(), k_G.tolist(), budget, maximum, prior)
        assert chosen == allocate_rollouts(n_G.tolist(), k_G.tolist(), budget, maximum, prior)
        assert [g for g, _ in chosen] == sorted({g for g, _ in chosen})
        spent = sum(more for _, more in chosen)
        assert spent <= max(budget, 0)
        for group, more in chosen:
            assert 1 <= more <= n_G[group]
            assert n_G[group] + more <= maximum
            assert k_G[group] in (0, n_G[group])
        room = sum(max(min(n, maximum - n), 0) for n, k in zip(n_G, k_G, strict=True) if k in (0, n))
        assert spent == min(room, max(budget, 0))  # under these priors every rollout has a chance


def test_groups_with_the_same_outcome_share_what_does_not_suffice_for_all() -> None:
    chosen = allocate_rollouts([8] * 6 + [8], [0] * 6 + [3], 20, 64, PassRates(0.5, 1.5, 0.1, 0.1))
    assert chosen == [(0, 4), (1, 4), (2, 3), (3, 3), (4, 3), (5, 3)]
    assert allocate_rollouts([], [], 20, 64, PassRates(0.5, 1.5)) == []


def test_the_more_promising_outcome_goes_first() -> None:
    """Pass rates near 1 and many hopeless prompts: a group of successes only is the better bet, and the other way."""
    near_one = PassRates(5.0, 0.5, 0.5, 0.0)
    assert allocate_rollouts([8, 8], [0, 8], 8, 64, near_one) == [(1, 8)]
    assert allocate_rollouts([8, 8], [0, 8], 8, 64, PassRates(0.5, 5.0, 0.0, 0.5)) == [(0, 8)]


def test_rounds_make_as_many_groups_mixed_as_the_chances_say(rng: Rng) -> None:
    """Realized minus foretold is a martingale: its variance is the sum of the variances of the single outcomes."""
    prior, groups, maximum = PassRates(0.4, 2.0, 0.2, 0.1), 4000, 64
    p = draw_pass_rates(prior, groups, rng)
    n_G = np.full(groups, 4)
    k_G = rng.binomial(4, p)
    budget, foretold, realised, variance = 16 * groups, 0.0, 0, 0.0
    rounds = 0
    while chosen := allocate_rollouts(n_G.tolist(), k_G.tolist(), budget, maximum, prior):
        for group, more in chosen:
            expected = next_rollout_gains(int(n_G[group]), int(k_G[group]), more, prior).sum()
            foretold += expected
            variance += expected * (1 - expected)
            n_G[group] += more
            k_G[group] += rng.binomial(more, p[group])
            realised += 0 < k_G[group] < n_G[group]
        budget -= sum(more for _, more in chosen)
        rounds += 1
    assert budget == 0
    assert rounds > 2
    assert abs(realised - foretold) < 6 * np.sqrt(variance)


def penalized_likelihood(prior: PassRates, n: int, k_G: np.ndarray) -> float:
    """What the fit maximizes, from integrals: likelihood, Dirichlet(2, 2, 5) on weights in their log-odds' scale."""
    slab = 1 - prior.never - prior.always
    fitted = sum(np.log(moment(prior, int(k), n - int(k))) for k in k_G)
    weak = np.log(prior.never) + np.log(prior.always) + 4 * np.log(slab)
    return float(fitted + weak - (np.log(prior.a / 0.5) ** 2 + np.log(prior.b / 1.5) ** 2) / 2)


def test_fit_maximises_the_penalised_likelihood(rng: Rng) -> None:
    for groups in (1, 12):
        n, truth = 6, random_prior(rng)
        k_G = rng.binomial(n, draw_pass_rates(truth, groups, rng))
        fit = fit_prior(n, k_G.tolist())
        best = penalized_likelihood(fit, n, k_G)
        for _ in range(60):
            a, b = np.array([fit.a, fit.b]) * np.exp(rng.normal(0, 0.1, 2))
            odds = np.array([fit.never, fit.always, fit.between]) * np.exp(rng.normal(0, 0.1, 3))
            never, always, _ = odds / odds.sum()
            assert penalized_likelihood(PassRates(a, b, never, always), n, k_G) <= best + 1e-5


def test_fit_of_many_pilots_tells_the_truth(rng: Rng) -> None:
    """On what it is used for: the chances of groups with one outcome."""
    truth, n = PassRates(0.4, 2.0, 0.15, 0.1), 16
    fit = fit_prior(n, rng.binomial(n, draw_pass_rates(truth, 20_000, rng)).tolist())
    for k in (0, n):
        found, expected = (next_rollout_gains(n, k, n, prior).sum() for prior in (fit, truth))
        assert found == pytest.approx(expected, rel=0.35)
    swapped = fit_prior(n, (n - rng.binomial(n, draw_pass_rates(truth, 20_000, rng))).tolist())
    assert swapped.a > 2 * swapped.b
    assert swapped.always > swapped.never


def test_fit_depends_on_the_outcomes_alone_and_needs_none(rng: Rng) -> None:
    k_G = rng.integers(0, 9, 30)
    assert fit_prior(8, k_G.tolist()) == fit_prior(8, rng.permutation(k_G).tolist())
    weak = fit_prior(8, [])
    np.testing.assert_allclose([weak.a, weak.b, weak.never, weak.always], [0.5, 1.5, 1 / 6, 1 / 6])
    with pytest.raises(ValueError, match="8 rollouts cannot have 9 successes"):
        fit_prior(8, [9])
