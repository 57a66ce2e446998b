"""The pilot of a plan: a few rollouts of a few training prompts, graded, with their gradients.

In: the parts of a run before its first step. Out: what they tell about pass rates, trees and gradients, prompt by
prompt. It changes nothing of the run: gradients are taken on a copy of the model, and draws have seeds of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.algorithms.groups import Group
from brorl.algorithms.policy_loss import node_weights
from brorl.algorithms.response_subset import choose_responses
from brorl.model.logprobs import chunk_logprobs
from brorl.planning.gradient_noise import GradientProducts
from brorl.planning.pilot_counts import PilotCounts
from brorl.planning.tree_growth import TreeGrowth, growth_ratios
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptSupply
from brorl.rollout.engine import Engine
from brorl.sampling import SamplingParams
from brorl.seeds import seed_sequence
from brorl.training.learner import LearnerSettings
from brorl.training.stopwatch import Stopwatch
from brorl.tree import RolloutTree
from brorl.verify.grade import Grader
from brorl.verify.verifier import Verdict

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_SKETCH = 1 << 18  # gradients longer than this are projected at random onto so many numbers
_AT_ONCE = 1 << 22
_SEED_TAG = 0x9140  # keeps the pilot's draws apart from those of training


@dataclass(frozen=True)
class PilotParts:
    """The parts of a run that a pilot measures.

    Attributes:
        engine: Samples trees.
        model: What would be trained; it is only copied.
        stream: Where training prompts come from.
        grader: Verifies and rewards responses.
        sampling: How responses are sampled; independently, without top-p or top-k.
        estimate_advantages: Groups to advantages.
        diagnose: What a step measures of the groups that it sampled.
        learner_settings: How the learner updates.
        prompts_per_step: Groups that a step of the recipe trains on.
        dynamic_sampling: Whether only groups with both outcomes are kept.
        store_every: Rollouts are stored every so many steps; 0 never.
        seed: Seed of the run.
    """

    engine: Engine
    model: PreTrainedModel
    stream: PromptSupply
    grader: Grader
    sampling: SamplingParams
    estimate_advantages: Callable[[Sequence[Group]], list[FloatArray]]
    diagnose: Callable[[Sequence[Group]], object]
    learner_settings: LearnerSettings
    prompts_per_step: int
    dynamic_sampling: bool
    store_every: int
    seed: int

    def generator(self, purpose: int) -> np.random.Generator:
        """Return a generator for one purpose of the pilot, a function of the run's seed alone."""
        return np.random.default_rng(seed_sequence(self.seed, _SEED_TAG, purpose))


@dataclass(frozen=True)
class Sampled:
    """Groups of one call of the engine, with their verdicts."""

    groups: list[Group]
    verdicts: list[list[Verdict]]


@dataclass(frozen=True)
class PilotSummary:
    """What the pilot's rollouts look like; means over its rollouts.

    Attributes:
        num_prompts: Prompts.
        num_rollouts: Rollouts of each.
        share_correct: Share of correct rollouts.
        entropy: Minus the mean log-prob of the sampled tokens, nats per token.
        mean_length: Tokens per rollout.
        share_truncated: Share of rollouts that met the length limit.
        share_duplicate: Share of rollouts that repeat another one of their prompt.
        tokens_per_second: Sampled tokens per second of generation.
    """

    num_prompts: int
    num_rollouts: int
    share_correct: float
    entropy: float
    mean_length: float
    share_truncated: float
    share_duplicate: float
    tokens_per_second: float


def sample(parts: PilotParts, prompts: Sequence[Prompt], num_rollouts: int, seed: int, clock: Stopwatch) -> Sampled:
    """Sample and grade rollouts as a step does.

    Args:
        parts: The parts of the run.
        prompts: P prompts.
        num_rollouts: N.
        seed: Seed of the draws.
        clock: Where the time of generation and verification is added.
    """
    with clock("generation"):
        trees = parts.engine.sample([p.token_ids for p in prompts], num_rollouts, parts.sampling, seed)
    with clock("verification"):
        verdicts = parts.grader.verdicts(prompts, trees)
    judged = zip(prompts, trees, verdicts, strict=True)
    return Sampled([parts.grader.group(p, t, vs, step=1) for p, t, vs in judged], verdicts)


