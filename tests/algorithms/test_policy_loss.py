"""The tree's policy loss against PPO written as loops over the N rollouts and their tokens."""

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.algorithms.policy_loss import clipped_policy_loss, node_weights
from brorl.model.logprobs import tree_parts
from brorl.tree import RolloutTree
from small_models import (
    ARCHITECTURES,
    assert_same_gradients,
    flattened_logprobs,
    gradients,
    random_tree,
    rollouts,
    small_model,
)

LOW, HIGH = 0.15, 0.3


def loop_ppo(
    trees: list[RolloutTree], advantages: list[np.ndarray], new: list[list[Tensor]], old: list[np.ndarray]
) -> tuple[Tensor, float, set[str]]:
    """PPO Eq. 7 with decoupled bounds, token by token: min(r A, clip(r) A), mean over all tokens of the batch.

    Returns the loss, the summed |A| of tokens whose gradient the clip removed, and which cases occurred.
    """
    total, num_tokens, clipped, cases = torch.zeros((), dtype=torch.float64), 0, 0.0, set()
    for tree, advantage_L, new_N, old_M in zip(trees, advantages, new, old, strict=True):
        for (leaf, path), row in zip(rollouts(tree), new_N, strict=True):
            a = float(advantage_L[leaf])
            for node, logprob in zip(path, row, strict=True):
                ratio = torch.exp(logprob - old_M[node])
                r = ratio.item()
                bounded = min(max(r, 1 - LOW), 1 + HIGH) * a
                total = total - (ratio * a if r * a <= bounded else bounded)
                where = "above" if r > 1 + HIGH else "below" if r < 1 - LOW else "inside"
                cases.add(f"{'+' if a > 0 else '-'} {where}")
                clipped += abs(a) if r * a > bounded else 0.0
                num_tokens += 1
    return total / num_tokens, clipped, cases


ALL_CASES = {f"{sign} {where}" for sign in "+-" for where in ("above", "inside", "below")}


def perturbed(rng: np.random.Generator, logprob_M: np.ndarray) -> np.ndarray:
    """Old log-probs far enough from the new ones that ratios fall on both sides of both bounds."""
    return logprob_M + rng.normal(size=logprob_M.shape) * 0.5


def test_node_weights_equal_a_loop_over_rollouts(rng: np.random.Generator) -> None:
    tree = random_tree(rng)
    advantage_L = rng.normal(size=tree.num_responses)
    advantage_L[0] = 0.0
    positive, negative = np.zeros(tree.num_unique_tokens), np.zeros(tree.num_unique_tokens)
    for leaf, path in rollouts(tree):
        for node in path:
            positive[node] += max(advantage_L[leaf], 0.0)
            negative[node] += min(advantage_L[leaf], 0.0)
    weights = node_weights(tree, advantage_L)
    np.testing.assert_allclose(weights.positive_M, positive, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(weights.negative_M, negative, rtol=1e-12, atol=1e-14)


def test_loss_and_gradient_in_the_log_probs_equal_the_loop(rng: np.random.Generator) -> None:
    trees = [random_tree(rng, num_rollouts=40) for _ in range(3)]
    advantages = [rng.normal(size=t.num_responses) for t in trees]
    new = [torch.from_numpy(rng.uniform(-4, -0.01, t.num_unique_tokens)).requires_grad_() for t in trees]
    old = [perturbed(rng, lp.detach().numpy()) for lp in new]
    rows = [[lp[torch.from_numpy(path)] for _, path in rollouts(t)] for t, lp in zip(trees, new, strict=True)]
    expected, clipped, cases = loop_ppo(trees, advantages, rows, old)
    assert cases == ALL_CASES
    expected_gradients = torch.autograd.grad(expected, new)

    num_tokens = sum(t.num_sampled_tokens for t in trees)
    results = [
        clipped_policy_loss(
            lp, torch.from_numpy(o), *map(torch.from_numpy, node_weights(t, a)),
            clip_low=LOW, clip_high=HIGH, num_tokens=num_tokens,
        )
        for t, a, lp, o in zip(trees, advantages, new, old, strict=True)
    ]  # fmt: skip
    loss = sum(r.loss for r in results)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert float(sum(r.clipped_weight for r in results)) == pytest.approx(clipped, rel=1e-12)
    assert not results[0].clipped_weight.requires_grad
    for got, reference in zip(torch.autograd.grad(loss, new), expected_gradients, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("max_nodes", [3, 25, None])
def test_gradient_in_the_weights_equals_ppo_on_the_flattened_batch(
    architecture: str, max_nodes: int | None, rng: np.random.Generator
) -> None:
    """The whole claim at once: model, tree, two weights per node, clip, token mean, in any number of parts."""
    model = small_model(architecture, seed=int(rng.integers(1 << 30)))
    trees = [random_tree(rng, num_rollouts=10) for _ in range(3)]
    advantages = [rng.normal(size=t.num_responses) for t in trees]
    flat = flattened_logprobs(model, trees, temperature=0.9)
    old = []
    for tree, rows in zip(trees, flat, strict=True):
        logprob_M = np.zeros(tree.num_unique_tokens)
        for (_, path), row in zip(rollouts(tree), rows, strict=True):
            logprob_M[path] = row.detach().numpy()
        old.append(perturbed(rng, logprob_M))
    expected, _, cases = loop_ppo(trees, advantages, flat, old)
    assert cases == ALL_CASES
    expected.backward()
    expected_gradients = gradients(model)

    model.zero_grad()
    weights = [node_weights(t, a) for t, a in zip(trees, advantages, strict=True)]
    positive, negative = (torch.from_numpy(np.concatenate(w)) for w in zip(*weights, strict=True))
    all_old = torch.from_numpy(np.concatenate(old))
    num_tokens = sum(t.num_sampled_tokens for t in trees)
    loss, parts = 0.0, 0
    for part in tree_parts(model, trees, temperature=0.9, max_nodes=max_nodes):
        result = clipped_policy_loss(
            part.logprob, all_old[part.index], positive[part.index], negative[part.index],
            clip_low=LOW, clip_high=HIGH, num_tokens=num_tokens,
        )  # fmt: skip
        result.loss.backward()
        loss, parts = loss + result.loss.item(), parts + 1
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    assert_same_gradients(gradients(model), expected_gradients)
    assert parts > 3 or max_nodes is None


def test_the_loss_adds_up_over_any_split_into_parts(rng: np.random.Generator) -> None:
    size = 200
    new, old = (torch.from_numpy(rng.uniform(-3, 0, size)) for _ in range(2))
    positive = torch.from_numpy(rng.exponential(size=size))
    negative = -torch.from_numpy(rng.exponential(size=size))

    def loss_of(index: np.ndarray) -> torch.Tensor:
        i = torch.from_numpy(index)
        result = clipped_policy_loss(
            new[i], old[i], positive[i], negative[i], clip_low=LOW, clip_high=HIGH, num_tokens=777
        )
        return torch.stack(list(result))

    whole = loss_of(np.arange(size))
    for num_parts in (2, 7, 200):
        parts = np.array_split(rng.permutation(size), num_parts)
        torch.testing.assert_close(sum(loss_of(p) for p in parts), whole, rtol=1e-12, atol=1e-13)
