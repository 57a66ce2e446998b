"""A mini-batch: arrays with one number per node, and the loss of a chunk of nodes, with sums for the metrics.

All counts, masks and denominators are fixed before the first update; model passes only look them up. Losses and sums
add up over the chunks of a mini-batch, and over ranks. Dimensions: K nodes of the mini-batch, S sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.algorithms.groups import Group, required
from brorl.algorithms.importance import (
    check_sampler_logprobs,
    choose_responses,
    importance_factors,
    mismatch,
)
from brorl.algorithms.losses import (
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    gspo_loss,
    kl_estimates,
    loss_denominator,
    node_weights,
    response_weights,
)
from brorl.algorithms.settings import PolicyLossSettings
from brorl.arrays import FloatArray
from brorl.config.settings import TrainConfig
from brorl.model.device import to_device
from brorl.model.logprobs import ChunkLogprobs
from brorl.training.policy_logprobs import PolicyLogprobs
from brorl.tree import RolloutTree

NUM_SUMS = 7
"""Length of the float64 vector of sums over a mini-batch's nodes, without gradients.

In this order: the policy loss, without penalty and bonus; the |weight| whose gradient clipping removed; its parts at
the lower and upper bounds; old minus new log-prob (nats) over the tokens of all rollouts; the estimate of the KL from
the reference (nats) and the entropy (nats) of the next-token distribution, both weighted by `MiniBatch.sampled_K`.
"""


def to_tensor(model: PreTrainedModel, arrays: Sequence[NDArray[Any]]) -> Tensor:
    """Concatenate arrays on a model's device, in float64 for a float64 model and in float32 otherwise."""
    dtype = np.float64 if model.dtype == torch.float64 else np.float32
    return to_device(np.concatenate([np.empty(0), *arrays]).astype(dtype), model.device)


def choose_trained(
    group: Group, max_responses_per_outcome: int, mask_truncated: bool, generator: np.random.Generator
) -> Group | None:
    """Choose which responses of a group are backpropagated; None if none are.

    With `max_responses_per_outcome` above 0, responses with zero advantage are never chosen: neither a KL penalty in
    the loss nor an entropy bonus sees them.
    """
    tree = group.tree
    allowed_L = tree.finished if mask_truncated else np.ones(tree.num_responses, np.bool_)
    if max_responses_per_outcome:
        total_L = tree.leaf_count * required(group.advantage_L) * allowed_L
        chosen, factor_K = choose_responses(total_L, group.correct_L, max_responses_per_outcome, generator)
        return replace(group.select(chosen), factor_L=factor_K) if chosen.size else None
    if allowed_L.all():
        return group
    chosen = np.flatnonzero(allowed_L)
    return group.select(chosen) if chosen.size else None


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Trees, and arrays over their nodes, concatenated over the trees (K nodes in total)."""

    # the responses that go through the model; their advantages include all factors except the counts
    groups: list[Group]
    old_logprob_K: Tensor  # log-probs (nats) of the old policy, shape [K]
    positive_K: Tensor  # summed positive advantages, shape [K]
    negative_K: Tensor  # summed negative advantages, shape [K]
    count_K: Tensor  # rollouts that sampled each node's token, shape [K]
    reference_logprob_K: Tensor | None  # log-probs of the reference, shape [K]; None without a reference
    sampled_K: Tensor  # `count_K` estimated from chosen responses, weighted by 1 / chance of being chosen, shape [K]
    token_weight_K: Tensor  # `sampled_K` times the aggregation's weights, for the KL penalty, shape [K]
    # Divides the loss, and covers all rollouts of the groups, so every group of a step has the same weight, even if the
    # step's mini-batches differ in size.
    denominator: float
    num_tokens: float  # the denominator of a mean over tokens, regardless of the aggregation
    kept_tokens: float  # sampled tokens not removed by a mask

    @property
    def trees(self) -> list[RolloutTree]:
        """The trees that go through the model."""
        return [group.tree for group in self.groups]

    def totals(self) -> Tensor:
        """Return the metrics' denominators: summed |weight|, `sampled_K` and `count_K`, shape [3]."""
        weight = (self.positive_K - self.negative_K).sum()
        return torch.stack([weight, self.sampled_K.sum(), self.count_K.sum()]).double()