def summarise(groups: Sequence[Group], generation_seconds: float) -> PilotSummary:
    """Return what the pilot's rollouts look like."""
    trees = [g.tree for g in groups]
    rollouts = sum(t.num_rollouts for t in trees)
    tokens = sum(t.num_sampled_tokens for t in trees)
    return PilotSummary(
        num_prompts=len(groups),
        num_rollouts=trees[0].num_rollouts,
        share_correct=sum(g.num_correct for g in groups) / rollouts,
        entropy=-sum(float((t.count * t.logprob).sum()) for t in trees) / tokens,
        mean_length=tokens / rollouts,
        share_truncated=sum(int(t.leaf_count[~t.finished].sum()) for t in trees) / rollouts,
        share_duplicate=1 - sum(t.num_responses for t in trees) / rollouts,
        tokens_per_second=tokens / generation_seconds,
    )


def count_pilot(
    parts: PilotParts,
    groups: Sequence[Group],
    growth: Sequence[TreeGrowth],
    wanted: IntArray,
    products: GradientProducts,
) -> PilotCounts:
    """Return what a plan needs of the pilot, prompt by prompt.

    Args:
        parts: The parts of the run.
        groups: P groups of n rollouts each.
        growth: Expected sizes of their trees at the numbers of rollouts in question.
        wanted: These numbers, ascending, shape [J].
        products: Inner products of the groups' gradients.
    """
    nodes_PJ = np.stack([g.nodes_J for g in growth])
    size = parts.learner_settings.responses_per_verdict
    generator = parts.generator(2)
    trained = [_trained_nodes(g, n, wanted, size, generator) for g, n in zip(groups, nodes_PJ, strict=True)]
    return PilotCounts(
        num_rollouts=groups[0].tree.num_rollouts,
        correct_P=np.array([g.num_correct for g in groups]),
        length_P=np.array([g.tree.num_sampled_tokens / g.tree.num_rollouts for g in groups]),
        wanted_J=wanted,
        nodes_PJ=nodes_PJ,
        responses_PJ=np.stack([g.responses_J for g in growth]),
        trained_PJ=np.stack(trained),
        products=products,
    )


def gradient_products(
    model: PreTrainedModel, groups: Sequence[Group], parts: PilotParts, generator: np.random.Generator
) -> GradientProducts:
    """Estimate the policy gradient of each prompt twice, from halves of its rollouts, and multiply them.

    Args:
        model: A copy of the model at the weights that sampled the groups; its gradients are overwritten.
        groups: P groups of n rollouts each, n even and at least 4.
        parts: The parts of the run.
        generator: Deals the rollouts to the halves.

    Returns:
        The products. Groups that a step would not train on have a gradient of 0.
    """
    half = groups[0].tree.num_rollouts // 2
    length = min(_SKETCH, sum(p.numel() for p in model.parameters() if p.requires_grad))
    first, second = np.zeros((2, len(groups), length))
    model.train()
    for row, group in enumerate(groups):
        if parts.dynamic_sampling and not group.is_mixed:
            continue
        count_L = generator.multivariate_hypergeometric(group.tree.leaf_count, half, method="marginals")
        for halves, half_L in ((first, count_L), (second, group.tree.leaf_count - count_L)):
            halves[row] = prompt_gradient(model, group, half_L, parts.learner_settings)
    model.zero_grad(set_to_none=True)
    return GradientProducts.of(first, second, half)


