"""Simulated coverage and width of 95% intervals of pass@k.

An experiment draws a pass rate for each of P prompts, the number of correct ones among n responses to each, and makes
an interval for the mean of pass@k over all prompts. The truth is known from the distribution of the pass rates.
Methods: the package's interval, the percentile bootstrap that it replaced, and Student's t. A table of all settings
goes to standard output, followed by the worst setting of each number of prompts.

With --arms the experiments are comparisons of two arms with 1 and 3 seeds: each run moves the logits of each prompt,
and with 3 seeds those of all prompts together, by a normal number of standard deviation 0.3. B's logits are 0.7 above
A's. The intervals are for A's mean pass rate and for the difference, by the package and by Student's t as before.

python benchmarks/interval_coverage.py [--arms] [--prompts 5 30 128 1000] [--experiments 400] [--jobs 2]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing import Pool
from typing import NamedTuple

import numpy as np
from harness import table
from numpy.typing import NDArray
from scipy.special import betaln, expit, logit, stdtrit

from brorl.evaluation.paired import mean_over_runs, paired_difference
from brorl.evaluation.pass_at_k import mean_with_interval, pass_at_k

FloatArray = NDArray[np.float64]
Ends = tuple[float, float]


@dataclass(frozen=True)
class Beta:
    """Pass rates with a Beta distribution."""

    a: float
    b: float

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        """Draw pass rates of some prompts."""
        return rng.beta(self.a, self.b, size)

    def pass_at(self, k: int) -> float:
        """Return the mean of pass@k over all prompts."""
        return float(1 - np.exp(betaln(self.a, self.b + k) - betaln(self.a, self.b)))

    def __str__(self) -> str:
        return f"Beta({self.a:g}, {self.b:g})"


@dataclass(frozen=True)
class Spikes:
    """Pass rates with a few values."""

    fraction_of_rate: tuple[tuple[float, float], ...]

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        """Draw pass rates of some prompts."""
        rates, fractions = zip(*self.fraction_of_rate, strict=True)
        return rng.choice(rates, size, p=fractions)

    def pass_at(self, k: int) -> float:
        """Return the mean of pass@k over all prompts."""
        return sum(fraction * (1 - (1 - rate) ** k) for rate, fraction in self.fraction_of_rate)

    def __str__(self) -> str:
        return ", ".join(f"{100 * fraction:.3g}% at {rate:g}" for rate, fraction in self.fraction_of_rate)


PRIORS = (
    *(Beta(a, b) for a, b in ((0.03, 3.0), (0.05, 2.0), (0.3, 1.0), (1.0, 1.0), (5.0, 1.0))),
    Spikes(((0.0, 0.97), (0.5, 0.03))),
    Spikes(((0.01, 0.95), (1.0, 0.05))),
    Spikes(((0.0, 0.02), (1.0, 0.98))),
)
ROUNDING = 1e-9
NUM_PROMPTS = (5, 30, 128, 1000)
SAMPLES_AND_K = ((1, 1), (16, 1), (16, 16), (256, 1), (256, 16), (256, 256))


def package(value_P: FloatArray) -> Ends:
    found = mean_with_interval(value_P)
    return found.low, found.high


def bootstrap(value_P: FloatArray) -> Ends:
    """The former interval: a percentile bootstrap, or the limits of Wilks where no two values differ by 0.05."""
    if np.ptp(value_P) < 0.05:
        fraction = 0.025 ** (1 / value_P.size)
        return value_P.min() * fraction, 1 - (1 - value_P.max()) * fraction
    low, high = np.quantile(_resamples(value_P.size) @ value_P, [0.025, 0.975])
    return low, high


@cache
def _resamples(num_prompts: int) -> FloatArray:
    """Return the weights of the prompts in 2,000 resamples, each a row."""
    choice = np.random.default_rng(0).integers(0, num_prompts, (2000, num_prompts))
    return np.stack([np.bincount(row, minlength=num_prompts) for row in choice]) / num_prompts


def student(value_P: FloatArray) -> Ends:
    half = stdtrit(value_P.size - 1, 0.975) * value_P.std(ddof=1) / value_P.size**0.5
    return max(value_P.mean() - half, 0.0), min(value_P.mean() + half, 1.0)


METHODS: dict[str, Callable[[FloatArray], Ends]] = {"package": package, "bootstrap": bootstrap, "t": student}


@dataclass(frozen=True)
class Cell:
    """One setting."""

    prior: Beta | Spikes  # distribution of pass rates
    num_prompts: int
    num_samples: int  # responses per prompt
    k: int
    experiments: int
    seed: int


class Result(NamedTuple):
    """Of one method: fractions of intervals above and below the truth, and the mean width."""

    above: float
    below: float
    width: float

    @property
    def coverage(self) -> float:
        """Fraction of intervals that contain the truth."""
        return 1 - self.above - self.below


def simulate(cell: Cell) -> dict[str, Result]:
    """Repeat an experiment; datasets that agree get one interval."""
    rng, truth = np.random.default_rng(cell.seed), cell.prior.pass_at(cell.k)
    count: dict[bytes, int] = defaultdict(int)
    for _ in range(cell.experiments):
        correct_P = np.sort(rng.binomial(cell.num_samples, cell.prior.draw(rng, cell.num_prompts)))
        count[correct_P.tobytes()] += 1
    weight = np.array(list(count.values())) / cell.experiments
    values = [pass_at_k(np.frombuffer(data, np.int64), cell.num_samples, cell.k) for data in count]
    results = {}
    for name, method in METHODS.items():
        low, high = np.array([method(value_P) for value_P in values]).T
        ends = (low > truth + ROUNDING, high < truth - ROUNDING, high - low)
        results[name] = Result(*(float(weight @ end) for end in ends))
    return results


def _mirrored(prior: Beta | Spikes) -> Beta | Spikes:
    if isinstance(prior, Beta):
        return Beta(prior.b, prior.a)
    return Spikes(tuple((1 - rate, fraction) for rate, fraction in prior.fraction_of_rate))


_HARD = (Beta(0.03, 9.97), Beta(0.3, 99.7), Spikes(((0.0, 0.994), (0.5, 0.006))))
ARMS = {  # mean pass rate -> distributions of pass rates
    0.003: _HARD,
    0.05: (Beta(0.05, 0.95), Beta(0.3, 5.7), Spikes(((0.0, 0.9), (0.5, 0.1)))),
    0.5: (Beta(0.3, 0.3), Beta(1.0, 1.0), Spikes(((0.1, 0.5), (0.9, 0.5)))),
    0.997: tuple(map(_mirrored, _HARD)),
}
NUM_SEEDS, SHIFT, RUN_STD, PROMPT_STD = (1, 3), 0.7, 0.3, 0.3


@dataclass(frozen=True)
class ArmsCell:
    """One setting of comparisons."""

    mean: float
    prior: Beta | Spikes
    num_prompts: int
    num_seeds: int
    experiments: int
    seed: int


def _rates(logit_P: FloatArray, run_std: float, rng: np.random.Generator, num_seeds: int = 1) -> FloatArray:
    together = rng.normal(0, run_std, (num_seeds, 1))
    return expit(logit_P + together + rng.normal(0, PROMPT_STD, (num_seeds, logit_P.size)))


def _former(value_SP: FloatArray) -> float:
    """Half of the former interval: Student's t over prompts and over seeds, added in squares."""
    means = [m for m in (value_SP.mean(0), value_SP.mean(1)) if m.size > 1]
    return sum(stdtrit(m.size - 1, 0.975) ** 2 * m.var(ddof=1) / m.size for m in means) ** 0.5


