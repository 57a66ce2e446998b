"""The edges of the policy losses, and the KL estimators against sums over a whole vocabulary, whose means are exact."""

import math

import numpy as np
import pytest
import torch

from brorl.algorithms.losses import cispo_loss, clipped_policy_loss, gspo_loss, kl_estimates
from brorl.algorithms.settings import PolicyLossSettings
from brorl.tree import RolloutTree
from row_losses import Tally, add_row

LOW, HIGH = 0.15, 0.3
SIGNS = (lambda a: np.maximum(a, 0), lambda a: np.minimum(a, 0))


@pytest.mark.parametrize(("kind", "dual_clip"), [("ppo", None), ("ppo", 3.0), ("cispo", None)])
def test_ratios_that_overflow_count_only_where_they_are_not_clipped(
    kind: str, dual_clip: float | None, rng: np.random.Generator
) -> None:
    """Each node has rollouts of both signs, of one, or of none; in float32 against rows of one token in float64."""
    advantages = [rng.normal(size=3) * [rng.random() < 0.7, sign, sign] for sign in (0, 1) * 20]
    log_ratio_K = rng.choice([-200.0, -0.25, 0.125, 0.875, 200.0], 40)
    if kind == "ppo" and dual_clip is None:  # there, a negative advantage has no bound
        advantages = [np.abs(a) if x > 100 else a for a, x in zip(advantages, log_ratio_K, strict=True)]
    old_K = rng.integers(-4096, 4096, 40) / 1024 - 300  # float32 has these numbers, and their sums with the ratios
    weights = [torch.tensor(np.array([sign(a).sum() for a in advantages]), dtype=torch.float32) for sign in SIGNS]
    new_K = torch.tensor(old_K + log_ratio_K, dtype=torch.float32, requires_grad=True)
    arrays = (new_K, torch.tensor(old_K, dtype=torch.float32), *weights)
    bounds = {"clip_low": LOW, "clip_high": HIGH, "denominator": 7.0}
    loss = (
        cispo_loss(*arrays, **bounds)
        if kind == "cispo"
        else clipped_policy_loss(*arrays, dual_clip=dual_clip, **bounds)
    )
    loss.loss.backward()

    tally, settings = Tally(), PolicyLossSettings(kind=kind, clip_low=LOW, clip_high=HIGH, dual_clip=dual_clip)  # type: ignore[arg-type]
    row_K = torch.tensor(old_K + log_ratio_K, requires_grad=True)
    for new, old, of_node in zip(row_K, torch.tensor(old_K), advantages, strict=True):
        for advantage in of_node:
            add_row(tally, new[None], old[None], float(advantage), np.ones(1), settings)
    (tally.loss / 7).backward()
    assert loss.loss.item() == pytest.approx(tally.loss.item() / 7, rel=1e-4)
    torch.testing.assert_close(new_K.grad, row_K.grad.float(), rtol=1e-3, atol=1e-6)
    assert (loss.clipped_low.item(), loss.clipped_high.item()) == pytest.approx((tally.low, tally.high), rel=1e-4)


def test_a_ratio_that_overflows_with_a_negative_advantage_is_an_infinite_loss() -> None:
    """The learner stops the run then; a finite number would hide the explosion."""
    new, old, weight = torch.zeros(1), torch.full((1,), -200.0), torch.ones(1)
    assert (
        clipped_policy_loss(new, old, 0 * weight, -weight, clip_low=LOW, clip_high=HIGH, denominator=1).loss == np.inf
    )


