"""Gradient noise: unbiased on Gaussian gradients, against loops over pairs, and against simulated batches."""

import numpy as np
import pytest

from brorl.planning.gradient_noise import GradientProducts, NoiseMoments, mean_gradient_p_value, noise_moments

HALF = 6


def draw_products(
    rng: np.random.Generator, mean_K: np.ndarray, between: float, within: float, num_prompts: int
) -> GradientProducts:
    """Gradients of prompts around a mean, and of halves around each prompt's."""
    dimension = mean_K.size
    prompt_PK = mean_K + np.sqrt(between / dimension) * rng.normal(size=(num_prompts, dimension))
    noise = np.sqrt(within / HALF / dimension)
    halves = [prompt_PK + noise * rng.normal(size=prompt_PK.shape) for _ in range(2)]
    return GradientProducts.of(*halves, HALF)


@pytest.mark.slow
def test_moments_are_unbiased(rng: np.random.Generator) -> None:
    mean_K = rng.normal(size=5)
    mean_K *= np.sqrt(0.3) / np.linalg.norm(mean_K)
    moments = [noise_moments(draw_products(rng, mean_K, 2.0, 30.0, 12)) for _ in range(1500)]
    for name, truth in (("mean_squared", 0.3), ("prompt_squared", 2.3), ("within", 30.0)):
        values = np.array([float(getattr(m, name)) for m in moments])
        assert abs(values.mean() - truth) < 5.5 * values.std() / np.sqrt(values.size), name


def test_weights_by_loops_over_pairs(rng: np.random.Generator) -> None:
    """A prompt drawn twice counts twice, and is never paired with itself."""
    first, second = rng.normal(size=(2, 6, 4))
    products = GradientProducts.of(first, second, HALF)
    weight = rng.multinomial(6, np.full(6, 1 / 6), 5)
    moments = noise_moments(products, weight)
    mean = (first + second) / 2
    for b, w in enumerate(weight):
        pairs = [(p, q) for p in range(6) for q in range(6) if p != q]
        total = sum(w[p] * w[q] for p, q in pairs)
        squared = sum(w[p] * w[q] * (mean[p] @ mean[q]) for p, q in pairs) / total
        own = sum(w[p] * (first[p] @ second[p]) for p in range(6)) / 6
        within = HALF / 2 * sum(w[p] * ((first[p] - second[p]) ** 2).sum() for p in range(6)) / 6
        assert moments.mean_squared[b] == pytest.approx(squared)
        assert moments.prompt_squared[b] == pytest.approx(own)
        assert moments.within[b] == pytest.approx(within)
    alike = noise_moments(products)
    np.testing.assert_allclose(noise_moments(products, np.ones((1, 6))).mean_squared[0], alike.mean_squared)


@pytest.mark.parametrize("keep", [1.0, 0.4])
def test_noise_of_a_batch_by_simulation(rng: np.random.Generator, keep: float) -> None:
    """Mean of P kept prompts: some prompts give a gradient of exactly 0 and are dropped."""
    dimension, num_rollouts, num_prompts, repeats = 3, 20, 4, 100_000
    given_K = np.array([1.0, -0.5, 0.2])  # mean of a kept prompt's gradient
    between, within = 0.6, 5.0
    sample = given_K + np.sqrt(between / dimension) * rng.normal(size=(repeats, num_prompts, dimension))
    sample += np.sqrt(within / num_rollouts / dimension) * rng.normal(size=sample.shape)
    batch = sample.mean(1)
    direct = (np.square(batch - given_K).sum(1)).mean() / (given_K @ given_K)
    moments = NoiseMoments(  # of all prompts, the dropped ones included
        mean_squared=np.array(keep**2 * given_K @ given_K),
        prompt_squared=np.array(keep * (given_K @ given_K + between)),
        within=np.array(keep * within),
    )
    noise = float(moments.excess(num_rollouts, keep) / (num_prompts * moments.mean_squared))
    assert noise == pytest.approx(direct, rel=0.03)
    if keep == 1:
        plain = (moments.between + moments.within / num_rollouts) / (num_prompts * moments.mean_squared)
        assert noise == pytest.approx(float(plain))


def test_the_test_of_a_mean_gradient(rng: np.random.Generator) -> None:
    """Uniform where there is none, small where there is one."""
    none = [mean_gradient_p_value(draw_products(rng, np.zeros(4), 1.0, 6.0, 10), rng) for _ in range(120)]
    assert 0.3 < np.mean(none) < 0.7  # 7 sigma
    assert mean_gradient_p_value(draw_products(rng, np.full(4, 3.0), 1.0, 6.0, 20), rng) < 0.001


def test_a_single_prompt_is_refused(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="at least 2 prompts"):
        noise_moments(draw_products(rng, np.zeros(4), 1.0, 6.0, 1))