def simulate_arms(cell: ArmsCell) -> list[tuple[float, float]]:
    """Return coverage and mean width: package and former interval of A's score, then of the difference."""
    rng, n, seeds = np.random.default_rng(cell.seed), 16, cell.num_seeds
    run_std = RUN_STD if seeds > 1 else 0.0  # an interval of one seed is for runs with this seed
    population = logit(cell.prior.draw(rng, 1 << 20))
    seen = rng.normal(0, run_std, population.size)  # the mean over runs and prompts
    truth_a, truth_b = (float(_rates(population + seen + shift, 0.0, rng).mean()) for shift in (0.0, SHIFT))
    inside, width = np.zeros(4), np.zeros(4)
    for _ in range(cell.experiments):
        logit_P = logit(cell.prior.draw(rng, cell.num_prompts))
        a_SP, b_SP = (rng.binomial(n, _rates(logit_P + s, run_std, rng, seeds)) / n for s in (0.0, SHIFT))
        own, change = mean_over_runs(a_SP), paired_difference(a_SP, b_SP, seeds_paired=True).difference
        ends = [(own.low, own.high), _around(a_SP), (change.low, change.high), _around(b_SP - a_SP)]
        truths = (truth_a, truth_a, truth_b - truth_a, truth_b - truth_a)
        inside += [low - ROUNDING <= t <= high + ROUNDING for (low, high), t in zip(ends, truths, strict=True)]
        width += [high - low for low, high in ends]
    return list(zip((inside / cell.experiments).tolist(), (width / cell.experiments).tolist(), strict=True))


