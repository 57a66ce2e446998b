"""The pilot of a plan: sample, grade and count a few rollouts of a few training prompts, and predict other N.

The draws have separate seeds. Means over prompts have equal weights, or random weights in B replicates. Each replicate
uses the same weights for pass rates and sizes, which preserves their correlation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import hypergeom

from brorl.activity import Stage
from brorl.algorithms.groups import Group
from brorl.algorithms.importance import choose_responses
from brorl.arrays import BoolArray, FloatArray, IntArray
from brorl.errors import UserError, option
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import Estimate
from brorl.planning.gradient_noise import GradientProducts, gradient_products
from brorl.planning.pass_rates import PassRates, fit_without_spikes, fractions_of_any_shape, refit_fractions
from brorl.planning.step_cost import StepCost, StepTimer, StepTiming, sample_groups, time_steps, timing_sizes
from brorl.seeds import seed_sequence
from brorl.training.coverage import growth_ratios, tree_growth
from brorl.training.local_parts import LocalParts
from brorl.training.settings import DynamicSamplingSettings
from brorl.tree import truncation_rate

_SEED_TAG = 0x9140  # the pilot and training draw different random numbers


def generator_of(parts: LocalParts, purpose: int) -> np.random.Generator:
    """Return a generator for one purpose of the pilot. Its seed depends only on the run's seed and the purpose."""
    return np.random.default_rng(seed_sequence(parts.config.seed, _SEED_TAG, purpose))


@dataclass(frozen=True)
class PilotSummary:
    """Means over the pilot's rollouts."""

    num_prompts: int
    num_rollouts: int  # per prompt
    accuracy: float  # fraction of correct rollouts
    entropy: float  # minus the mean log-prob of the sampled tokens, nats per token
    mean_length: float  # tokens per rollout
    truncation_rate: float  # fraction of rollouts that reached the length limit
    duplicate_rate: float  # fraction of rollouts that repeat an earlier rollout of their prompt
    tokens_per_second: float  # sampled tokens per second of generation

    @classmethod
    def of(cls, groups: Sequence[Group], generation_seconds: float) -> PilotSummary:
        """Summarize a pilot's groups, each with the same number of rollouts."""
        trees = [g.tree for g in groups]
        rollouts = sum(t.num_rollouts for t in trees)
        tokens = sum(t.num_sampled_tokens for t in trees)
        return cls(
            num_prompts=len(groups),
            num_rollouts=trees[0].num_rollouts,
            accuracy=sum(g.num_correct for g in groups) / rollouts,
            entropy=-sum(float((t.count * t.logprob).sum()) for t in trees) / tokens,
            mean_length=tokens / rollouts,
            truncation_rate=truncation_rate(trees),
            duplicate_rate=1 - sum(t.num_responses for t in trees) / rollouts,
            tokens_per_second=tokens / generation_seconds,
        )


@dataclass(frozen=True)
class PilotCounts:
    """The pilot, prompt by prompt (P prompts, J numbers of rollouts to compare)."""

    num_rollouts: int  # rollouts per prompt in the pilot, n
    correct_P: IntArray  # correct rollouts, shape [P]
    length_P: FloatArray  # mean rollout length in tokens, shape [P]
    wanted_J: IntArray  # numbers of rollouts to compare, ascending, shape [J]
    nodes_PJ: FloatArray  # expected nodes of the prompt's tree, shape [P, J]
    responses_PJ: FloatArray  # expected distinct responses, shape [P, J]
    trained_PJ: FloatArray  # nodes in the loss if the group is kept, shape [P, J]
    products: GradientProducts  # inner products of the prompts' gradients
    # decides which groups are kept
    dynamic_sampling: DynamicSamplingSettings = field(default_factory=DynamicSamplingSettings)

    @property
    def max_correct_J(self) -> IntArray:
        """The largest number of correct rollouts in a group that is kept, at each number of rollouts, shape [J]."""
        return np.array([self.dynamic_sampling.max_correct(wanted) for wanted in self.wanted_J.tolist()])

    @property
    def kept_P(self) -> BoolArray:
        """Whether each group of the pilot is kept, shape [P]."""
        return (self.correct_P > 0) & (self.correct_P <= self.dynamic_sampling.max_correct(self.num_rollouts))

    @classmethod
    def of(
        cls,
        parts: LocalParts,
        groups: Sequence[Group],
        wanted_J: IntArray,
        products: GradientProducts,
    ) -> PilotCounts:
        """Count a pilot's groups."""
        nodes_PJ, responses_PJ = map(np.stack, zip(*(tree_growth(g.tree, wanted_J) for g in groups), strict=True))
        size = parts.config.optimizer.max_responses_per_outcome
        generator = generator_of(parts, 2)
        trained = [_trained_nodes(g, n_J, wanted_J, size, generator) for g, n_J in zip(groups, nodes_PJ, strict=True)]
        return cls(
            num_rollouts=groups[0].tree.num_rollouts,
            correct_P=np.array([g.num_correct for g in groups]),
            length_P=np.array([g.tree.num_sampled_tokens / g.tree.num_rollouts for g in groups]),
            wanted_J=wanted_J,
            nodes_PJ=nodes_PJ,
            responses_PJ=responses_PJ,
            trained_PJ=np.stack(trained),
            products=products,
            dynamic_sampling=parts.config.dynamic_sampling,
        )


