"""What a pilot found, prompt by prompt, and what it makes one expect of any group at another N.

In: counts of correct rollouts, expected tree sizes and gradients of P prompts, at J numbers of rollouts in question.
Out: means over prompts, for all of them alike or in B replicates that weight them at random, so that what one prompt
does to pass rates and sizes stays together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brorl.planning.gradient_noise import GradientProducts
from brorl.theory.pass_rates import (
    PassRates,
    fit_without_spikes,
    informative_in_subset,
    refit_informative,
    shares_of_any_shape,
    solved_in_subset,
)

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, replicates_B: FloatArray) -> Estimate:
        """Take the interval from replicates; it always holds the value."""
        low, high = np.quantile(replicates_B, [0.025, 0.975])
        return cls(float(value), float(min(low, value)), float(max(high, value)))


@dataclass(frozen=True)
class PilotCounts:
    """What the pilot found, prompt by prompt (P prompts, J numbers of rollouts in question).

    Attributes:
        num_rollouts: n, rollouts of each prompt in the pilot.
        correct_P: Correct ones, shape [P].
        length_P: Mean length of a rollout in tokens, shape [P].
        wanted_J: Numbers of rollouts in question, ascending, shape [J].
        nodes_PJ: Expected nodes of the prompt's tree, shape [P, J].
        responses_PJ: Expected distinct responses, shape [P, J].
        trained_PJ: Nodes that would go through the loss if the group were kept, shape [P, J].
        products: Inner products of the prompts' gradients.
    """

    num_rollouts: int
    correct_P: IntArray
    length_P: FloatArray
    wanted_J: IntArray
    nodes_PJ: FloatArray
    responses_PJ: FloatArray
    trained_PJ: FloatArray
    products: GradientProducts


@dataclass(frozen=True)
class Expected:
    """Means over prompts at each N, for all prompts alike (B = 1) or in B replicates; each of shape [B, J].

    Attributes:
        informative: Share of groups with both outcomes.
        solved: Share of prompts with a success.
        nodes: Tree nodes of a sampled group.
        responses: Distinct responses of a sampled group.
        tokens: Sampled tokens of a group, duplicates counted.
        trained: Nodes of a kept group that go through the loss: every prompt counts by its chance to be kept.
    """

    informative: FloatArray
    solved: FloatArray
    nodes: FloatArray
    responses: FloatArray
    tokens: FloatArray
    trained: FloatArray


def expect(counts: PilotCounts, fit: PassRates, weight_BP: FloatArray | None = None) -> Expected:
    """Average over the pilot's prompts; beyond its rollouts shares follow from the fit, refitted in each replicate.

    Args:
        counts: The pilot.
        fit: Fit to its pass rates.
        weight_BP: Weights of the prompts in B replicates, shape [B, P]; None for all alike.
    """
    wanted_J, n, correct_P = counts.wanted_J, counts.num_rollouts, counts.correct_P
    weight = np.ones((1, correct_P.size)) if weight_BP is None else weight_BP
    share_BP = weight / weight.sum(1, keepdims=True)
    kept_PJ, solved_PJ = np.empty((2, correct_P.size, wanted_J.size))
    for j, wanted in enumerate(wanted_J.tolist()):
        within = wanted <= n
        kept_PJ[:, j] = (
            informative_in_subset(correct_P, n, wanted) if within else fit.informative_after(correct_P, n, wanted)
        )
        solved_PJ[:, j] = solved_in_subset(correct_P, n, wanted) if within else np.nan
    kept_BJ = share_BP @ kept_PJ
    informative_BJ, solved_BJ = kept_BJ.copy(), share_BP @ solved_PJ
    beyond = wanted_J > n
    if beyond.any() and weight_BP is not None:
        informative_BJ[:, beyond], solved_BJ[:, beyond] = refit_informative(correct_P, n, weight, wanted_J[beyond])
    elif beyond.any():
        informative_BJ[:, beyond] = [fit.informative(wanted) for wanted in wanted_J[beyond].tolist()]
        solved_BJ[:, beyond] = [fit.solved(wanted) for wanted in wanted_J[beyond].tolist()]
    return Expected(
        informative=informative_BJ,
        solved=solved_BJ,
        nodes=share_BP @ counts.nodes_PJ,
        responses=share_BP @ counts.responses_PJ,
        tokens=(share_BP @ counts.length_P)[:, None] * wanted_J,
        trained=(share_BP @ (kept_PJ * counts.trained_PJ)) / np.maximum(kept_BJ, np.finfo(np.float64).tiny),
    )


def share_estimates(counts: PilotCounts, point: Expected, drawn: Expected) -> tuple[list[Estimate], list[Estimate]]:
    """Return the shares of informative groups and of prompts with a success, with intervals.

    Beyond the pilot the intervals hold three readings of the prompts that gave a single outcome: that they never give
    the other one, so that the shares stay what they are at n; that they are the tail of a plain Beta; and that of the
    most likely distribution of any shape.
    """
    n = counts.num_rollouts
    tail = fit_without_spikes(counts.correct_P, n)
    free = shares_of_any_shape(counts.correct_P, n, counts.wanted_J)
    never = (
        float(informative_in_subset(counts.correct_P, n, n).mean()),
        float(solved_in_subset(counts.correct_P, n, n).mean()),
    )
    informative: list[Estimate] = []
    solved: list[Estimate] = []
    for j, wanted in enumerate(counts.wanted_J.tolist()):
        for found, at_n, in_tail, of_any_shape, expected, replicates in (
            (informative, never[0], tail.informative(wanted), free[0][j], point.informative, drawn.informative),
            (solved, never[1], tail.solved(wanted), free[1][j], point.solved, drawn.solved),
        ):
            estimate = Estimate.of(expected[0, j], replicates[:, j])
            readings = (at_n, in_tail, float(of_any_shape)) if wanted > n else ()
            low, high = min(estimate.low, *readings, 1.0), max(estimate.high, *readings, 0.0)
            found.append(Estimate(estimate.value, low, high))
    return informative, solved
