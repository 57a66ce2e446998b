"""The seeds that a small difference takes: against loops over S and P, and against intervals of made-up scores."""

from math import sqrt

import numpy as np
import pytest
from comparisons import findings, levels, synthetic, templates, values_of
from numpy.typing import NDArray
from scipy import stats

from brorl.comparison import findings as f
from brorl.comparison.answer import comparison_record
from brorl.comparison.results import results_of
from brorl.evaluation.paired import VariancePart, VarianceParts, paired_difference, seeds_needed

FloatArray = NDArray[np.float64]


def squared(variance: float, size: int) -> float:
    """t^2 v / K of a mean over K values of variance v."""
    return float(stats.t.ppf(0.975, size - 1)) ** 2 * variance / size


def parts(of_prompt: float, num_prompts: int, of_seed: list[float], num_seeds: int) -> VarianceParts:
    """Parts of these variances of one prompt and one seed."""
    return VarianceParts(
        VariancePart(of_prompt / num_prompts, num_prompts - 1),
        tuple(VariancePart(v / num_seeds, num_seeds - 1) for v in of_seed),
    )


def spread(size: int, variance: float, rng: np.random.Generator) -> FloatArray:
    """Values with mean 0 and exactly this sample variance."""
    values = rng.standard_normal(size)
    return (values - values.mean()) / values.std(ddof=1) * sqrt(variance)


@pytest.mark.parametrize("num_arms", [1, 2])  # paired runs have one part of the seeds, others one for each arm
def test_seeds_are_the_first_of_a_loop(rng: np.random.Generator, num_arms: int) -> None:
    for _ in range(10):
        half_width, num_prompts = rng.uniform(0.01, 0.05), int(rng.integers(20, 400))
        fraction = rng.uniform(0.05, 0.49)  # of the squared half-width that the prompts take
        of_prompt = fraction * half_width**2 / squared(1.0, num_prompts)
        of_seed = [float(v) * half_width**2 for v in rng.uniform(0.05, 1.0, num_arms)]
        found = seeds_needed(parts(of_prompt, num_prompts, of_seed, int(rng.integers(2, 6))), half_width)
        expected = 2
        while sum(squared(v, expected) for v in of_seed) + squared(of_prompt, num_prompts) > half_width**2:
            expected += 1
        assert found is not None
        assert (found.seeds, found.prompts, found.enough_prompts) == (expected, num_prompts, True)
        assert found.half_width == half_width


def test_too_few_prompts_need_more_prompts(rng: np.random.Generator) -> None:
    for _ in range(5):
        num_prompts, of_seed = int(rng.integers(10, 40)), [float(rng.uniform(1e-5, 1e-3))]
        of_prompt = rng.uniform(1.05, 3) * 0.02**2 / squared(1.0, num_prompts)
        found = seeds_needed(parts(of_prompt, num_prompts, of_seed, 3))
        prompts = seeds = 2
        while squared(of_prompt, prompts) > 0.02**2 / 2:
            prompts += 1
        while squared(of_seed[0], seeds) + squared(of_prompt, prompts) > 0.02**2:
            seeds += 1
        assert found is not None
        assert (found.seeds, found.prompts, found.enough_prompts) == (seeds, prompts, False)
        assert prompts > num_prompts


def test_scores_of_these_variances_have_that_interval(rng: np.random.Generator) -> None:
    """With the number of seeds the interval of made-up scores is narrow enough, with one seed fewer it is not."""
    num_prompts, of_prompt, of_seed = 150, 0.004, 0.0004

    def half(num_seeds: int) -> tuple[float, VarianceParts]:
        of_prompts_P, of_seeds_S = spread(num_prompts, of_prompt, rng), spread(num_seeds, of_seed, rng)
        a_SP = rng.uniform(0.3, 0.6, (num_seeds, num_prompts))
        b_SP = a_SP + 0.01 + of_seeds_S[:, None] + of_prompts_P
        found = paired_difference(a_SP, b_SP, seeds_paired=True)
        return (found.difference.high - found.difference.low) / 2, found.parts

    found = seeds_needed(half(3)[1])
    assert found is not None
    assert found.enough_prompts
    assert found.seeds > 3
    assert half(found.seeds)[0] <= 0.02 < half(found.seeds - 1)[0]


def test_one_seed_or_one_prompt_gives_no_number(rng: np.random.Generator) -> None:
    for shape in ((1, 20), (3, 1), (1, 1)):
        a, b = rng.random(shape), rng.random(shape)
        assert seeds_needed(paired_difference(a, b, seeds_paired=True).parts) is None


class TestText:
    def test_a_pair(self, rng: np.random.Generator) -> None:
        comparison = synthetic(rng, num_prompts=600, num_sources=1, lift={0: 0.2, 1: 0.2})
        record = comparison_record(results_of(comparison))
        needed, measured = record["seeds_needed"]["N=512"], record["scores"]["differences"]["N=512"]["1"]["parts"]
        (of_seeds,) = measured["seeds"]
        seeds, of_prompts = 2, stats.t.ppf(0.975, 599) ** 2 * measured["prompts"]["variance"]
        of_prompts += (measured["prompts"]["unseen"] * stats.beta.ppf(0.975, 1, 600)) ** 2
        while squared(3 * of_seeds["variance"], seeds) + of_prompts > 0.02**2:
            seeds += 1
        expected = {"half_width": 0.02, "seeds": seeds, "prompts": 600, "enough_prompts": True}
        assert needed == expected
        told = values_of(f.SEEDS_NEEDED, findings(comparison))
        assert (told["half_width"], told["prompts"], told["seeds"]) == (0.02, 600, seeds)

    def test_too_few_prompts(self, rng: np.random.Generator) -> None:
        comparison = synthetic(rng, num_prompts=10)
        needed = comparison_record(results_of(comparison))["seeds_needed"]["N=512"]
        assert not needed["enough_prompts"]
        told = values_of(f.PROMPTS_NEEDED, findings(comparison))
        assert (told["needed"], told["seeds"], told["prompts"]) == (needed["prompts"], needed["seeds"], 10)

    def test_a_sweep_names_the_arm_that_needs_the_most(self, rng: np.random.Generator) -> None:
        comparison = synthetic(rng, numbers=(16, 64, 512))
        needed = comparison_record(results_of(comparison))["seeds_needed"]
        assert list(needed) == ["N=64", "N=512"]
        most = max(needed, key=lambda arm: (needed[arm]["prompts"], needed[arm]["seeds"]))
        told = values_of(f.PROMPTS_NEEDED, findings(comparison))
        assert (told["arm"], told["seeds"]) == (most, needed[most]["seeds"])
        assert f"between N=16 and {most}, which needs the most (without correction" in told["pair"]

    def test_one_seed(self) -> None:
        comparison = levels([[6, 8], [10, 20]], num_seeds=1)
        assert comparison_record(results_of(comparison))["seeds_needed"] == {"N=512": None}
        assert f.SEEDS_UNKNOWN in templates(findings(comparison))