@dataclass(frozen=True)
class ExpectedCounts:
    """Means over prompts at J values of N, each with shape [B, J]. B is 1 for equal weights, else one per replicate."""

    kept: FloatArray  # fraction of groups that are kept; without a `max_pass_rate`, the fraction of mixed groups
    solved: FloatArray  # fraction of prompts with a success
    nodes: FloatArray  # tree nodes of a sampled group
    responses: FloatArray  # distinct responses of a sampled group
    tokens: FloatArray  # sampled tokens of a group, including duplicates
    trained: FloatArray  # nodes of a kept group in the loss; prompts are weighted by their chance of being kept


def expected_counts(counts: PilotCounts, fit: PassRates, weight_BP: FloatArray | None = None) -> ExpectedCounts:
    """Average over the pilot's prompts, with equal weights or with the weights of B replicates.

    Beyond the pilot's number of rollouts, the fractions come from a fit to its pass rates. Each replicate has its own
    fit.
    """
    wanted_J, n, correct_P = counts.wanted_J, counts.num_rollouts, counts.correct_P
    weight = np.ones((1, correct_P.size)) if weight_BP is None else weight_BP
    share_BP = weight / weight.sum(1, keepdims=True)
    kept_PJ, solved_PJ = np.empty((2, correct_P.size, wanted_J.size))
    max_correct_J = counts.max_correct_J
    for j, (wanted, max_correct) in enumerate(zip(wanted_J.tolist(), max_correct_J.tolist(), strict=True)):
        if wanted <= n:
            solved_PJ[:, j] = pass_at_k(correct_P, n, wanted)
            kept_PJ[:, j] = solved_PJ[:, j] - hypergeom(n, correct_P, wanted).sf(max_correct)
        else:
            solved_PJ[:, j] = np.nan
            kept_PJ[:, j] = fit.kept_after(correct_P, n, wanted, max_correct)
    chance_BJ = share_BP @ kept_PJ  # the mean chance of the pilot's prompts
    kept_BJ, solved_BJ = chance_BJ.copy(), share_BP @ solved_PJ
    beyond = wanted_J > n
    if beyond.any():
        from_n = np.array([n, *wanted_J[beyond]])
        max_correct = np.array([counts.dynamic_sampling.max_correct(n), *max_correct_J[beyond]])
        if weight_BP is None:
            kept = np.array([[fit.kept(*size) for size in zip(from_n.tolist(), max_correct.tolist(), strict=True)]])
            solved = np.array([[fit.solved(num_rollouts) for num_rollouts in from_n.tolist()]])
        else:
            kept, solved = refit_fractions(correct_P, n, weight, from_n, max_correct)
        kept_BJ[:, beyond] = _continued(share_BP @ counts.kept_P, kept)
        solved_BJ[:, beyond] = _continued(share_BP @ (correct_P > 0), solved)
    return ExpectedCounts(
        kept=kept_BJ,
        solved=solved_BJ,
        nodes=share_BP @ counts.nodes_PJ,
        responses=share_BP @ counts.responses_PJ,
        tokens=(share_BP @ counts.length_P)[:, None] * wanted_J,
        trained=(share_BP @ (kept_PJ * counts.trained_PJ)) / np.maximum(chance_BJ, np.finfo(np.float64).tiny),
    )


