"""Simulated coverage and width of 95% intervals of pass@k.

An experiment draws a pass rate for each of P prompts, the number of correct ones among n responses to each, and makes
an interval for the mean of pass@k over all prompts. The truth is known from the distribution of the pass rates.
Methods: the package's interval, the percentile bootstrap that it replaced, and Student's t. A table of all settings
goes to standard output, followed by the worst setting of each number of prompts.

python benchmarks/interval_coverage.py [--prompts 5 30 128 1000] [--experiments 400] [--jobs 2]
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
from scipy.special import betaln, stdtrit

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
        return ", ".join(f"{fraction:.0%} at {rate:g}" for rate, fraction in self.fraction_of_rate)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=NUM_PROMPTS, metavar="P")
    parser.add_argument("--experiments", type=int, default=400, help="repetitions of each setting")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
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