def prompt_gradient(model: PreTrainedModel, group: Group, count_L: IntArray, settings: LearnerSettings) -> FloatArray:
    """Return the leave-one-out policy gradient of one prompt.

    (1/N) sum_i (r_i - mean of the others' r) grad log pi(y_i): its mean over draws does not depend on N, and it is the
    gradient of the learner's loss at ratio 1, up to a factor.

    Args:
        model: The model; its gradients are overwritten.
        group: The responses and their rewards.
        count_L: How many of the N rollouts gave each response, shape [L].
        settings: Next-token distribution and size of the learner's passes.

    Returns:
        The gradient, or its random projection onto fewer numbers where it is long. Gradients of one model are all
        projected alike, and inner products are kept in the mean.
    """
    model.zero_grad(set_to_none=True)
    num_rollouts = int(count_L.sum())
    mean = float(count_L @ group.reward_L) / num_rollouts
    advantage_L = (group.reward_L - mean) / (num_rollouts - 1)  # times N / (N - 1), over N
    kept = np.flatnonzero((count_L > 0) & (advantage_L != 0))
    if kept.size:
        tree, _ = group.tree.select(kept)
        weights = node_weights(tree, advantage_L[kept] * count_L[kept] / tree.leaf_count)
        _accumulate(model, tree, weights.positive_M + weights.negative_M, settings)
    return _sketch([p for p in model.parameters() if p.requires_grad])


def _accumulate(model: PreTrainedModel, tree: RolloutTree, weight_M: FloatArray, settings: LearnerSettings) -> None:
    """Add the gradient of the weighted sum of the tree's log-probs to the model's."""
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    weight = torch.from_numpy(weight_M).to(model.device, dtype)
    device = model.device.type
    with torch.autocast(device, torch.bfloat16) if settings.autocast else nullcontext():
        for chunk in chunk_logprobs(model, [tree], next_token=settings.next_token, max_nodes=settings.max_nodes):
            (weight[chunk.index] * chunk.logprob).sum().backward()


def _sketch(parameters: Sequence[Tensor]) -> FloatArray:
    """Return the gradient in one piece; a long one with random signs, added up in `_SKETCH` places (a count sketch)."""
    total = sum(p.numel() for p in parameters)
    device = parameters[0].device
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if total <= _SKETCH:
        whole: FloatArray = torch.cat([g.flatten().double() for g in gradients]).cpu().numpy()
        return whole
    signs = torch.Generator(device).manual_seed(total)
    sketch = torch.zeros(_SKETCH, dtype=torch.float64, device=device)
    for gradient in gradients:
        for piece in gradient.flatten().split(_AT_ONCE):
            sign = torch.randint(0, 2, piece.shape, generator=signs, device=device, dtype=torch.int8) * 2 - 1
            signed = torch.nn.functional.pad(piece * sign, (0, -piece.numel() % _SKETCH))
            sketch += signed.view(-1, _SKETCH).sum(0, dtype=torch.float64)
    projected: FloatArray = sketch.cpu().numpy()
    return projected


def _trained_nodes(
    group: Group, nodes_J: FloatArray, wanted: IntArray, size: int, generator: np.random.Generator
) -> FloatArray:
    """Return the nodes that go through the loss: all, or those of at most `size` responses of each verdict.

    How many nodes a chosen response has is taken from a choice among the pilot's responses: an approximation.
    """
    tree = group.tree
    if not size:
        return nodes_J
    advantage_L = group.reward_L - np.average(group.reward_L, weights=tree.leaf_count)
    chosen, _ = choose_responses(tree.leaf_count * advantage_L, group.correct_L, size, generator)
    part = tree.select(chosen)[0] if chosen.size else tree
    per_response = part.num_unique_tokens / part.num_responses
    ratio_JL = growth_ratios(tree.sum_along_paths(tree.logprob)[tree.leaf], tree.num_rollouts, wanted)
    kept_J = np.zeros(nodes_J.size)
    for verdict in (False, True):
        kept_J += np.minimum(ratio_JL[:, group.correct_L == verdict].sum(1), size)
    trained_J: FloatArray = np.minimum(nodes_J, kept_J * per_response)
    return trained_J