def _continued(measured_B: FloatArray, fitted_BJ: FloatArray) -> FloatArray:
    """Extrapolate a measured fraction to larger N with a fit whose first column is the measured N; shape [B, J - 1].

    The fit does not pass through the measured fraction, and may be below it at a larger N. So the fit only decides how
    much of the rest, 1 - fraction, remains at each N.
    """
    rest_BJ = np.maximum(1.0 - fitted_BJ, 0.0)
    left_BJ = rest_BJ[:, 1:] / np.maximum(rest_BJ[:, :1], np.finfo(np.float64).tiny)
    continued_BJ: FloatArray = 1.0 - (1.0 - measured_B)[:, None] * left_BJ
    return continued_BJ


def with_interval(value: float, replicates_B: FloatArray) -> Estimate:
    """Return a value with the 95% interval of its replicates, extended to include the value."""
    low, high = np.quantile(replicates_B, [0.025, 0.975])
    return Estimate(float(value), float(min(low, value)), float(max(high, value)))


def fraction_estimates(
    counts: PilotCounts, point: ExpectedCounts, drawn: ExpectedCounts
) -> tuple[list[Estimate], list[Estimate]]:
    """Return the fractions of groups that are kept and of prompts with a success at each N, with intervals.

    Beyond the pilot's n, the intervals cover three readings of the prompts with a single outcome: their outcome is
    certain, so the fractions stay the same as at n; they are the tail of a plain Beta; or they follow the most likely
    distribution of any shape.
    """
    n, correct_P = counts.num_rollouts, counts.correct_P
    tail = fit_without_spikes(correct_P, n)
    free = fractions_of_any_shape(correct_P, n, counts.wanted_J, counts.max_correct_J)

    def estimates(
        expected: FloatArray, replicates: FloatArray, at_pilot: Any, in_tail: Any, free_J: Any
    ) -> list[Estimate]:
        rows = []
        for j, wanted in enumerate(counts.wanted_J.tolist()):
            row = with_interval(expected[0, j], replicates[:, j])
            readings = (at_pilot, in_tail(wanted), free_J[j]) if wanted > n else ()
            low, high = min(row.low, *readings, 1.0), max(row.high, *readings, 0.0)
            rows.append(Estimate(row.value, float(low), float(high)))
        return rows

    def kept_in_tail(wanted: int) -> float:
        return tail.kept(wanted, counts.dynamic_sampling.max_correct(wanted))

    kept = estimates(point.kept, drawn.kept, counts.kept_P.mean(), kept_in_tail, free[0])
    return kept, estimates(point.solved, drawn.solved, (correct_P > 0).mean(), tail.solved, free[1])


def _trained_nodes(
    group: Group, nodes_J: FloatArray, wanted: IntArray, size: int, generator: np.random.Generator
) -> FloatArray:
    """Return the nodes in the loss at each N: all nodes, or those of at most `size` responses per verdict.

    The nodes per chosen response are approximated by choosing among the pilot's responses.
    """
    tree = group.tree
    if not size:
        return nodes_J
    advantage_L = group.reward_L - np.average(group.reward_L, weights=tree.leaf_count)
    chosen, _ = choose_responses(tree.leaf_count * advantage_L, group.correct_L, size, generator)
    subtree = tree.select(chosen)[0] if chosen.size else tree
    per_response = subtree.num_unique_tokens / subtree.num_responses
    ratio_JL = growth_ratios(tree.sum_over_responses(tree.logprob), tree.num_rollouts, wanted)
    kept_J = np.zeros(nodes_J.size)
    for verdict in (False, True):
        kept_J += np.minimum(ratio_JL[:, group.correct_L == verdict].sum(1), size)
    trained_J: FloatArray = np.minimum(nodes_J, kept_J * per_response)
    return trained_J


_PARTS = 8  # the time of a step on 1 / _PARTS of its prompts is a lower bound for the whole step
_CALLS = 4  # engine calls of the pilot: one to warm up, then three that are timed
_QUICK_SECONDS = 10.0  # if the pilot takes longer, timed steps are a quarter of its size