def make_mini_batch(
    whole: Sequence[RolloutTree],
    trained: Sequence[Group],
    config: TrainConfig,
    fraction: float,
    tensor: Callable[[Sequence[NDArray[Any]]], Tensor],
) -> MiniBatch:
    """Sum advantages and counts over the rollouts through each node, and return the mini-batch.

    Args:
        whole: The trees of all the mini-batch's groups; they determine the denominator.
        trained: The responses to backpropagate, with advantages and log-probs.
        config: The loss and the importance correction.
        fraction: The mini-batch's number of groups, divided by the mean over the step's mini-batches.
        tensor: Concatenates arrays on the model's device.
    """
    loss = config.loss
    groups, positive, negative, sampled, token_weight = [], [], [], [], []
    kept_tokens = 0.0
    for group in trained:
        tree = group.tree
        factor_L = np.ones(tree.num_responses) if group.factor_L is None else group.factor_L
        factor_M, kept_L = importance_factors(tree, required(group.old_logprob_M), config.importance)
        aggregation_L = response_weights(tree, loss.aggregation)
        advantage_L = required(group.advantage_L) * factor_L * aggregation_L * kept_L
        positive_M, negative_M = node_weights(tree, advantage_L)
        positive.append(positive_M * factor_M)
        negative.append(negative_M * factor_M)
        sampled.append(tree.token_weights(tree.leaf_count * factor_L))
        token_weight.append(tree.token_weights(tree.leaf_count * factor_L * aggregation_L))
        kept_tokens += float(tree.token_weights(tree.leaf_count * kept_L)[factor_M > 0].sum())
        # a loss over whole responses (GSPO) uses the mean of a response's token factors
        of_response_L = tree.sum_over_responses(factor_M * ~tree.given) / tree.length
        groups.append(replace(group, advantage_L=advantage_L * of_response_L))
    longest = config.longest_response
    denominator = loss_denominator(whole, loss.aggregation, longest, loss.mask_truncated)
    return MiniBatch(
        groups=groups,
        old_logprob_K=tensor([required(group.old_logprob_M) for group in groups]),
        positive_K=tensor(positive),
        negative_K=tensor(negative),
        count_K=tensor([group.tree.sampled_count for group in groups]),
        reference_logprob_K=tensor([required(g.reference_logprob_M) for g in groups])
        if config.kl.coefficient
        else None,
        sampled_K=tensor(sampled),
        token_weight_K=tensor(token_weight),
        denominator=denominator / fraction,
        num_tokens=loss_denominator(whole, "token_mean", longest, loss.mask_truncated) / fraction,
        kept_tokens=kept_tokens,
    )


def prepare_mini_batches(
    groups: Sequence[Group], is_fresh: Sequence[bool], logprobs: PolicyLogprobs, generator: np.random.Generator
) -> tuple[list[MiniBatch], dict[str, Any]]:
    """Return this rank's part of every mini-batch of a step, and entries for `UpdateRecord`.

    Args:
        groups: The groups of the step, with advantages.
        is_fresh: For each group, whether this step sampled it, in which case no earlier step computed its old
            log-probs.
        logprobs: Computes log-probs under the current weights and the reference; all ranks call this function.
        generator: Chooses the groups of each mini-batch, and the responses to train on if not all of them.
    """
    config = logprobs.config
    size = config.optimizer.max_responses_per_outcome
    index_of_batch = np.array_split(generator.permutation(len(groups)), config.optimizer.mini_batches)
    chosen = {
        i: choose_trained(groups[i], size, config.loss.mask_truncated, generator)
        for i in np.concatenate(index_of_batch).tolist()
    }
    trained = {i: group for i, group in chosen.items() if group}
    if config.importance.correction != "none":
        check_sampler_logprobs([group.tree for group in trained.values()])
    trained = dict(zip(trained, logprobs.with_all_logprobs(list(trained.values())), strict=True))

    batches = []
    tensor = partial(to_tensor, logprobs.model)
    for index in index_of_batch:
        trees = [groups[i].tree for i in index]
        local = logprobs.local_groups([trained[i] for i in index if i in trained])
        batches.append(make_mini_batch(trees, local, config, len(index) * len(index_of_batch) / len(groups), tensor))
    num_tokens = sum(group.tree.num_sampled_tokens for group in trained.values())
    kept = sum(logprobs.ranks.gather(sum(batch.kept_tokens for batch in batches)))
    return batches, {
        "trained_nodes": sum(group.tree.num_nodes for group in trained.values()),
        **_mismatch_metrics([group for i, group in trained.items() if is_fresh[i]], config),
        "masked_fraction": 1.0 - kept / num_tokens if num_tokens else 0.0,
    }


def _mismatch_metrics(fresh: Sequence[Group], config: TrainConfig) -> Mapping[str, float | None]:
    """Return how far the old policy is from the sampler, over the fresh groups; None if unknown."""
    trees = [group.tree for group in fresh]
    if not (config.recompute_old_logprobs and trees) or any(np.isnan(tree.logprob).any() for tree in trees):
        return dict.fromkeys(("mismatch_mean", "mismatch_max", "mismatch_kl"))
    return mismatch(trees, [required(group.old_logprob_M) for group in fresh])


def zero_sums(device: torch.device) -> Tensor:
    """Return zero sums, shape [S]."""
    return torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)


