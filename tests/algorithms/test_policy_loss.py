"""The tree's policy loss against PPO written as loops over the N rollouts and their tokens."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.algorithms.policy_loss import cispo_loss, clipped_policy_loss, gspo_loss, node_weights
from brorl.algorithms.settings import PolicyLossSettings
from brorl.model.logits import NextToken
from brorl.model.logprobs import chunk_logprobs
from brorl.tree import RolloutTree
from small_models import (
    ARCHITECTURES,
    assert_same_gradients,
    flattened_logprobs,
    gradients,
    mostly_slow,
    random_tree,
    rollouts,
    small_model,
)

LOW, HIGH = 0.15, 0.3


def loop_ppo(
    trees: list[RolloutTree],
    advantages: list[np.ndarray],
    new: list[list[Tensor]],
    old: list[np.ndarray],
    dual: float = math.inf,
) -> tuple[Tensor, float, set[str]]:
    """PPO Eq. 7 with decoupled bounds, token by token: min(r A, clip(r) A), mean over all tokens of the batch.

    With a dual clip c the term of a negative advantage is max(min(r A, clip(r) A), c A).

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
                beyond = a < 0 and r > dual
                total = total - (dual * a if beyond else ratio * a if r * a <= bounded else bounded)
                where = "beyond" if beyond else "above" if r > 1 + HIGH else "below" if r < 1 - LOW else "inside"
                cases.add(f"{'+' if a > 0 else '-'} {where}")
                clipped += abs(a) if beyond or r * a > bounded else 0.0
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
    positive_M, negative_M = node_weights(tree, advantage_L)
    np.testing.assert_allclose(positive_M, positive, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(negative_M, negative, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dual", [None, 1.6])
def test_loss_and_gradient_in_the_log_probs_equal_the_loop(dual: float | None, rng: np.random.Generator) -> None:
    trees = [random_tree(rng, num_rollouts=40) for _ in range(3)]
    advantages = [rng.normal(size=t.num_responses) for t in trees]
    new = [torch.from_numpy(rng.uniform(-4, -0.01, t.num_unique_tokens)).requires_grad_() for t in trees]
    old = [perturbed(rng, lp.detach().numpy()) for lp in new]
    rows = [[lp[torch.from_numpy(path)] for _, path in rollouts(t)] for t, lp in zip(trees, new, strict=True)]
    expected, clipped, cases = loop_ppo(trees, advantages, rows, old, dual or math.inf)
    assert cases == (ALL_CASES | {"- beyond"} if dual else ALL_CASES)
    expected_gradients = torch.autograd.grad(expected, new)

    num_tokens = sum(t.num_sampled_tokens for t in trees)
    results = [
        clipped_policy_loss(
            lp, torch.from_numpy(o), *map(torch.from_numpy, node_weights(t, a)),
            clip_low=LOW, clip_high=HIGH, denominator=num_tokens, dual_clip=dual,
        )
        for t, a, lp, o in zip(trees, advantages, new, old, strict=True)
    ]  # fmt: skip
    loss = sum(r.loss for r in results)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert float(sum(r.clipped_weight for r in results)) == pytest.approx(clipped, rel=1e-12)
    assert not results[0].clipped_weight.requires_grad
    for got, reference in zip(torch.autograd.grad(loss, new), expected_gradients, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES, "llama", "hooked"))
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
    for chunk in chunk_logprobs(model, trees, next_token=NextToken(0.9), max_nodes=max_nodes):
        result = clipped_policy_loss(
            chunk.logprob, all_old[chunk.index], positive[chunk.index], negative[chunk.index],
            clip_low=LOW, clip_high=HIGH, denominator=num_tokens,
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
            new[i], old[i], positive[i], negative[i], clip_low=LOW, clip_high=HIGH, denominator=777
        )
        return torch.stack(list(result))

    whole = loss_of(np.arange(size))
    for num_parts in (2, 7, 200):
        parts = np.array_split(rng.permutation(size), num_parts)
        torch.testing.assert_close(sum(loss_of(p) for p in parts), whole, rtol=1e-12, atol=1e-13)


Loop = tuple[Tensor, float, float]


def loop_cispo(tree: RolloutTree, advantage_L: np.ndarray, new_M: Tensor, old_M: np.ndarray) -> Loop:
    """MiniMax-M1 Eq. 4 and 5, token by token; returns minus the sum of gains, and |A| below and above the bounds."""
    total, below, above = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for leaf, path in rollouts(tree):
        for node in path:
            ratio = float(torch.exp(new_M[node].detach() - old_M[node]))
            total = total - min(max(ratio, 1 - LOW), 1 + HIGH) * float(advantage_L[leaf]) * new_M[node]
            below += abs(advantage_L[leaf]) * (ratio < 1 - LOW)
            above += abs(advantage_L[leaf]) * (ratio > 1 + HIGH)
    return total, below, above


def loop_gspo(tree: RolloutTree, advantage_L: np.ndarray, new_M: Tensor, old_M: np.ndarray) -> Loop:
    """GSPO's ratio of a response in each of its tokens; the same returns, for what the clip removed."""
    total, below, above = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for leaf, path in rollouts(tree):
        ratio = torch.exp((new_M[torch.from_numpy(path)] - torch.from_numpy(old_M[path])).sum() / len(path))
        a, s = float(advantage_L[leaf]), ratio.item()
        clipped = min(max(s, 1 - LOW), 1 + HIGH) * a
        total = total - len(path) * (ratio * a if s * a <= clipped else clipped)
        below += abs(a) * len(path) * (a < 0 and s < 1 - LOW)
        above += abs(a) * len(path) * (a > 0 and s > 1 + HIGH)
    return total, below, above


@pytest.fixture
def off_policy(rng: np.random.Generator) -> tuple[RolloutTree, np.ndarray, Tensor, np.ndarray]:
    tree = random_tree(rng, num_rollouts=60, branching=6)
    new_M = torch.from_numpy(rng.uniform(-4, -0.01, tree.num_unique_tokens)).requires_grad_()
    advantage_L, old_M = rng.normal(size=tree.num_responses), perturbed(rng, new_M.detach().numpy())
    for leaf, shift, sign in ((0, -1.0, 1.0), (-1, 1.0, -1.0)):  # one response past each bound for certain
        path = tree.path(int(tree.leaf[leaf]))
        old_M[path], advantage_L[leaf] = new_M.detach().numpy()[path] + shift, sign
    return tree, advantage_L, new_M, old_M


def test_cispo_and_its_gradient_equal_the_loop(off_policy: tuple[RolloutTree, np.ndarray, Tensor, np.ndarray]) -> None:
    tree, advantage_L, new_M, old_M = off_policy
    expected, below, above = loop_cispo(*off_policy)
    weights = [torch.from_numpy(w) for w in node_weights(tree, advantage_L)]
    got = cispo_loss(new_M, torch.from_numpy(old_M), *weights, clip_low=LOW, clip_high=HIGH, denominator=77)
    assert got.loss.item() == pytest.approx(expected.item() / 77, rel=1e-10)
    assert float(got.clipped_low) == pytest.approx(below, rel=1e-10)
    assert float(got.clipped_high) == pytest.approx(above, rel=1e-10)
    assert float(got.clipped_weight) == pytest.approx(below + above, rel=1e-10)
    assert below > 0 < above
    pair = (torch.autograd.grad(loss, new_M)[0] for loss in (got.loss, expected / 77))
    torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-13)