@dataclass(frozen=True)
class PlanMeasurements:
    """The measurements behind a plan."""

    counts: PilotCounts  # the pilot, prompt by prompt
    summary: PilotSummary  # means over its rollouts
    cost: StepCost  # seconds per step
    timings: list[StepTiming]  # timed steps that `cost` was fitted to


def least_step_seconds(parts: LocalParts, scratch: Path) -> float:
    """Time a step on an eighth of its prompts, a lower bound for a whole step. The folder `scratch` must be empty."""
    config = parts.config
    prompts = parts.stream.take(ceil(config.prompts_per_step / _PARTS))
    timer = StepTimer(parts, copy.deepcopy(parts.model), scratch)
    timer.time(prompts[:1], config.rollouts_per_prompt, seed=0)  # imports and one-time setup are not part of a step
    seconds = timer.time(prompts, config.rollouts_per_prompt, seed=1).seconds
    return sum(seconds[stage] for stage in ("generation", "verification", "training"))


class NoKeptGroupsError(UserError):
    """No group of the pilot is mixed and kept, so there are no gradients to plan from."""

    exit_code = 1


def measure(
    parts: LocalParts,
    num_prompts: int,
    num_rollouts: int,
    wanted: IntArray,
    scratch: Path,
    announce: Callable[[str], None],
) -> PlanMeasurements:
    """Run the pilot and time a few steps, which store rollouts in the empty folder `scratch`.

    `num_prompts` is at least 2, `num_rollouts` is even and at least 4, and `wanted` is ascending (shape [J]).

    Raises:
        NoKeptGroupsError: If no group has both correct and incorrect rollouts, or `max_pass_rate` excludes them all.
    """
    prompts = parts.stream.take(num_prompts)
    size = ceil(num_prompts / _CALLS)
    seeds = [int(generator_of(parts, 10 + i).integers(1 << 62)) for i in range(_CALLS)]
    starts = range(0, num_prompts, size)
    parts.observe(Stage("generation", "the pilot"))
    calls = [
        sample_groups(parts, prompts[start : start + size], num_rollouts, seed)
        for start, seed in zip(starts, seeds, strict=False)
    ]
    groups = [g for call in calls for g in call.groups]
    if incomplete := sum(call.num_incomplete for call in calls):
        announce(f"dropped {incomplete} of {num_prompts} prompts: some of their rollouts could not be verified")
    rule = parts.config.dynamic_sampling
    if not any(group.is_mixed and rule.keeps(group) for group in groups):
        raise NoKeptGroupsError(_why_none_kept(groups, rule))
    seconds = [call.clock.seconds() for call in calls]
    quick = sum(s["generation"] + s["verification"] for s in seconds) <= _QUICK_SECONDS

    warm_up = StepTimer(parts, copy.deepcopy(parts.model), scratch)
    products = gradient_products(warm_up.learner.model, groups, parts, generator_of(parts, 1))
    warm_up.finish(calls[0])  # imports and one-time setup are not part of a step
    del warm_up
    timer = StepTimer(parts, copy.deepcopy(parts.model), scratch)
    sizes = timing_sizes(num_prompts, num_rollouts, parts.config.prompts_per_step, int(wanted[-1]), quick)
    timings = time_steps(timer, prompts, sizes, calls[1:], parts.observe)
    return PlanMeasurements(
        counts=PilotCounts.of(parts, groups, wanted, products),
        summary=PilotSummary.of(groups, sum(s["generation"] for s in seconds)),
        cost=StepCost.fit(timings, timer.per_step),
        timings=timings,
    )


def _why_none_kept(groups: Sequence[Group], rule: DynamicSamplingSettings) -> str:
    if mixed := sum(group.is_mixed for group in groups):
        return (
            f"the pass rates of all {mixed} prompts with correct and incorrect rollouts are above "
            f"dynamic_sampling.max_pass_rate = {rule.max_pass_rate:g}, so there are no gradients to plan from; raise "
            "it, or choose harder prompts"
        )
    solved = sum(g.num_correct > 0 for g in groups)
    return (
        f"none of the {len(groups)} prompts has both correct and incorrect rollouts among {groups[0].tree.num_rollouts}"
        f" (all correct: {solved}, all incorrect: {len(groups) - solved}), so there are no pass rates or gradients to "
        f"plan from; raise {option('pilot-rollouts')} or {option('pilot-prompts')}, or choose different prompts or a "
        "different model"
    )
