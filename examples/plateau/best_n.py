"""The N with the least gradient noise for the time spent, at each order of MaxRL, over the course of a study run.

    python examples/plateau/best_n.py runs/plateau/three/verdict/128_to_16/seed-0 [STEP ...]

Input: a run directory with checkpoints, and steps (default: about six, evenly spaced). Output: one line for each
checkpoint and order T, with V, the variance of a group's gradient between prompts; S, the variance within a prompt
times N (both divided by |G|^2); g, the exponent of step seconds as a function of N; the N predicted by
(1 - g) S / (g V); and the measured noise times seconds at each N, relative to the smallest. No dependence on N is
assumed: each N has separate groups.

Method: 1,024 rollouts of each of 64 prompts are split into groups of N. With g_pj the gradient of group j of prompt p,
M = E g_p1 . g_p2 over pairs of groups, |G|^2 = E g_p . g_q over pairs of prompts, and the noise of a step of B prompts
is (E |g_pj|^2 - |G|^2) / (B |G|^2). Seconds are for a step of 64 prompts, from `brorl plan`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import brorl
from brorl.algorithms.advantages import maxrl_weight
from brorl.algorithms.groups import Group
from brorl.config.reading import make_config, read_recipe
from brorl.planning.gradient_noise import prompt_gradient
from brorl.planning.step_cost import sample_groups
from brorl.table import Table
from brorl.training.inputs import prepare_run
from brorl.training.local_parts import LocalParts

PROMPTS, ROLLOUTS = 64, 1024
NUMBERS = (16, 32, 64, 128, 256, 512)
ORDERS = (1, 4, 15, 63, 255)
MAX_GROUPS = 4  # per prompt, for each N


@dataclass(frozen=True)
class GroupNoise:
    """Moments of the gradient of a group of N rollouts."""

    signal: float  # |G|^2
    between: float  # V: E |G_p|^2 - |G|^2
    within: float  # S / N: variance of a group's gradient around the prompt's mean

    @property
    def relative(self) -> float:
        """The noise of a step times its number of prompts."""
        return (self.between + self.within) / self.signal


def group_noise(parts: LocalParts, groups: list[Group], num_rollouts: int, order: int) -> GroupNoise:
    """Measure the gradients of groups of N rollouts at one order (at most N - 1)."""
    generator, number = np.random.default_rng(0), min(MAX_GROUPS, ROLLOUTS // num_rollouts)
    weight = partial(maxrl_weight, order=min(order, num_rollouts - 1))
    means, squared, across = [], 0.0, 0.0
    for group in groups:
        left_L, gradients = group.tree.leaf_count.copy(), []
        for _ in range(number):
            count_L = generator.multivariate_hypergeometric(left_L, num_rollouts, method="marginals")
            left_L -= count_L
            gradients.append(prompt_gradient(parts.model, group, count_L, parts, weight))
        gram_JJ = np.stack(gradients) @ np.stack(gradients).T
        means.append(np.mean(gradients, axis=0))
        squared += np.trace(gram_JJ) / number / len(groups)
        across += (gram_JJ.sum() - np.trace(gram_JJ)) / (number * (number - 1)) / len(groups)
    gram_PP = np.stack(means) @ np.stack(means).T
    signal = (gram_PP.sum() - np.trace(gram_PP)) / (len(groups) * (len(groups) - 1))
    return GroupNoise(float(signal), float(across - signal), float(squared - across))


def lines_of(run: Path, step: int) -> Iterator[tuple[str, ...]]:
    """Yield one line per order for a checkpoint."""
    checkpoint = run / "checkpoints" / f"step-{step:06d}"
    recipe = read_recipe(str(run / "config.yaml"))
    with TemporaryDirectory() as folder:
        plan = brorl.plan(checkpoint, recipe=recipe, rollouts=NUMBERS, output_dir=folder, progress=False)
    seconds_N = np.array([row.seconds["total"] for row in plan.plan.rows if row.num_rollouts in NUMBERS])
    growth = float(np.polyfit(np.log(NUMBERS), np.log(seconds_N), 1)[0])
    config = make_config(recipe, {"model": str(checkpoint)}, str(run))
    parts = LocalParts.load(config, prepare_run(config, config.model))
    groups = sample_groups(parts, parts.stream.take(PROMPTS), ROLLOUTS, seed=1).groups
    parts.model.train()
    for order in ORDERS:
        numbers = [n for n in NUMBERS if n > order]
        noise = [group_noise(parts, groups, n, order) for n in numbers]
        signal = float(np.mean([one.signal for one in noise]))  # the same for all N
        if signal <= 0:
            print(
                f"step {step:,}, T = {order}: the gradient is too small to measure with {PROMPTS} prompts",
                file=sys.stderr,
            )
            continue
        between = float(np.mean([one.between for one in noise])) / signal
        within = noise[0].within * numbers[0] / signal
        price_N = np.array([(between + one.within / signal) for one in noise]) * seconds_N[-len(numbers) :]
        yield (
            f"{step:,}", str(order), f"{between:.1f}", f"{within:.0f}", f"{growth:.2f}",
            f"{(1 - growth) * within / (growth * between):.0f}", str(numbers[int(price_N.argmin())]),
            *[""] * (len(NUMBERS) - len(numbers)), *(f"{price:.2f}" for price in price_N / price_N.min()),
        )  # fmt: skip


def main(run: Path, *steps: str) -> None:
    """Print the table for a run."""
    saved = sorted(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))
    chosen = [int(step) for step in steps] or [
        *dict.fromkeys(saved[i] for i in np.linspace(0, len(saved) - 1, 6).round().astype(int))
    ]
    rows = tuple(line for step in chosen for line in lines_of(run, step))
    columns = ("step", "T", "V", "S", "g", "predicted N", "best N", *(f"N = {n}" for n in NUMBERS))
    print(Table("Noise times seconds, over the least", columns, rows, words=frozenset()).markdown())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