def test_gspo_and_its_derivative_equal_the_loop(off_policy: tuple[RolloutTree, np.ndarray, Tensor, np.ndarray]) -> None:
    tree, advantage_L, new_M, old_M = off_policy
    expected, below, above = loop_gspo(*off_policy)
    new = new_M.detach().numpy()
    got = gspo_loss(tree, advantage_L, new, old_M, clip_low=LOW, clip_high=HIGH, denominator=77)
    assert got.loss == pytest.approx(expected.item() / 77, rel=1e-10)
    assert got.clipped_low == pytest.approx(below, rel=1e-10)
    assert got.clipped_high == pytest.approx(above, rel=1e-10)
    assert below > 0 < above
    (gradient,) = torch.autograd.grad(expected / 77, new_M)
    np.testing.assert_allclose(got.coefficient_M, gradient.numpy(), rtol=1e-9, atol=1e-13)


def test_gspo_ratios_that_overflow_count_only_where_they_are_not_clipped() -> None:
    """A response that is clipped, or has no advantage, adds nothing infinite; another one's loss is infinite."""
    tree = RolloutTree.from_responses([1], [[1], [2], [3]])
    new, old = np.zeros(3), np.full(3, -1e4)
    for advantage_L, loss in (([0.0, 0.0, 0.0], 0.0), ([0.0, 2.0, 0.0], -2 * (1 + HIGH)), ([0.0, 0.0, -1.0], np.inf)):
        got = gspo_loss(tree, np.array(advantage_L), new, old, clip_low=LOW, clip_high=HIGH, denominator=1)
        assert got.loss == pytest.approx(loss)
        assert np.isfinite(got.coefficient_M).all() == np.isfinite(loss)


def test_senseless_settings_are_refused() -> None:
    for wrong, message in (
        ({"clip_low": 0.0}, "greater than 0"),
        ({"clip_low": 1.1}, "less than or equal to 1"),
        ({"clip_high": 0.0}, "greater than 0"),
        ({"dual_clip": 1.28}, r"above 1 \+ loss.clip_high = 1.28, got 1.28; 3 is usual"),
        ({"dual_clip": math.inf}, "finite number"),
        ({"dual_clip": 3.0, "kind": "cispo"}, "part of the ppo loss, and loss.kind = cispo"),
        ({"entropy_coefficient": -0.1}, "greater than or equal to 0"),
    ):
        with pytest.raises(ValueError, match=message):
            PolicyLossSettings(**wrong)  # type: ignore[arg-type]