def _around(value_SP: FloatArray) -> Ends:
    half = _former(value_SP)
    return value_SP.mean() - half, value_SP.mean() + half


def compare_arms(options: argparse.Namespace) -> None:
    """Print coverage and width by mean pass rate, pass rates, prompts and seeds."""
    cells = [
        ArmsCell(mean, prior, num_prompts, num_seeds, options.experiments, options.seed)
        for mean, priors in ARMS.items()
        for prior, num_prompts, num_seeds in product(priors, options.prompts, NUM_SEEDS)
    ]
    with Pool(options.jobs) as pool:
        results = list(pool.imap(simulate_arms, cells))
    rows = [
        (c.mean, c.prior, c.num_prompts, c.num_seeds, *(f"{covers:.3f}, {width:.4f}" for covers, width in found))
        for c, found in zip(cells, results, strict=True)
    ]
    titles = "score: coverage, width", "score, t", "difference: coverage, width", "difference, t"
    print(table(("mean", "pass rates", "P", "seeds", *titles), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", action="store_true", help="compare two arms instead")
    parser.add_argument("--prompts", type=int, nargs="+", default=NUM_PROMPTS, metavar="P")
    parser.add_argument("--experiments", type=int, default=400, help="repetitions of each setting")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.arms:
        compare_arms(options)
        return
    cells = [
        Cell(prior, num_prompts, n, k, options.experiments, options.seed)
        for num_prompts, (n, k), prior in product(options.prompts, SAMPLES_AND_K, PRIORS)
    ]
    with Pool(options.jobs) as pool:
        results = list(zip(cells, pool.imap(simulate, cells), strict=True))
    rows = [
        (
            c.prior, c.num_prompts, c.num_samples, c.k, f"{c.prior.pass_at(c.k):.4f}",
            *(f"{r.coverage:.3f} ({r.above:.3f}, {r.below:.3f}), {r.width:.3f}" for r in of_method.values()),
        )
        for c, of_method in results
    ]  # fmt: skip
    methods = (f"{method}: coverage (above, below), width" for method in METHODS)
    print(table(("pass rates", "P", "n", "k", "truth", *methods), rows), end="\n\n")
    worst = []
    for num_prompts, method in product(options.prompts, METHODS):
        some = [of_method[method] for c, of_method in results if c.num_prompts == num_prompts]
        numbers = (
            min(r.coverage for r in some), max(r.above for r in some), max(r.below for r in some),
            float(np.mean([r.width for r in some])),
        )  # fmt: skip
        worst.append((num_prompts, method, *(f"{number:.3f}" for number in numbers)))
    print(table(("P", "method", "lowest coverage", "most above", "most below", "mean width"), worst))


if __name__ == "__main__":
    main()