def test_gspo_ratios_that_overflow_count_only_where_they_are_not_clipped() -> None:
    """A response that is clipped, or has no advantage, adds nothing infinite; another one's loss is infinite."""
    tree = RolloutTree.from_responses([1], [[1], [2], [3]])
    new, old = np.zeros(3), np.full(3, -1e4)
    for advantage_L, loss in (([0.0, 0.0, 0.0], 0.0), ([0.0, 2.0, 0.0], -2 * (1 + HIGH)), ([0.0, 0.0, -1.0], np.inf)):
        got = gspo_loss(tree, np.array(advantage_L), new, old, clip_low=LOW, clip_high=HIGH, denominator=1)
        assert got.loss == pytest.approx(loss)
        assert np.isfinite(got.coefficient_M).all() == np.isfinite(loss)


def test_a_dual_clip_that_cannot_work_is_refused() -> None:
    for wrong, message in (
        ({"dual_clip": 1.28}, r"above 1 \+ loss.clip_high = 1.28, got 1.28; 3 is usual"),
        ({"dual_clip": 3.0, "kind": "cispo"}, "only with loss.kind = ppo, not with cispo"),
    ):
        with pytest.raises(ValueError, match=message):
            PolicyLossSettings(**wrong)  # type: ignore[arg-type]


NO_CLAMP = 50.0


def policies(rng: np.random.Generator, size: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, with gradient, and log-probs of a reference."""
    logits = torch.from_numpy(rng.normal(size=size)).requires_grad_()
    return logits, torch.log_softmax(torch.from_numpy(rng.normal(size=size)), 0)


def divergence(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_k1_and_k3_is_the_divergence(estimator: str, rng: np.random.Generator) -> None:
    logits, reference = policies(rng)
    policy = torch.log_softmax(logits, 0).detach()
    mean = float((policy.exp() * kl_estimates(policy, reference, estimator, NO_CLAMP)).sum())
    assert mean == pytest.approx(float(divergence(policy, reference)), rel=1e-10)


def test_the_mean_of_k2_is_the_divergence_only_to_second_order(rng: np.random.Generator) -> None:
    """Ten times closer, its error is a thousand times smaller."""
    direction, center = rng.normal(size=11), rng.normal(size=11)
    errors = []
    for size in (1e-1, 1e-2):
        policy = torch.log_softmax(torch.from_numpy(center + size * direction), 0)
        reference = torch.log_softmax(torch.from_numpy(center), 0)
        mean = (policy.exp() * kl_estimates(policy, reference, "k2", NO_CLAMP)).sum()
        errors.append(abs(float(mean - divergence(policy, reference))))
    assert errors[1] < errors[0] / 100
    assert errors[0] > 0


def test_a_clamp_of_the_square_root_of_20_is_k2_bounded_at_10(rng: np.random.Generator) -> None:
    """The rule of public code, which bounds the log-ratio at 20 and the estimate at 10: values and gradients."""
    log_ratio = torch.from_numpy(rng.normal(size=500) * 8).requires_grad_()
    own = kl_estimates(log_ratio, torch.zeros(500), "k2", math.sqrt(20))
    public = (log_ratio.clamp(-20, 20) ** 2 / 2).clamp(-10, 10)
    assert 0 < int((public == 10).sum()) < 500
    assert own.tolist() == pytest.approx(public.tolist(), rel=1e-12)
    gradients = [torch.autograd.grad(values.sum(), log_ratio)[0].tolist() for values in (own, public)]
    assert gradients[0] == gradients[1]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_mean_gradient_of_each_as_a_loss_on_policy(estimator: str, rng: np.random.Generator) -> None:
    """k2 has the gradient of KL(pi || ref), k3 that of KL(ref || pi), k1 none."""
    logits, reference = policies(rng)
    policy = torch.log_softmax(logits, 0)
    weight = policy.detach().exp()  # draws do not depend on the parameters
    (got,) = torch.autograd.grad((weight * kl_estimates(policy, reference, estimator, NO_CLAMP)).sum(), logits)
    policy = torch.log_softmax(logits, 0)
    target = {"k1": 0 * policy.sum(), "k2": divergence(policy, reference), "k3": divergence(reference, policy)}[
        estimator
    ]
    (expected,) = torch.autograd.grad(target, logits)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