def means(sums_S: Tensor, totals_3: Tensor) -> dict[str, float]:
    """Divide sums by the mini-batch's weights and tokens. See `MiniBatch.totals` and `UpdateRecord`."""
    loss, clipped, clipped_low, clipped_high, old_policy_kl, reference_kl, entropy = sums_S.unbind()
    weight, sampled, count = totals_3[0].clamp(min=1e-30), totals_3[1].clamp(min=1), totals_3[2].clamp(min=1)
    metrics = {
        "loss": loss,
        "clip_fraction": clipped / weight,
        "clip_low_fraction": clipped_low / weight,
        "clip_high_fraction": clipped_high / weight,
        "old_policy_kl": old_policy_kl / count,
        "reference_kl": reference_kl / sampled,
        "bonus_entropy": entropy / sampled,
    }
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))  # one transfer from a GPU


def chunk_loss(
    chunk: ChunkLogprobs, batch: MiniBatch, config: TrainConfig, coefficient_K: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a chunk's loss (a scalar with a gradient) and the sums over its nodes, shape [S].

    Args:
        chunk: Nodes of the mini-batch, with log-probs.
        batch: The mini-batch.
        config: The policy term, the KL penalty and the entropy bonus.
        coefficient_K: For a loss over whole responses (GSPO), its derivative with respect to each node's log-prob,
            shape [K]; the sums then omit the policy loss and its clips. None for PPO and CISPO.
    """
    kl = config.kl
    index = chunk.index
    old_kl = (batch.count_K[index] * (batch.old_logprob_K[index] - chunk.logprob.detach())).sum()
    zero = torch.zeros_like(old_kl)
    if coefficient_K is None:
        policy = _policy_loss(chunk, batch, config.loss)
        loss = policy.loss
        sums = (loss.detach(), *policy[1:])
    else:
        loss = (coefficient_K[index] * chunk.logprob).sum()
        sums = (zero,) * 4
    reference_kl = entropy = zero
    if batch.reference_logprob_K is not None:
        estimate_K = kl_estimates(chunk.logprob, batch.reference_logprob_K[index], kl.estimator, kl.clamp)
        reference_kl = (batch.sampled_K[index] * estimate_K.detach()).sum()
        match kl.placement:
            case "loss":
                loss = loss + kl.coefficient * (batch.token_weight_K[index] * estimate_K).sum() / batch.denominator
            case "reward":
                pass  # the rewards already include the penalty
            case _:
                assert_never(kl.placement)
    if chunk.entropy is not None:
        entropy = (batch.sampled_K[index] * chunk.entropy.detach()).sum()
        bonus = (batch.sampled_K[index] * chunk.entropy).sum() / batch.num_tokens
        loss = loss - config.loss.entropy_coefficient * bonus
    return loss, torch.stack([*sums, old_kl, reference_kl, entropy]).double()


def _policy_loss(chunk: ChunkLogprobs, batch: MiniBatch, settings: PolicyLossSettings) -> PolicyLoss:
    """Return the loss of nodes, without penalty and bonus."""
    index = chunk.index
    low, high = settings.clip
    arrays = chunk.logprob, batch.old_logprob_K[index], batch.positive_K[index], batch.negative_K[index]
    match settings.kind:
        case "ppo":
            return clipped_policy_loss(
                *arrays, clip_low=low, clip_high=high, denominator=batch.denominator, dual_clip=settings.dual_clip
            )
        case "cispo":
            return cispo_loss(*arrays, clip_low=low, clip_high=high, denominator=batch.denominator)
        case "gspo":
            raise ValueError(
                "gspo is a loss over whole responses; pass the coefficients from `sequence_loss_coefficients`"
            )
        case _:
            assert_never(settings.kind)


def sequence_loss_coefficients(
    batch: MiniBatch, logprobs: Sequence[FloatArray], settings: PolicyLossSettings
) -> tuple[list[FloatArray], Tensor]:
    """Return the derivative of GSPO's loss with respect to each node's log-prob, and the sums, shape [S].

    The sums contain the loss and its clips, and are 0 elsewhere.

    Args:
        batch: The mini-batch.
        logprobs: Log-probs (nats) of each tree under the current weights, shape [M].
        settings: Bounds of the ratio.
    """
    low, high = settings.clip
    bounds = {"clip_low": low, "clip_high": high, "denominator": batch.denominator}
    losses = [
        gspo_loss(group.tree, required(group.advantage_L), new_M, required(group.old_logprob_M), **bounds)
        for group, new_M in zip(batch.groups, logprobs, strict=True)
    ]
    loss = sum(s.loss for s in losses)
    clipped_low, clipped_high = sum(s.clipped_low for s in losses), sum(s.clipped_high for s in losses)
    sums = zero_sums(batch.count_K.device)
    sums[:4] = torch.tensor([loss, clipped_low + clipped_high, clipped_low, clipped_high], dtype=torch.float64)
    return [s.coefficient_M for s in losses], sums
